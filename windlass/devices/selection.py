"""Device selection: the devices a recipe requests, of those that are present."""

import os
from collections.abc import Mapping
from glob import glob
from typing import ClassVar, Literal, NamedTuple

import jax
from jax._src import hardware_utils  # JAX shows its table of TPUs on the PCI bus nowhere else

from windlass.config import KINDS, listing, section
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


# What PyTorch/XLA users have in their environment, and what it means here.
_PJRT = {"TPU": "tpu", "CUDA": "gpu", "GPU": "gpu", "CPU": "cpu"}


def choose_here(device: Device) -> DeviceChoice:
    """The kind and number of devices of this machine to use."""
    return choose(device, present(), os.environ, silent_tpu())


def choose(
    device: Device,
    present: Mapping[str, list[str]],
    environ: Mapping[str, str],
    silent: str | None = None,  # the reason why a TPU that is here does not answer
) -> DeviceChoice:
    """The kind and number of devices to use, from the names of those present, by kind.

    `PJRT_DEVICE` and `TPU_NUM_DEVICES` count where the recipe leaves the choice open.
    """
    if not any(present.values()):
        raise UserError("no device is present: JAX finds no TPU, GPU or CPU")
    kind, request = _kind(device, environ)
    best = next(one for one in KINDS if present.get(one))
    notes, warnings = [], []
    if silent is not None and kind in ("auto", "tpu"):
        wrong = f"a TPU is here and does not answer: {silent}"
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
                f"{request}, and no {kind.upper()} is present, only {_inventory(present)}; "
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


def present() -> dict[str, list[str]]:
    """The devices JAX can reach, by kind: not what is installed, but what answers."""
    names = {}
    for kind in KINDS:
        try:
            names[kind] = [device.device_kind for device in jax.devices(kind)]
        except RuntimeError:  # how JAX says that there is no such platform
            continue
    return names


def has_tpu() -> bool:
    """Return True if a TPU is attached to this machine, whether it answers or not."""
    count, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    return count > 0 or bool(glob("/dev/accel[0-9]*"))


def silent_tpu() -> str | None:
    """Reason why the TPU of this machine does not answer; None where it does, or none is here."""
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platforms and "tpu" not in platforms.split(","):
        return None  # and so not asked
    try:
        jax.devices("tpu")
    except RuntimeError as error:
        return _why_silent(str(error), has_tpu())
    return None


def _why_silent(error: str, is_here: bool) -> str | None:
    """Reason in an error of JAX, as which it also says that there is no TPU at all."""
    if not is_here:
        return None
    _, has_failed, said = error.partition("failed to initialize: ")
    said = said.partition(". Available backends")[0].strip()
    if not has_failed or "libtpu.so" in said:
        return "libtpu is missing, its library; `pip install 'windlass-lm[tpu]'` has it"
    if "lockfile" in said:
        return (
            "another process uses it, or one that was killed has left /tmp/libtpu_lockfile, which "
            "may be deleted then"
        )
    return said.partition("\n")[0]


def devices(chosen: DeviceChoice) -> list:
    """The JAX devices that were chosen."""
    return jax.devices(chosen.kind)[: chosen.count]


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


def _inventory(present: Mapping[str, list[str]]) -> str:
    return listing((_all(kind, present) for kind in _kinds(present)), "and")


def _all(kind: str, present: Mapping[str, list[str]]) -> str:
    """`8 TPUs (TPU v5 lite)`."""
    names = listing(dict.fromkeys(present[kind]), "and")
    plural = "s" if len(present[kind]) > 1 else ""
    what = f"{len(present[kind])} {kind.upper()}{plural}"
    return what if names == kind else f"{what} ({names})"
