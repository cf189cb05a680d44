"""Compile debugging: a line for each compilation, programs as files, and the first steps timed."""

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from windlass import files
from windlass.processes import hosts
from windlass.units import counted, seconds

FOLDER = "debug_compile"  # in that of a run: a file for each form of each program
STEPS = 3  # of a start, that are timed
LOG, HLO, JAXPR, RUNTIME = "log", "hlo", "jaxpr", "runtime"
# Variables of PyTorch/XLA and TensorFlow: the part that each is here, and its effect.
VARIABLES = {
    "PT_XLA_DEBUG": (LOG, f"logs each compilation and times the first {STEPS} steps"),
    "XLA_HLO_DEBUG": (HLO, f"writes each program as StableHLO and optimized HLO to {FOLDER}/"),
    "XLA_IR_DEBUG": (JAXPR, f"writes each program as a jaxpr to {FOLDER}/"),
    "TF_CPP_MIN_LOG_LEVEL": (RUNTIME, "shows the log of XLA's runtime and of JAX's compilations"),
}
OFF = ("", "0", "false", "no", "off")
VERBOSE = "TF_CPP_MIN_LOG_LEVEL"  # whose 0 is its most, and 1 to 3 are less


def requested(all_of_it: bool, environ: Mapping[str, str]) -> tuple[set[str], list[str]]:
    """The parts that the option or variables of the environment request, and notes on these."""
    parts = {part for part, _ in VARIABLES.values()} if all_of_it else set()
    notes = []
    for name, (part, effect) in VARIABLES.items():
        value = environ.get(name, "1" if name == VERBOSE else "")
        if (value == "0") if name == VERBOSE else (value.lower() not in OFF):
            if not all_of_it:
                notes.append(f"{name} is {value}: a part of --debug-compile, which {effect}")
            parts.add(part)
    return parts, notes


class CompileDebug:
    """The parts of compile debugging that are on; none of them where nothing was requested."""

    def __init__(self, parts: Collection[str] = (), say: Callable[[str], None] = print):
        self._parts, self._say = parts, say
        self._folder: Path | None = None
        self._unwritten: list[tuple[str, dict[str, str]]] = []
        self._timed = self._written = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """A block in which JAX logs its compilations, where the runtime's log is on."""
        if RUNTIME not in self._parts:
            yield
            return
        with jax.log_compiles(True):
            yield

    def open(self, folder: Path) -> None:
        """Write programs to the folder of a run from now on, behind those of earlier starts."""
        if not {HLO, JAXPR} & {*self._parts} or not hosts.is_first():
            return
        self._folder = folder / FOLDER
        before = [re.match(r"\d+", path.name) for path in self._folder.glob("*")]
        self._written = max((int(number[0]) for number in before if number), default=0)
        self._say(f"programs are written to {self._folder}")
        self._write()

    def log(self, record: Mapping[str, Any]) -> None:
        """Report a compilation, as the compile log has it."""
        if LOG not in self._parts:
            return
        what = record["program"] or f"small program {record['function']}"
        cached = ", from the cache" if record["cached"] else ""
        arrays = "" if record["inputs"] is None else f"; {counted(record['inputs'], 'input')}"
        arrays += "" if record["outputs"] is None else f", {counted(record['outputs'], 'output')}"
        self._say(
            f"compiled {what} in {seconds(record['seconds'])}{cached}; cause: {record['cause']}; "
            f"fingerprint {record['fingerprint']}{arrays}"
        )

    def dump(
        self, name: str, traced: Any, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled
    ) -> None:
        """Write a program, in the forms that are on, once the folder is there."""
        forms = {}
        if JAXPR in self._parts:
            forms["jaxpr.txt"] = str(traced.jaxpr)
        if HLO in self._parts:
            forms["stablehlo.mlir"] = lowered.as_text(debug_info=True)
            forms["hlo.txt"] = compiled.as_text() or ""
        if forms:
            self._unwritten.append((name.replace(" ", "-"), forms))
            self._write()

    def _write(self) -> None:
        while self._folder is not None and self._unwritten:
            name, forms = self._unwritten.pop(0)
            self._written += 1
            self._folder.mkdir(exist_ok=True)
            for form, text in forms.items():
                files.write(self._folder / f"{self._written:03}-{name}.{form}", text)

    def timed(self, step: Callable) -> Callable:
        """A step that reports the shapes of its batch, and the times of its first calls."""

        def call(state: Any, frozen: Any, batch: Mapping[str, jax.Array]) -> Any:
            if LOG not in self._parts or self._timed == STEPS:
                return step(state, frozen, batch)
            self._timed += 1
            number = int(state.step) + 1
            shapes = ", ".join(f"{name} {x.dtype} {x.shape}" for name, x in batch.items())
            self._say(f"step {number}: batch of {shapes}")
            began = time.monotonic()
            result = step(state, frozen, batch)
            dispatched = time.monotonic()
            self._say(f"step {number}: dispatched after {seconds(dispatched - began)}")
            jax.block_until_ready(result)
            finished = time.monotonic()
            self._say(f"step {number}: finished after {seconds(finished - began)}")
            return result

        return call
