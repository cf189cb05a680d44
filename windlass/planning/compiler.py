"""Ahead-of-time compilation of a run's step, for devices that need not be here."""

import dataclasses
import hashlib
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.errors import JaxRuntimeError

from windlass import files
from windlass.analysis.hlo import Text, flags
from windlass.config import AnyRecipe, Layers
from windlass.devices import failing, selection
from windlass.devices.chips import usable
from windlass.devices.selection import DeviceChoice
from windlass.errors import UserError
from windlass.planning import exhausted, gpus
from windlass.planning.targets import Target
from windlass.program.built import Built
from windlass.program.described import Described, read_for
from windlass.program.programs import Programs
from windlass.starting import origin
from windlass.telemetry.compile_cache import setting
from windlass.telemetry.memory import program_parts

STEPS = 1000  # of the run; no schedule makes another program than a longer one does
NO_LIBTPU = (
    "libtpu is missing, the compiler for TPUs; on an x86-64 host "
    "`pip install 'windlass-lm[tpu]'` has it, and no TPU is needed"
)


class CompiledStep(NamedTuple):
    """A compiled step, and what it took."""

    program: jax.stages.Compiled
    seconds: float  # to trace and compile

    @property
    def peak_bytes(self) -> int:
        """Peak memory per device: arguments, results and temporaries."""
        (device, *_) = self.program.input_shardings[0][0].step.device_set
        parts = program_parts(self.program, device.platform)
        assert parts is not None
        return sum(parts.values())


@dataclasses.dataclass(frozen=True)
class CompilerReport:
    """A compiler's report of a step, per device."""

    compiler: str  # with its version, and what it compiled for
    peak_bytes: int  # of the step; where it does not fit, what it would need
    fits: bool  # by the compiler, which may refuse a program, or by what is there
    argument_bytes: int | None  # of the state and the batch; None where it was refused
    flops: int | None  # of matmuls, loops counted as often as they run
    moved_bytes: int | None  # to and from the device's memory
    cycles: int | None  # as a TPU's compiler estimates, without kernels and the interconnect
    seconds: float  # to compile


class NoCompiler(NamedTuple):
    """Absence of a compiler for a target, and the reason."""

    why: str


def topology(name: str, slices: int = 1) -> list:
    """The devices of a TPU slice, such as `v5e:2x4`, as its compiler knows them."""
    from jax.experimental import topologies

    if find_spec("libtpu") is None:
        raise UserError(NO_LIBTPU)
    _share_libtpu()
    # A chip alone on its host, where the compiler would expect four.
    how: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    how |= {"chips_per_host_bounds": (1, 1, 1)} if name.endswith((":1x1", ":1x1x1")) else {}
    # Both cores of a chip as one device, as a v4 has them where it runs.
    how |= {"chip_config_name": "megacore"} if name.startswith("v4:") else {}
    try:
        return list(topologies.get_topology_desc(name, "tpu", **how).devices)
    except JaxRuntimeError as error:
        raise UserError(_why_not(name, str(error))) from None


def _share_libtpu() -> None:
    """Let several processes load libtpu at once, where there is no TPU that they could share."""
    if not failing.has_tpu():
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def _why_not(name: str, error: str) -> str:
    if "lockfile" in error:
        return (
            "libtpu is in use, which one process at a time may load where there is a TPU; if none "
            "does, one that was killed has left /tmp/libtpu_lockfile, which may be deleted then"
        )
    return f"libtpu does not compile for {name}: {error.partition(chr(10))[0]}"


def described(recipe: AnyRecipe, devices: list, overrides: Sequence[str] = ()) -> Described:
    """A recipe read for the devices of a TPU slice."""
    return _laid_out(origin.load(recipe, overrides), "tpu", devices)


def compiled(described: Described) -> CompiledStep:
    """Compile the step of a described run, from shapes alone: no weights, and no data."""
    with described.scope():
        began = time.monotonic()
        lowered = _lowered(described)
        with _uncached():
            program = lowered.compile()
        return CompiledStep(program, time.monotonic() - began)


class _Step(NamedTuple):
    """A lowered step, and what else decides what its compiler reports."""

    lowered: jax.stages.Lowered
    laid_out: Described
    by: str
    limit: int | None  # of the chip's memory

    @property
    def key(self) -> str:
        fields = " ".join(field.name for field in dataclasses.fields(CompilerReport))
        given = [json.dumps(self.laid_out.compiler_options), flags(os.environ)]
        known = [self.by, fields, str(self.limit), *given, self.lowered.as_text()]
        return hashlib.sha256("\n".join(known).encode()).hexdigest()[:32]


def find(layers: Layers, target: Target) -> CompilerReport | NoCompiler:
    """The report of a target's compiler on a recipe's step, cached by `key`."""
    step = _step(layers, target)
    if isinstance(step, NoCompiler):
        return step
    place = Path(os.environ.get("WINDLASS_CACHE") or "~/.cache/windlass").expanduser()
    file = place / "plans" / f"{step.key}.json"
    with suppress(OSError, ValueError, TypeError):  # what is missing or corrupt is compiled anew
        return CompilerReport(**json.loads(file.read_text(encoding="utf-8")))
    with step.laid_out.scope(), _uncached():
        report = _report(step.lowered, step.by, step.limit)
    files.write(file, json.dumps(dataclasses.asdict(report)))
    return report


def key(layers: Layers, target: Target) -> str | NoCompiler:
    """Hash of a lowered step, its compiler, options, flags and memory limit: none is compiled."""
    step = _step(layers, target)
    return step if isinstance(step, NoCompiler) else step.key


def _step(layers: Layers, target: Target) -> _Step | NoCompiler:
    devices = _devices(target)
    if isinstance(devices, NoCompiler):
        return devices
    laid_out = _laid_out(layers, target.chip.kind, devices)
    limit = usable(laid_out.chip) if laid_out.chip else None
    with laid_out.scope():
        return _Step(_lowered(laid_out), laid_out, _compiler(target), limit)


def _report(lowered: jax.stages.Lowered, by: str, limit: int | None) -> CompilerReport:
    began = time.monotonic()
    try:
        program = CompiledStep(lowered.compile(), time.monotonic() - began)
    except JaxRuntimeError as error:
        needed = exhausted.reported_sizes(str(error)).needed
        if needed is None:
            raise
        seconds = time.monotonic() - began
        return CompilerReport(by, round(needed), False, None, None, None, None, seconds)
    memory, text = program.program.memory_analysis(), Text(program.program.as_text() or "")
    assert memory is not None
    peak = program.peak_bytes
    return CompilerReport(
        compiler=by,
        peak_bytes=peak,
        fits=limit is None or peak <= limit,
        argument_bytes=memory.argument_size_in_bytes,
        flops=text.flops,
        moved_bytes=text.moved_bytes,
        cycles=text.cycles,
        seconds=time.monotonic() - began,
    )


def _devices(target: Target) -> list | NoCompiler:
    """The devices of a target, here or as its compiler knows them."""
    _share_libtpu()  # before anything asks for devices
    kind = target.chip.kind
    present = selection.present().get(kind, [])
    if set(present) & set(target.chip.device_kinds) and len(present) >= target.devices:
        return jax.devices(kind)[: target.devices]
    if target.slices is not None:
        if find_spec("libtpu") is None:
            here = platform.machine()
            no_wheel = f", and has no wheel for {here}" if here not in ("x86_64", "AMD64") else ""
            return NoCompiler(f"libtpu is missing, the compiler for TPUs{no_wheel}")
        each, count = target.slices.each, target.slices.count
        generation = {"7x": "tpu7x"}.get(each.generation, each.generation)
        return topology(f"{generation}:{each.topology}", count)
    if kind == "gpu":
        return gpus.topology(target.chip, target.devices) or NoCompiler(gpus.why_not(target.chip))
    return NoCompiler(f"no {target.chip.name} is here, and nothing cross-compiles for one")


def _compiler(target: Target) -> str:
    kind = target.chip.kind
    ours = {"tpu": ("libtpu",), "gpu": gpus.PLUGINS}.get(kind, ())
    named = [f"{name} {version(name)}" for name in ours if find_spec(name.replace("-", "_"))]
    return ", ".join([*named, f"JAX {jax.__version__}", f"for {target.name}"])


def _laid_out(layers: Layers, kind: str, devices: list) -> Described:
    return read_for(layers, DeviceChoice(kind, len(devices), kind, [], []), devices)


def _lowered(described: Described) -> jax.stages.Lowered:
    programs = Programs(Built(described), STEPS)
    return programs.step().lower(*programs.abstract_call())


@contextmanager
def _uncached() -> Iterator[None]:
    """Disable JAX's compilation cache, which stores programs for absent devices it cannot load."""
    before = setting("jax_enable_compilation_cache")
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
