"""10,000 steps in one process: memory, file descriptors and threads are as many at the end.

The real program, with a record of every step, evaluations, samples and checkpoints all along. What
it holds is read from /proc while it trains.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from proofs import program
from tests import tiny
from windlass.run_folder import folder as folders

STEPS, EVALUATE, SAVE = 10_000, 250, 250
WARM, LAST = (2_000, 3_000), (9_000, 10_000)  # steps; before, caches and pools are filled
LOOK = 0.25  # seconds
# Memory is freed to the allocator and not to the system. With an arena for every few threads, as by
# default, windows in which nothing is kept are up to 11 MB apart; with a single one they are less
# than 1 MB. What TensorStore once kept of every save was 11 MB between these two.
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
MEMORY_SLACK = 2 * 2**20  # bytes
# Of files and threads the median is taken, since a save has some of its own, and threads of pools
# come and go. One that is left by each evaluation or save would be 28 more.
COUNT_SLACK = 2
RECIPE = {
    "model": {"family": "qwen3", "vocab": 257, **tiny.WIDTHS, "embed": 16, "mlp": 32, "layers": 1},
    "data": {"source": {"kind": "stories", "count": 200}, "length": 32, "validation": 0.02},
    "optim": {"kind": "adamw", "learning_rate": 3e-3},
    "train": {"steps": STEPS, "batch": 4, "evaluate_every": EVALUATE, "sample": "Once"},
    "checkpoint": {"every": SAVE},
    "telemetry": {"every": 1},
    "device": "cpu",
}


class Look(NamedTuple):
    """Memory, descriptors and threads of a process at a step, and the bytes of its run's folder."""

    step: int
    memory: int  # resident, in bytes
    descriptors: int
    threads: int
    records: int  # bytes of all files but checkpoints
    checkpoints: int


def prove() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
        return judged(watched(here))


def watched(here: Path) -> list[Look]:
    """Looks at a run, from its first step to its last."""
    words = [sys.executable, "-m", "windlass", "train", "recipe.yaml", "run.dir=run"]
    environ, looks = program.environment(here / "cache") | ONE_ARENA, []
    with (here / "output.txt").open("w") as output:
        process = subprocess.Popen(
            words, cwd=here, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    while process.poll() is None:
        time.sleep(LOOK)
        if (look := looked(process.pid, here / "run")) is not None:
            looks.append(look)
    assert process.returncode == 0, (here / "output.txt").read_text()[-2000:]
    return looks


def looked(number: int, run: Path) -> Look | None:
    """A look at a process; None before its first step, and when it is gone."""
    try:
        status = Path(f"/proc/{number}/status").read_text()
        facts = dict(line.split(":", 1) for line in status.splitlines())
        descriptors = len(os.listdir(f"/proc/{number}/fd"))
        step = last_step(run / folders.METRICS)
        memory, threads = int(facts["VmRSS"].split()[0]) * 1024, int(facts["Threads"])
    except (OSError, KeyError, IndexError, ValueError):  # or its first record is not whole yet
        return None
    records, checkpoints = sizes(run)
    return Look(step, memory, descriptors, threads, records, checkpoints)


def last_step(path: Path) -> int:
    """The step of the last whole record, from the end of a long file."""
    with path.open("rb") as file:
        file.seek(-min(4096, path.stat().st_size), os.SEEK_END)
        *_, line, _ = file.read().split(b"\n")
    return json.loads(line)["step"]


def sizes(run: Path) -> tuple[int, int]:
    """Bytes of a run's own files, and of its checkpoints, some of which come and go."""
    total = Counter[bool]()
    for place, _, names in os.walk(run):  # which passes over what is removed meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                is_saved = "checkpoints" in Path(place).parts
                total[is_saved] += os.stat(os.path.join(place, name)).st_size
    return total[False], total[True]


def judged(looks: Sequence[Look]) -> dict[str, Any]:
    """The windows compared."""

    def medians(window: tuple[int, int]) -> Look:
        some = [look for look in looks if window[0] < look.step <= window[1]]
        return Look(*(round(statistics.median(values)) for values in zip(*some, strict=True)))

    warm, last = medians(WARM), medians(LAST)
    growth = last.memory - warm.memory
    more = max(last.descriptors - warm.descriptors, last.threads - warm.threads)
    thousands = (last.step - warm.step) / 1000
    return {
        "holds": more <= COUNT_SLACK and growth <= MEMORY_SLACK and looks[-1].step == STEPS,
        "steps": STEPS,
        "windows": {"warm": WARM, "last": LAST},
        "memory_bytes": [warm.memory, last.memory],
        "memory_slack_bytes": MEMORY_SLACK,
        "file_descriptors": [warm.descriptors, last.descriptors],
        "threads": [warm.threads, last.threads],
        "count_slack": COUNT_SLACK,
        "looks": len(looks),
        "run_folder_growth_bytes_per_1000_steps": round((last.records - warm.records) / thousands),
        "checkpoints_bytes": [warm.checkpoints, last.checkpoints],
        "memory_bytes_by_1000_steps": [
            medians((at, at + 1000)).memory for at in range(0, STEPS, 1000)
        ],
    }
