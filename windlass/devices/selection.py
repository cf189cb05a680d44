"""Device selection: the devices a recipe requests, of those that are present."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

import jax

from windlass.config import KINDS, listing, section
from windlass.devices import failing
from windlass.errors import UserError


@section
class Device:
    """The accelerator a run requests."""

    shorthand: ClassVar[str] = "kind"

    kind: Literal["auto", "tpu", "gpu", "cpu"] = "auto"  # auto: the best one present
    fallback: bool = False  # if it is absent, warn and use what there is
    count: int | None = None  # number of devices; null: all

    def __post_init__(self):
        if self.count is not None and self.count < 1:
            raise ValueError(f"count is {self.count}; it must be 1 or more, or null for all")


class DeviceChoice(NamedTuple):
    """The devices a run will use, with notes and warnings on the choice."""

    kind: str
    count: int
    requested: str  # the kind, as the recipe spells it
    notes: list[str]
    warnings: list[str]


SIMULATED = r"--xla_force_host_platform_device_count=(\d+)"
THREADS_OF_XLA = "PJRT_NPROC"
THREADS = 4  # for each simulated device
# What PyTorch/XLA users have in their environment, and what it means here.
_PJRT = {"TPU": "tpu", "CUDA": "gpu", "GPU": "gpu", "CPU": "cpu"}


def choose_here(device: Device) -> DeviceChoice:
    """The kind and number of devices of this machine to use."""
    found = present()
    return choose(device, found, os.environ, failing.reasons(found))


def choose(
    device: Device,
    present: Mapping[str, list[str]],
    environ: Mapping[str, str],
    failing: Mapping[str, str] = MappingProxyType({}),
) -> DeviceChoice:
    """The kind and number of devices to use, from the names of those present, by kind.

    `failing` has the reasons why accelerators that are here do not work, by kind. `PJRT_DEVICE` and
    `TPU_NUM_DEVICES` count where the recipe leaves the choice open.
    """
    kind, request = _kind(device, environ)
    best = next((one for one in KINDS if present.get(one)), None)
    failed = _failed(kind, best, failing)
    if best is None:
        if failed is None:
            raise UserError("no device is present: JAX finds no TPU, GPU or CPU")
        raise UserError(f"{does_not_answer(failed, failing)}; no other device is present")
    notes, warnings = [], []
    if failed is not None:
        wrong = does_not_answer(failed, failing)
        if not device.fallback:
            works = listing(f"device={one}" for one in _kinds(present))
            raise UserError(
                f"{wrong}; {works} runs without it, and device.fallback=true goes on with the best "
                "there is"
            )
        warnings.append(
            f"{wrong}: going on with {_all(best, present)}, because device.fallback is true"
        )
        kind = best
    elif kind == "auto":
        kind = best
        better = [one.upper() for one in KINDS[: KINDS.index(best)]]
        without = f"no {listing(better)} is present, " if better else ""
        notes.append(f"device auto: {without}using {_all(best, present)}")
    elif not present.get(kind):
        if not device.fallback:
            works = listing(f"device={one}" for one in [*_kinds(present), "auto"])
            raise UserError(
                f"{request}, and no {kind.upper()} is present, only {inventory(present)}; "
                f"{works} would run here, and device.fallback=true goes on with the best there is"
            )
        warnings.append(
            f"{request}, and no {kind.upper()} is present: going on with {_all(best, present)}, "
            "because device.fallback is true"
        )
        kind = best
    have = len(present[kind])
    count, source = _count(device, kind, environ)
    if count is not None and count > have:
        wrong = f"{source} is {count}, with {_all(kind, present)} present"
        if not device.fallback:
            would = "1" if have == 1 else f"1 to {have}"
            raise UserError(
                f"{wrong}: {would} would do, or device.fallback=true to use what there is"
            )
        warnings.append(f"{wrong}: using {have}, because device.fallback is true")
    return DeviceChoice(kind, min(count or have, have), device.kind, notes, warnings)


@contextmanager
def enough_threads() -> Iterator[None]:
    """Let XLA start with threads for all that simulated devices wait for, unless the user counts.

    It has one for each device, or core where these are more. A collective behind a loop may begin
    while one of the loop is under way, on each device as it comes there: with all threads in those
    that wait, none is left for those waited for, and XLA aborts after 40 seconds. Processes that
    are started later count their own.
    """
    count = _simulated()
    if count == 1 or THREADS * count <= (os.cpu_count() or 1) or THREADS_OF_XLA in os.environ:
        yield
        return
    os.environ[THREADS_OF_XLA] = str(THREADS * count)
    try:
        yield
    finally:
        del os.environ[THREADS_OF_XLA]


def _simulated() -> int:
    """The number of devices that a CPU simulates."""
    found = re.search(SIMULATED, os.environ.get("XLA_FLAGS", ""))
    return int(found[1]) if found else 1


def present() -> dict[str, list[str]]:
    """The devices JAX can reach, by kind: not what is installed, but what answers."""
    names = {}
    with enough_threads():
        failing.start()
        for kind in KINDS:
            try:
                names[kind] = [device.device_kind for device in jax.devices(kind)]
            except RuntimeError as error:  # how JAX says that there is no such platform
                failing.note(error)
    return names


def does_not_answer(kind: str, failing: Mapping[str, str]) -> str:
    """A device that is here and does not work, with the reason."""
    return f"a {kind.upper()} is here and does not answer: {failing[kind]}"


def devices(chosen: DeviceChoice) -> list:
    """The JAX devices that were chosen."""
    return jax.devices(chosen.kind)[: chosen.count]


def _failed(kind: str, best: str | None, failing: Mapping[str, str]) -> str | None:
    """The kind that was requested and fails: of `auto` one that is better than all present."""
    wanted = KINDS[: KINDS.index(best)] if best else KINDS
    return next((one for one in (wanted if kind == "auto" else (kind,)) if one in failing), None)


def _kind(device: Device, environ: Mapping[str, str]) -> tuple[str, str]:
    """The kind requested, and the key or variable that does."""
    variable = environ.get("PJRT_DEVICE")
    if device.kind != "auto" or not variable:
        return device.kind, f"device.kind is {device.kind}"
    if variable.upper() not in _PJRT:
        raise UserError(f'PJRT_DEVICE is "{variable}"; it must be {listing(_PJRT)}')
    return _PJRT[variable.upper()], f"PJRT_DEVICE is {variable}"


def _count(device: Device, kind: str, environ: Mapping[str, str]) -> tuple[int | None, str]:
    variable = environ.get("TPU_NUM_DEVICES")
    if device.count is not None or kind != "tpu" or not variable:
        return device.count, "device.count"
    if not variable.isdecimal() or int(variable) < 1:
        raise UserError(f'TPU_NUM_DEVICES is "{variable}"; it must be a whole number, 1 or more')
    return int(variable), "TPU_NUM_DEVICES"


def _kinds(present: Mapping[str, list[str]]) -> list[str]:
    return [kind for kind in KINDS if present.get(kind)]


def inventory(present: Mapping[str, list[str]]) -> str:
    return listing((_all(kind, present) for kind in _kinds(present)), "and")


def _all(kind: str, present: Mapping[str, list[str]]) -> str:
    """`8 TPUs (TPU v5 lite)`."""
    names = listing(dict.fromkeys(present[kind]), "and")
    plural = "s" if len(present[kind]) > 1 else ""
    what = f"{len(present[kind])} {kind.upper()}{plural}"
    return what if names == kind else f"{what} ({names})"
