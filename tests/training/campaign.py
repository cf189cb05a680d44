"""Runs of the real program that are disturbed, and the weights they end with."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

import yaml

from tests import tiny
from windlass.processes.signals import Signals

RECIPE = {
    "model": {"family": "qwen3", "vocab": 257, **tiny.WIDTHS},
    "data": {"source": {"kind": "stories", "count": 200}, "length": 64, "validation": 0.1},
    "optim": {"kind": "adamw", "learning_rate": 3e-3},
    "train": {"steps": 60, "batch": 8, "accumulation": 2, "evaluate_every": 20},
    "checkpoint": {"every": 7},
    "telemetry": {"every": 1},
    "device": "cpu",
}


class Stops(Signals):
    """As if a signal were heard in a step."""

    def __init__(self, last: int | None):
        super().__init__()
        self.last = last

    def ends(self, step: int) -> bool:
        if step == self.last:
            self.stop = signal.SIGTERM
        return super().ends(step)


class Ended(NamedTuple):
    """How a process ended, and what it said."""

    code: int
    output: str


class Program:
    """`windlass train` on a recipe in a folder of its own, compiled as a user's is or quickly."""

    def __init__(self, folder: Path, recipe: dict | None = None, flags: str = ""):
        self.folder, self.flags = folder, flags
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe or RECIPE))
        self.run_dir = folder / "run"

    def start(self, *keys: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "windlass", "train", "tiny.yaml"]
        path = [Path(__file__).parents[2], os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            [*command, f"run.dir={self.run_dir}", *keys],
            cwd=self.folder,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(map(str, path)), "XLA_FLAGS": self.flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, *keys: str) -> Ended:
        return ended(self.start(*keys))

    def disturb(
        self, until: Callable[["Program"], bool], number: signal.Signals, *keys: str
    ) -> Ended:
        """Start the program and send it a signal as soon as `until` is true of it."""
        process = self.start(*keys)
        while not until(self) and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(number)
        return ended(process)

    @property
    def step(self) -> int:
        """The last step that the run has written down."""
        metrics = self.run_dir / "metrics.jsonl"
        lines = metrics.read_bytes().splitlines() if metrics.exists() else []
        return len({line.split(b",")[0] for line in lines if line.endswith(b"}")})

    @property
    def is_saving(self) -> bool:
        return any(self.run_dir.glob("checkpoints/*.orbax-checkpoint-tmp*"))


def ended(process: subprocess.Popen) -> Ended:
    output, _ = process.communicate(timeout=600)
    return Ended(process.returncode, output)


def weights(run_dir: Path, step: int | None = None) -> dict[str, int]:
    """The fingerprint of every array of a run's newest checkpoint, read and checked from disk.

    Or of that at a step.
    """
    from windlass.checkpoint import archive
    from windlass.checkpoint.store import folder_of, steps_in
    from windlass.checkpoint.verify import verify

    assert verify(run_dir).good, str(verify(run_dir))
    folder = folder_of(run_dir)
    step = step or steps_in(folder)[-1]
    arrays = archive.manifest(folder / str(step))["arrays"]
    return {"step": step} | {name: about["fingerprint"] for name, about in arrays.items()}


def killed(program: Program, kills: int, seed: int, late: int = 40) -> list[str]:
    """Kill a run with -9 at random moments, the last of them inside a save after a late step."""
    random = Random(seed)
    told = []
    for moment in sorted(random.randrange(2, late) for _ in range(kills - 1)):
        program.disturb(lambda program, moment=moment: program.step >= moment, signal.SIGKILL)
        told.append(f"killed at step {program.step}")
    program.disturb(lambda program: program.is_saving and program.step > late, signal.SIGKILL)
    assert any(program.run_dir.glob("checkpoints/*.orbax-checkpoint-tmp*")), "the save was over"
    told.append(f"killed in a save at step {program.step}")
    return told
