"""Several processes that do not fit together: each ends with one clear line, or the run goes on.

Processes are real ones on this machine. What is tried: a peer that is stopped for a minute, one
that never comes, counts, recipes, data and sources that differ, a port in use, two trainers of one
folder, and the deletion of a run that is training.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.flags import with_devices
from tests.spawn import REPOSITORY, free_port
from tests.training.campaign import RECIPE
from windlass.checkpoint.store import folder_of, newest_step

KEYS = ["train.evaluate_every=null", "data.validation=0", "train.accumulation=1"]
STOPPED_SECONDS = 60
LONGEST = 600.0  # seconds, for a process to end


class Outcome(NamedTuple):
    """How a process ended, and its lines."""

    code: int
    lines: list[str]

    def is_as(self, code: int, said: str) -> bool:
        """Test the code, and that it has said one line like this and no traceback."""
        return (
            self.code == code
            and any(re.search(said, line) for line in self.lines)
            and not any("Traceback" in line for line in self.lines)
        )


def prove() -> dict[str, Any]:
    cases: dict[str, Callable[[Path], dict[str, Any]]] = {
        "peer_stopped_for_a_minute": stopped,
        "coordinator_that_never_comes": never_comes(1, r"waiting for process 0 at 127.0.0.1:\d+"),
        "process_that_never_comes": never_comes(0, r"waiting for process 1 of 2, for 1\d s so far"),
        "different_counts": different_counts,
        "different_recipes": different_recipes,
        "different_data": different_data,
        "different_source": different_source,
        "port_in_use": port_in_use,
        "two_trainers_of_one_folder": two_trainers,
        "deletion_of_a_run_that_trains": deletion,
    }
    found = {}
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder)
            (here / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
            found[name] = case(here)
    held = [name for name, one in found.items() if one["holds"]]
    counts = {"tried": len(found), "held": len(held)}
    return {"holds": len(held) == len(found), **counts, **found}


class Started:
    """One process of `windlass`, with its output in a file."""

    def __init__(self, here: Path, words: Sequence[str], environ: Mapping[str, str] | None = None):
        self.log = here / f"output-{os.urandom(4).hex()}.txt"
        own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY), "XLA_FLAGS": with_devices(1)}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "windlass", *words],
                cwd=here,
                env={**os.environ, **own, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")

    @property
    def trainer(self) -> int:
        """The child in which it trains."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def until(self, said: str) -> None:
        """Wait until it has said this, or has ended."""
        while not re.search(said, self.output) and self.process.poll() is None:
            time.sleep(0.05)

    def wait(self) -> Outcome:
        return Outcome(self.process.wait(LONGEST), self.output.splitlines())


@contextmanager
def together(
    here: Path,
    counts: Sequence[int] = (2, 2),
    keys: Sequence[Sequence[str]] = ((), ()),
    places: Sequence[Path] | None = None,
    environs: Sequence[Mapping[str, str]] = ({}, {}),
) -> Iterator[list[Started]]:
    """Processes of one run, each with the number of processes, keys and folder of its own."""
    at, started = f"127.0.0.1:{free_port()}", []
    try:
        for process, count in enumerate(counts):
            words = ["train", "tiny.yaml", f"run.dir={here / 'run'}", *KEYS, *keys[process]]
            words += ["--coordinator", at, "--processes", str(count), "--process", str(process)]
            place = here if places is None else places[process]
            started.append(Started(place, words, environs[process]))
        yield started
    finally:
        ended(started)


def ended(started: Sequence[Started]) -> None:
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()


def case(holds: bool, *outcomes: Outcome) -> dict[str, Any]:
    return {"holds": holds, "ended": [{"code": x.code, "said": x.lines[-2:]} for x in outcomes]}


def refused(started: Sequence[Started], said: str, code: int = 2) -> dict[str, Any]:
    """All processes end with a line like this."""
    outcomes = [one.wait() for one in started]
    return case(all(one.is_as(code, said) for one in outcomes), *outcomes)


def stopped(here: Path) -> dict[str, Any]:
    """A peer that is stopped is given up, says so when it wakes, and the run goes on."""
    keys = [["train.steps=4000", "checkpoint.every=20"]] * 2
    with together(here, keys=keys) as (first, second):
        first.until(r"step +\d\d/4000")
        if first.process.poll() is not None:
            return case(False, first.wait(), second.wait())
        number = second.trainer
        os.kill(number, signal.SIGSTOP)
        began = time.monotonic()
        survivor = first.wait()
        time.sleep(max(0.0, STOPPED_SECONDS - (time.monotonic() - began)))
        os.kill(number, signal.SIGCONT)
        woken = second.wait()
    newest = newest_step(here / "run") or 0
    with together(here, keys=[[f"train.steps={newest + 5}"]] * 2) as again:
        after = [one.wait() for one in again]
    gone = survivor.is_as(1, r"^process 1 \(.*\) is gone: .* goes on from there")
    holds = gone and woken.is_as(1, "process 0 .* is gone|ended the run|is gone")
    holds &= after[0].is_as(0, f"resuming from step {newest} of") and after[1].code == 0
    return case(holds, survivor, woken, *after)


def never_comes(process: int, said: str) -> Callable[[Path], dict[str, Any]]:
    """A process that is alone says for whom it waits, and Ctrl-C ends it."""

    def alone(here: Path) -> dict[str, Any]:
        place = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2"]
        one = Started(here, ["train", "tiny.yaml", *place, "--process", str(process)])
        try:
            one.until("waiting for process")
            one.process.send_signal(signal.SIGINT)
            outcome = one.wait()
        finally:
            ended([one])
        return case(outcome.is_as(130, said), outcome)

    return alone


def different_counts(here: Path) -> dict[str, Any]:
    with together(here, counts=(3, 2)) as started:
        return refused(
            started, r"process 1 \(.*\) was started as one of 2 processes, and process 0"
        )


def different_recipes(here: Path) -> dict[str, Any]:
    with together(here, keys=([], ["optim.learning_rate=0.002"])) as started:
        return refused(started, "process 1 has optim.learning_rate 0.002, process 0 has 0.003")


def different_data(here: Path) -> dict[str, Any]:
    """The same recipe in folders whose files differ."""
    places = [here / name for name in ("a", "b")]
    source = {"source": {"kind": "jsonl", "path": "rows.jsonl"}}
    for number, place in enumerate(places):
        place.mkdir()
        (place / "tiny.yaml").write_text(yaml.safe_dump(RECIPE | {"data": RECIPE["data"] | source}))
        rows = [json.dumps({"text": f"{number} and {row}. "}) for row in range(500)]
        (place / "rows.jsonl").write_text("\n".join(rows))
    with together(here, places=places) as started:
        return refused(started, "hosts have different data: process 0 has documents")


def different_source(here: Path) -> dict[str, Any]:
    shutil.copytree(REPOSITORY / "windlass", here / "other" / "windlass")
    file = here / "other" / "windlass" / "version.py"
    file.write_text(file.read_text() + "# another line\n")
    with together(here, environs=({}, {"PYTHONPATH": str(here / "other")})) as started:
        return refused(started, "process 1 has windlass.source .* start every host with the same")


def port_in_use(here: Path) -> dict[str, Any]:
    with socket.create_server(("", 0)) as other:
        place = ["--coordinator", f"127.0.0.1:{other.getsockname()[1]}", "--processes", "2"]
        one = Started(here, ["train", "tiny.yaml", *place, "--process", "0"])
        return refused([one], r"cannot listen for the others at .* \(Address already in use\)")


def two_trainers(here: Path) -> dict[str, Any]:
    with training(here) as first:
        words = ["train", "tiny.yaml", f"run.dir={here / 'run'}", *KEYS, "train.steps=4000"]
        second = Started(here, words)
        found = refused([second], f"is being trained by process {first.process.pid}; wait for it")
        return found | {"holds": found["holds"] and first.process.poll() is None}


def deletion(here: Path) -> dict[str, Any]:
    with training(here) as first:
        second = Started(here, ["runs", "--delete", str(here / "run"), "--yes"])
        found = refused([second], f"is being trained by process {first.process.pid}; stop that")
        is_whole = first.process.poll() is None and folder_of(here / "run").is_dir()
        return found | {"holds": found["holds"] and is_whole}


@contextmanager
def training(here: Path) -> Iterator[Started]:
    """One process that trains alone, until the block ends."""
    words = ["train", "tiny.yaml", f"run.dir={here / 'run'}", *KEYS, "train.steps=4000"]
    first = Started(here, words)
    try:
        first.until(r"step +\d+/4000")
        yield first
    finally:
        ended([first])
