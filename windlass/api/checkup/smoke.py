"""Smoke test: a reduced model is trained, compared over devices, saved and resumed."""

import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from windlass.api.checkup.check import Check, absent, well, wrong
from windlass.api.run_folders import verify
from windlass.api.training import data as prepared_data
from windlass.checkpoint.store import folder_of, steps_in
from windlass.config import AnyRecipe
from windlass.data.show import summary
from windlass.devices import selection
from windlass.errors import UserError
from windlass.processes.signals import Signals
from windlass.run_folder import folder as folders
from windlass.starting import origin
from windlass.starting.describe import choose_devices
from windlass.telemetry import metrics
from windlass.telemetry.console import ConsoleReport
from windlass.terminal import Terminal
from windlass.training.train import train
from windlass.units import counted, duration, number

RECIPE = "quickstart"  # where none is named
STAGES = ("device", "data", "loop", "gradient sync", "checkpoint", "resume")
STEPS, HALF, ROWS, EXAMPLES, LENGTH, LONGEST = 6, 3, 8, 400, 64, 512
WIDTHS = dict(embed=64, mlp=128, layers=2, heads=2, kv_heads=1, head_dim=32)
# Sections and keys of train that a reduced model does without.
SECTIONS = ("start", "mesh", "run", "tasks")
DROPPED = (
    *("epochs", "evaluate_every", "best", "sample", "patience"),
    *("accumulation", "microbatch"),
)
COMPARED = ("loss", "gradient_norm")
# Relative differences between one device and several: sums in another order, of CPUs in float32.
TOLERANCE = {"cpu": 1e-3, "gpu": 0.05, "tpu": 0.05}
COUNT = "--xla_force_host_platform_device_count"
CHILD = "import sys; from windlass.training.train import train; train(sys.argv[1], sys.argv[2:])"
CHILD_SECONDS = 300

Step = dict[str, Any]


def smoke_test(recipe: AnyRecipe, overrides: Sequence[str], signals: Signals) -> Iterator[Check]:
    """Checks of a smoke test, in the order of `STAGES`; behind one that fails, none is tried."""
    with ExitStack() as on_exit:
        folder = on_exit.enter_context(tempfile.TemporaryDirectory(prefix="windlass-doctor-"))
        test = _Smoke(recipe, overrides, signals, Path(folder))
        on_exit.callback(test.close)
        stages: list[Callable[[], Check]] = [
            *(test.device, test.data, test.loop, test.gradient_sync, test.checkpoint, test.resume),
        ]
        for done, (name, stage) in enumerate(zip(STAGES, stages, strict=True), start=1):
            try:
                with signals.phase(f"trying the {name}"):
                    check = stage()
            except UserError as error:
                check = wrong(name, "it is refused", str(error))
            yield check
            if not check.is_well:
                left = STAGES[done:]
                yield from (absent(one, "not tried", f"the {name} comes first") for one in left)
                return


def reduced(recipe: AnyRecipe, overrides: Sequence[str], folder: Path, devices: int) -> dict:
    """A recipe as it is written, with a model, data and a length that take seconds."""
    layers = origin.load(recipe, overrides)
    if layers.problems:
        key, what = layers.problems[0]
        raise UserError(f"{key} {what}")
    written = layers.merged(None)
    if written.get("helpers") or written.get("data", {}).get("teacher"):
        raise UserError(
            f"{layers.name} learns from another model, which a reduced one does not go with; "
            f"windlass doctor --smoke {RECIPE} needs none"
        )
    run = {name: x for name, x in written.items() if name not in SECTIONS}
    model = dict(run.get("model") or {})
    model |= {key: min(model[key], most) for key, most in WIDTHS.items() if _is_count(model, key)}
    data = dict(run.get("data") or {})
    source = data.get("source")
    if isinstance(source, dict) and _is_count(source, "count"):
        data["source"] = source | {"count": min(source["count"], EXAMPLES)}
    if _is_count(data, "length"):
        data["length"] = min(data["length"], LONGEST if "format" in data else LENGTH)
    data |= {"validation": 0.0, "test": 0.0, "workers": 0}
    if recipe == RECIPE:
        data["cache"] = str(folder / "cache")  # or the second test would prepare nothing
    train = {k: x for k, x in (run.get("train") or {}).items() if k not in DROPPED}
    train |= {"steps": STEPS, "batch": max(ROWS, 2 * devices), "deterministic": True}
    train.pop("layers_per_loop", None)
    optim = dict(run.get("optim") or {})
    if isinstance(schedule := optim.get("schedule"), dict):
        optim["schedule"] = {k: x for k, x in schedule.items() if not k.startswith("warmup")}
    run |= {"model": model, "data": data, "train": train}
    run |= {"optim": optim} if optim else {}
    run |= {"checkpoint": {"every": HALF, "keep": 2}, "telemetry": {"every": 1}}
    return run


class _Smoke:
    """The stages of a smoke test, each of which needs what those before it made."""

    def __init__(self, recipe: AnyRecipe, overrides: Sequence[str], signals: Signals, folder: Path):
        self.recipe, self.overrides, self.signals = recipe, overrides, signals
        self.folder, self.run = folder, folder / "run"
        self.file = folder / "smoke.yaml"
        self.kind, self.count = "cpu", 1
        self.steps: list[Step] = []
        self.simulated: _Child | None = None

    def device(self) -> Check:
        chosen = choose_devices(origin.load(self.recipe, self.overrides))
        self.kind, self.count = chosen.kind, chosen.count
        ones = np.ones((128, 128), np.float32)
        for device in selection.devices(chosen):
            product = jax.jit(jnp.matmul)(*[jax.device_put(ones, device)] * 2)
            if not np.array_equal(product, 128 * ones):
                what = f"a matmul on {device} is wrong"
                return wrong("device", what, "this device computes other numbers: replace it")
        written = reduced(self.recipe, self.overrides, self.folder, self.count)
        self.file.write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")
        kind = selection.devices(chosen)[0].device_kind
        return well("device", f"a matmul on {self.count} × {kind}")

    def data(self) -> Check:
        prepared = prepared_data(self.file, console=Terminal(quiet=True))
        if self.count == 1:  # it takes as long as the loop, and can be beside it
            self.simulated = self.start_child(2)
        return well("data", summary(prepared.split("train")))

    def loop(self) -> Check:
        began = time.monotonic()
        self.steps = self.train(self.run)
        took = duration(time.monotonic() - began)
        losses = [step["loss"] for step in self.steps]
        said = f"{counted(len(losses), 'step')}, loss {number(losses[0])} to {number(losses[-1])}"
        if not all(map(math.isfinite, losses)):
            return wrong("loop", said, "a loss is not finite: try precision=float32")
        if self.recipe == RECIPE and not losses[-1] < losses[0]:
            return wrong("loop", said, "the loss does not fall, as it does elsewhere")
        return well("loop", f"{said}, in {took}")

    def gradient_sync(self) -> Check:
        if self.count > 1:
            what, kind = f"{self.count} devices", self.kind
            several, alone = self.steps, self.train(self.folder / "alone", "device.count=1")
        else:
            what, kind = "2 simulated devices", "cpu"
            assert self.simulated is not None
            several = self.simulated.steps()
            alone = self.steps if self.kind == "cpu" else self.start_child(1).steps()
        off = max(_difference(one, other) for one, other in zip(alone, several, strict=True))
        said = f"{what} and one agree to {off:.1g} in loss and gradient norm"
        if not off <= TOLERANCE[kind]:
            said = f"{what} and one differ by {off:.1g} in loss or gradient norm"
            return wrong("gradient sync", said, "collectives give other sums: see docs/hosts.md")
        return well("gradient sync", said)

    def checkpoint(self) -> Check:
        report, steps = verify(self.run), steps_in(folder_of(self.run))
        if not report.good or not steps:
            return wrong(
                "checkpoint", str(report), "the disk of TMPDIR does not keep what it is given"
            )
        return well("checkpoint", f"saved at steps {', '.join(map(str, sorted(steps)))}, verified")

    def resume(self) -> Check:
        """Check that steps from the first of the two checkpoints give the same losses again."""
        shutil.rmtree(folder_of(self.run) / str(STEPS))
        again = self.train(self.run)
        pairs = zip(self.steps, again, strict=True)
        if any(one[name] != other[name] for one, other in pairs for name in COMPARED):
            said = f"steps {HALF + 1} to {STEPS} have other losses than without the stop"
            return wrong("resume", said, "runs on this machine cannot be repeated bit by bit")
        return well("resume", f"from step {HALF}, with the same losses as without the stop")

    def train(self, run: Path, *keys: str) -> list[Step]:
        keys = (f"run.dir={run}", *keys)
        with ConsoleReport(Terminal(quiet=True)) as report:
            trained = train(self.file, keys, signals=self.signals, report=report)
        if trained.stopped_by is not None:
            raise SystemExit(128 + trained.stopped_by)
        return _steps(run)

    def start_child(self, devices: int) -> "_Child":
        run = self.folder / f"simulated-{devices}"
        return _Child(self.file, run, devices)

    def close(self) -> None:
        if self.simulated is not None:
            self.simulated.close()


class _Child:
    """The same run on simulated devices, whose number a process is started with."""

    def __init__(self, recipe: Path, run: Path, devices: int):
        self.run = run
        flags = [x for x in os.environ.get("XLA_FLAGS", "").split() if not x.startswith(COUNT)]
        around = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join([*flags, f"{COUNT}={devices}"])}
        keys = [f"run.dir={run}", "device.kind=cpu", f"device.count={devices}"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(recipe), *keys],
            env=os.environ | around,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def steps(self) -> list[Step]:
        """The steps, once it has ended."""
        try:
            printed, _ = self.process.communicate(timeout=CHILD_SECONDS)
        except subprocess.TimeoutExpired:
            raise UserError(f"simulated devices took more than {CHILD_SECONDS} s") from None
        if self.process.returncode:
            raise UserError((printed.strip().splitlines() or ["it ended without a word"])[-1])
        return _steps(self.run)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def _steps(run: Path) -> list[Step]:
    return [one for one in metrics.read(run / folders.METRICS) if "loss" in one]


def _difference(one: Step, other: Step) -> float:
    pairs = [(one[name], other[name]) for name in COMPARED if name in one]
    return max(abs(a - b) / max(abs(a), 1e-6) for a, b in pairs)


def _is_count(section: dict[str, Any], key: str) -> bool:
    return isinstance(section.get(key), int) and section[key] > 0
