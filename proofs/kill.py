"""200 random signals, in every phase of every kind of run: started again, it ends in the same bits.

A run is disturbed once in each phase, in random order and by random signals, and started again by
the same command each time. It is compared with one that nothing disturbed: weights and optimizer
state, every record of its metrics, samples. A phase is known by what the program says, and by the
files that it makes.
"""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import yaml

from tests import published
from tests.flags import quick
from tests.spawn import REPOSITORY, free_port
from tests.training import test_reference as pairs
from tests.training.campaign import RECIPE, weights
from windlass.checkpoint.archive import UNFINISHED
from windlass.errors import UserError
from windlass.run_folder import folder as folders
from windlass.run_folder.verify import verify
from windlass.telemetry import metrics

SEED = 15
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SAVED_AT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the others end it where it is
PHASES = ("import", "tokenise", "compile", "train", "evaluate", "save", "finish")
RUNS = {
    **{"two_processes": 5, "lora": 5, "ema_accumulation": 5, "preference": 5},
    **{"distilled": 5, "rounded": 5, "plain": 5},
}
LEAST = 200  # signals that are sent: a run that was over by then is made up for by another
AT_ONCE = max(
    5, os.cpu_count() or 1
)  # runs, which wait for disks and for each other much of the time
STEPS, EVALUATE, SAVE = 30, 6, 5
ON_CPU = {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick()}
LONGEST = 180.0  # seconds until a process has ended after a signal, or has trained to the end
LOOK = 0.01  # seconds
# Parts of the names of what tells of the machine and the moment, in a record of the metrics.
OF_THE_MOMENT = ("time", "second", "_ms", "memory_bytes", "mfu")


class Kind(NamedTuple):
    """A kind of run."""

    name: str
    recipe: dict[str, Any]
    processes: int = 1


class Shot(NamedTuple):
    """A signal that was sent, and what became of the processes."""

    kind: str
    run: str
    signal: str
    phase: str  # in which it came
    target: str
    codes: list[int | None]
    wrong: list[str]


def prove() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return campaign(Path(folder), RUNS, LEAST)


def campaign(here: Path, runs: Mapping[str, int], least: int = 0) -> dict[str, Any]:
    """Disturb some runs of each kind, and one more of each until enough signals were sent."""
    # A core for each SIGQUIT would fill the folder.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for number in (signal.SIGHUP, signal.SIGQUIT):  # what a shell ignores behind an &, or nohup
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kinds = [kind for kind in described(here) if kind.name in runs]
    shots: list[Shot] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        undisturbed = {
            kind.name: Disturbed(kind, here / kind.name / "undisturbed") for kind in kinds
        }
        list(pool.map(Disturbed.observe, undisturbed.values()))
        expected = {name: one.result() for name, one in undisturbed.items()}
        names = [name for name, some in runs.items() for _ in range(some)]
        first = 0
        while names:
            plans = [*planned(names, first)]
            disturbed = [
                Disturbed(undisturbed[name].kind, here / name / str(number), undisturbed[name])
                for number, name in enumerate(names, first)
            ]
            for one, own in zip(
                disturbed,
                pool.map(Disturbed.endure, disturbed, *zip(*plans, strict=True)),
                strict=True,
            ):
                wrong = differences(one.result, expected[one.kind.name])
                shots += [shot._replace(wrong=[*shot.wrong, *wrong]) for shot in own]
                shutil.rmtree(one.place)
            first += len(names)
            names = [*runs] if len(shots) < least else []
    return totals(shots)


def planned(
    names: Sequence[str], first: int
) -> Iterator[tuple[list[tuple[str, signal.Signals]], Random]]:
    """The phases and signals of each run, all signals as often, and its own random numbers."""
    count, random = len(names) * len(PHASES), Random(f"{SEED} {first}")
    deck = [*SIGNALS * (count // len(SIGNALS) + 1)][:count]
    random.shuffle(deck)
    numbers = iter(deck)
    for which, name in enumerate(names, first):
        plan = [(phase, next(numbers)) for phase in shuffled(random)]
        yield plan, Random(f"{SEED} {name} {which}")


def shuffled(random: Random) -> list[str]:
    """Every phase once, in random order, but for the last, which comes last."""
    *some, last = PHASES
    random.shuffle(some)
    return [*some, last]


def totals(shots: Sequence[Shot]) -> dict[str, Any]:
    held = [shot for shot in shots if not shot.wrong]

    def by(value: Callable[[Shot], str]) -> dict[str, str]:
        tried, good = (Counter(map(value, some)) for some in (shots, held))
        return {name: f"{good[name]} of {tried[name]} held" for name in sorted(tried)}

    return {
        "holds": len(held) == len(shots) >= 200,
        "tried": len(shots),
        "held": len(held),
        "by_signal": by(lambda shot: shot.signal),
        "by_phase": by(lambda shot: shot.phase),
        "by_kind": by(lambda shot: shot.kind),
        "by_exit_codes": by(lambda shot: f"{shot.signal} to {shot.target}: {shot.codes}"),
        "failures": [shot._asdict() for shot in shots if shot.wrong],
    }


def described(here: Path) -> Iterator[Kind]:
    """The kinds of run, on inputs that are written here."""
    pairs.write(here)
    model = published.write(here / "model")
    published.write_chats(here / "chats.jsonl", 400)
    often = {"checkpoint": {"every": SAVE}, "telemetry": {"every": 1}, "device": "cpu"}
    train = {"steps": STEPS, "batch": 8, "evaluate_every": EVALUATE}
    stories = RECIPE["data"] | {"source": {"kind": "stories", "count": 60}}
    plain = RECIPE | often | {"data": stories, "train": train}
    chats = {"kind": "jsonl", "path": str(here / "chats.jsonl")}
    tuned = often | {
        "model": {"path": str(model)},
        "data": {"source": chats, "format": "chat", "length": 64, "validation": 0.1},
        "adapter": {"kind": "lora", "rank": 4, "alpha": 8},
        "optim": {"kind": "adamw", "learning_rate": 1e-2},
        "train": train,
    }
    of_pairs = {"kind": "jsonl", "path": str(here / "pairs.jsonl")}
    preferred = pairs.RECIPE | often | {"train": train}
    preferred["data"] = pairs.RECIPE["data"] | {"source": of_pairs}
    yield Kind("plain", plain | {"train": train | {"sample": "Once"}})
    yield Kind("lora", tuned)
    averaged = {"accumulation": 2, "ema": 0.9, "patience": 9}
    yield Kind("ema_accumulation", plain | {"train": train | averaged})
    yield Kind("preference", preferred)
    cached = tuned["data"] | {"teacher": {"path": str(here / "cache"), "model": tuned["model"]}}
    repaired = tuned | {"data": cached, "objective": {"kind": "distil", "anchor": 0.01}}
    repaired["adapter"] = [{"kind": "lookup", "levels": 4, "rank": 2, "group": 8}, tuned["adapter"]]
    (here / "teach.yaml").write_text(yaml.safe_dump(repaired))
    command, environ = (
        [sys.executable, "-m", "windlass", "teach", "teach.yaml"],
        os.environ | ON_CPU,
    )
    subprocess.run(command, cwd=here, env=environ, stdout=subprocess.DEVNULL, check=True)
    yield Kind("distilled", repaired)
    yield Kind("rounded", tuned | {"adapter": {"kind": "scalar", "bits": 2}})
    yield Kind("two_processes", plain, processes=2)


class Started:
    """The processes of one start of a run, each with its output in a file."""

    def __init__(self, place: Path, environ: Mapping[str, str], processes: int):
        self.run_dir, self.logs, self.started = place / "run", [], []
        words = ["train", "recipe.yaml", "run.dir=run"]
        if processes > 1:
            words += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(processes)]
        for rank in range(processes):
            own = [*words, "--process", str(rank)] if processes > 1 else words
            self.logs.append(place / f"output-{rank}-{os.urandom(4).hex()}.txt")
            with self.logs[-1].open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "windlass", *own],
                    cwd=place,
                    env={**os.environ, **environ},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            self.started.append(process)

    def output(self, rank: int = 0) -> str:
        return self.logs[rank].read_text(encoding="utf-8")

    @property
    def is_running(self) -> bool:
        return all(one.poll() is None for one in self.started)

    @property
    def is_listening(self) -> bool:
        """True when the handlers of the program are in place: before, Python alone is at work."""
        return all(signal.SIGTERM in caught(one.pid) for one in self.started)

    def trainer(self, rank: int) -> int | None:
        """The process that trains: a child, where there are several, once it is there."""
        number = self.started[rank].pid
        if len(self.started) == 1:
            return number
        with suppress(OSError):
            children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
            return int(children[0]) if children else None

    @property
    def phase(self) -> str:
        said = self.output()
        if "\nthis run is finished" in said:
            return "finish"
        if "device " not in said:
            with suppress(OSError, ValueError):
                if int((self.run_dir / folders.LOCK).read_text()) == self.trainer(0):
                    return "tokenise"
            return "import"
        if "\ncompiled " not in said:
            return "compile"
        steps = [int(step) for step in re.findall(rf"^step +(\d+)/{STEPS}", said, re.MULTILINE)]
        evaluated = {int(step) for step in re.findall(r"^step +(\d+)  val", said, re.MULTILINE)}
        if STEPS in evaluated:
            return "finish"
        newest = max(steps, default=1)
        if newest not in evaluated and (newest % EVALUATE == 0 or newest == STEPS):
            return "evaluate"
        saving = (self.run_dir / "checkpoints").glob(f"*{UNFINISHED}*")
        return "save" if any(saving) else "train"

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Stop all processes meanwhile; False: one had ended before it could be stopped."""
        for one in self.started:
            one.send_signal(signal.SIGSTOP)
        while any(is_alive(one.pid) and state(one.pid) != "T" for one in self.started):
            time.sleep(LOOK)
        try:
            yield self.is_running
        finally:
            for one in self.started:
                one.send_signal(signal.SIGCONT)

    def hit(self, number: signal.Signals, target: str) -> None:
        """Send a signal to what is aimed at: the program, or a part of it on some host."""
        rank = {"first": 0, "second": 1}.get(target.partition(" ")[0])
        ranks = range(len(self.started)) if rank is None else [rank]
        for one in ranks:
            trainer, process = self.trainer(one), self.started[one]
            if target.endswith("host") and trainer is not None:
                os.kill(trainer, signal.SIGSTOP)  # or it may tell the others of its parent's end
                process.send_signal(number)
                os.kill(trainer, number)
                os.kill(trainer, signal.SIGCONT)
            elif target.endswith("trainer") and trainer is not None:
                os.kill(trainer, number)
            else:
                process.send_signal(number)

    def end(self) -> list[int | None]:
        """Wait for all processes, and return their exit codes; None where one had to be killed."""
        deadline = time.monotonic() + LONGEST
        trainers = [self.trainer(rank) for rank in range(len(self.started))]
        codes: list[int | None] = []
        for one in self.started:
            try:
                codes.append(one.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        for one in self.started:
            one.kill()
            one.wait()
        for number in filter(None, trainers):  # one whose parent was killed leaves by itself
            while is_alive(number) and time.monotonic() < deadline:
                time.sleep(LOOK)
        return codes


class Disturbed:
    """A run in a folder of its own, with a cache of its own that begins as that of another run."""

    def __init__(self, kind: Kind, place: Path, like: "Disturbed | None" = None):
        self.kind, self.place, self.like = kind, place, like
        self.cache = place / "cache"
        self.seconds: dict[str, float] = {}  # a phase takes
        (place / "tmp").mkdir(parents=True)
        (place / "recipe.yaml").write_text(yaml.safe_dump(kind.recipe))

    def start(self) -> Started:
        environ = {"WINDLASS_CACHE": str(self.cache), "TMPDIR": str(self.place / "tmp")}
        return Started(self.place, environ | ON_CPU, self.kind.processes)

    def observe(self) -> None:
        """Run undisturbed, and take down how long a phase goes on."""
        started, began, before = self.start(), time.monotonic(), ""
        times, parts = defaultdict[str, float](float), Counter[str]()
        while started.is_running:
            phase, now = started.phase, time.monotonic()
            parts[phase] += phase != before
            times[phase] += now - began
            before, began = phase, now
            time.sleep(LOOK)
        codes = started.end()
        assert codes == [0] * self.kind.processes, started.output()
        self.seconds = {phase: times[phase] / parts[phase] for phase in times}

    def endure(self, plan: Sequence[tuple[str, signal.Signals]], random: Random) -> list[Shot]:
        """Be disturbed again and again, and then come to the end."""
        shots = []
        for phase, number in plan:
            if (shot := self.disturb(phase, number, random)) is not None:
                shots.append(shot)
        last = self.start()
        codes = last.end()
        wrong = [] if codes == [0] * len(codes) else [f"the last start ended with {codes}"]
        wrong += complaints(last)
        return [shot._replace(wrong=[*shot.wrong, *wrong]) for shot in shots]

    def disturb(self, phase: str, number: signal.Signals, random: Random) -> Shot | None:
        """Start, and send a signal in a phase; None where all was over by then."""
        self.prepare(phase)
        assert self.like is not None
        wait = random.uniform(0, 0.9 * self.like.seconds[phase])
        target = self.target(number, phase, random)
        started = self.start()
        while not started.is_listening and started.is_running:
            time.sleep(LOOK)
        while started.phase != phase and started.is_running:
            time.sleep(LOOK)
        time.sleep(wait)
        hit = started.phase
        # In the finish a process that has just ended must not be taken for one that ignores.
        with started.held() if hit == "finish" else nullcontext(started.is_running) as is_running:
            if is_running:
                started.hit(number, target)
        codes = started.end()
        if not is_running:
            return None
        wrong = complaints(started)
        good = allowed(number, hit, target, len(codes))
        for rank, code in enumerate(codes):
            if code not in good[rank]:
                said = started.output(rank).splitlines()[-3:]
                wrong.append(f"process {rank} ended with {code}, not {sorted(good[rank])}: {said}")
        place = self.place.name
        return Shot(self.kind.name, place, number.name, hit, target, codes, wrong)

    def prepare(self, phase: str) -> None:
        """Take from the cache what a phase makes; elsewhere it is there, to save time."""
        assert self.like is not None
        shutil.copytree(self.like.cache, self.cache, dirs_exist_ok=True, copy_function=if_missing)
        for path in self.cache.iterdir() if phase in ("tokenise", "compile") else ():
            if (path.name == "compiled") == (phase == "compile"):
                shutil.rmtree(path)

    def target(self, number: signal.Signals, phase: str, random: Random) -> str:
        if self.kind.processes == 1:
            return "the program"
        if phase == "import":  # one alone would wait for the other, as it says
            return "both"
        which = random.choice(("first", "second"))
        if number in SAVED_AT:
            return random.choice(("both", which))
        return random.choice(("both", which, f"{which} host", f"{which} trainer", "both hosts"))

    def result(self) -> dict[str, Any]:
        """All that must be the same in the end."""
        run, records = self.place / "run", {}
        report = verify(run)
        for record in metrics.read(run / folders.METRICS):
            is_evaluation = any(name.startswith("validation_") for name in record)
            name = f"{'evaluation' if is_evaluation else 'record'} of step {record['step']}"
            while name in records:
                name += ", again"
            records[name] = {
                name: value
                for name, value in record.items()
                if not any(part in name for part in OF_THE_MOMENT)
            }
        samples = run / folders.SAMPLES
        return {
            **({} if report.good else {"verification": str(report)}),
            **{f"array {name}": value for name, value in weights(run).items()},
            **records,
            "samples": samples.read_text() if samples.exists() else None,
            "lengths of records": len(records),
        }


def differences(result: Callable[[], dict], expected: dict[str, Any]) -> list[str]:
    """Differences from an undisturbed run; a run that cannot be read is one."""
    try:
        found = result()
    except (UserError, OSError, ValueError, LookupError, AssertionError) as error:
        return [f"{type(error).__name__}: {error}"]
    names = {**expected, **found}
    wrong = [name for name in names if found.get(name) != expected.get(name)]
    return [f"{name}: {found.get(name)}, not {expected.get(name)}" for name in wrong[:3]]


def complaints(started: Started) -> list[str]:
    """Lines that the program should not have said."""
    outputs = [started.output(rank) for rank in range(len(started.logs))]
    return [
        f"process {rank} said: {said[said.index(word) :][-1500:]}"
        for rank, said in enumerate(outputs)
        for word in ("Traceback", "Exception ignored", "damaged")
        if word in said
    ]


def allowed(number: signal.Signals, phase: str, target: str, processes: int) -> list[set[int]]:
    """The exit codes of the documentation, for each process."""
    rank = {"first": 0, "second": 1}.get(target.partition(" ")[0])
    codes = []
    for one in range(processes):
        is_hit = rank is None or rank == one
        if number in SAVED_AT:
            # Behind the last save a process may be ended by the signal itself, or have ended.
            codes.append({128 + number, *([-number, 0] if phase == "finish" else [])})
        elif is_hit and not target.endswith("trainer"):
            codes.append({-number})
        else:
            codes.append({1, *([0] if phase == "finish" else [])})
    return codes


def caught(number: int) -> set[int]:
    """The signals that a process has handlers for."""
    try:
        status = Path(f"/proc/{number}/status").read_text()
    except OSError:
        return set()
    mask = int(re.findall(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)[0], 16)
    return {bit + 1 for bit in range(64) if mask >> bit & 1}


def is_alive(number: int) -> bool:
    return state(number) not in ("", "Z")


def state(number: int) -> str:
    """The state of a process by its letter: T is stopped, Z ended; none, where it is not there."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return ""


def if_missing(source: str, target: str) -> None:
    if not Path(target).exists():
        shutil.copy2(source, target)
