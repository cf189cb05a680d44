"""Accelerators that are here and do not work: JAX's reason, who holds them, and what to do."""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from glob import glob

import jax
from jax._src import hardware_utils  # JAX shows its table of TPUs on the PCI bus nowhere else

from windlass.config import listing
from windlass.devices import holders, versions
from windlass.devices.holders import LOCKFILE
from windlass.errors import UserError

PLATFORMS = {"tpu": ("tpu",), "gpu": ("gpu", "cuda", "rocm")}  # JAX's names, by kind
# Two forms, of a backend that may be missing and of one that may not be.
_ERROR = re.compile(r"(?:Backend|Unable to initialize backend) '(\w+)'(?: failed to initialize)?: ")
_ADVICE = re.compile(
    r"\. Available backends are .*| \((?:set JAX_PLATFORMS|you may need)\b.*", re.S
)
_BUSY = re.compile(r"lockfile|already in use|resource busy", re.I)
_FULL = re.compile(r"out of memory|RESOURCE_EXHAUSTED|no supported devices found", re.I)
# What JAX logs of such a device, which is said here in one message.
_LOGGED = re.compile(
    r"Jax plugin configuration error|CUDA backend failed to initialize|"
    r"An NVIDIA GPU may be present|A Google TPU may be present"
)
_HIDDEN = ("", "-1", "none", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that show no GPU

_errors: dict[str, str] = {}  # by kind: JAX raises some of them once, and then has no such device
_required: set[str] = set()  # kinds that JAX_PLATFORMS named, and that did not start


def start() -> None:
    """Start JAX's backends, and keep the reasons why some do not."""
    with _listening():
        for _ in range(len(PLATFORMS) + 1):
            try:
                jax.devices()
                return
            except RuntimeError as error:
                if not _noted(str(error)):
                    said = str(error).partition("\n")[0]
                    raise UserError(f"JAX does not start: {said}") from None
                if not _drop_failed():
                    return


def reasons(present: Mapping[str, list[str]]) -> dict[str, str]:
    """Reasons why accelerators of this machine do not work, by kind, each with what to do."""
    found = {}
    for kind, has in (("tpu", has_tpu), ("gpu", has_gpu)):
        if not present.get(kind) and _is_asked_for(kind) and (kind in _required or has()):
            found[kind] = why(kind, _errors.get(kind))
    return found


def has_tpu() -> bool:
    """Return True if a TPU is attached to this machine, whether it answers or not."""
    count, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    return count > 0 or bool(glob("/dev/accel[0-9]*"))


def has_gpu() -> bool:
    """Return True if an NVIDIA GPU is attached, and not hidden by CUDA_VISIBLE_DEVICES."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in _HIDDEN:
        return False
    # In WSL every kind of GPU is /dev/dxg, and NVIDIA's brings a driver.
    return bool(glob("/dev/nvidia[0-9]*") or glob("/usr/lib/wsl/lib/libcuda.so*"))


def why(kind: str, error: str | None) -> str:
    """Reason of a device that does not start, from JAX's error, and what to do."""
    said = (error or "").partition("\n")[0].strip().rstrip(".")
    return _of_tpu(said) if kind == "tpu" else _of_gpu(said)


def _of_tpu(said: str) -> str:
    if not said or "cannot open shared object file" in said and "libtpu.so" in said:
        return f"libtpu is missing, its library; {versions.INSTALLS['libtpu']} has it"
    if _BUSY.search(said):
        return f"{said}; {_holder(said)}"
    if wrong := versions.disagreement("libtpu"):
        return f"{said}; {wrong}"
    if "libtpu" in said:
        renew = versions.INSTALLS["libtpu"]
        return f"{said}; libtpu may be damaged: `pip uninstall libtpu`, then {renew}"
    if holding := holders.holders(holders.TPU):
        return f"{said}; {_held(holding)}"
    return f"{said}; `windlass doctor` looks for the cause"


def _of_gpu(said: str) -> str:
    plugin = versions.cuda_plugin()
    if plugin is None:
        missing = f"JAX's CUDA plugin is missing; {versions.INSTALLS[versions.CUDA[0]]} has it"
        return f"{said}; {missing}" if said else missing
    if wrong := versions.disagreement(plugin):
        return f"{said}; {wrong}" if said else wrong
    said = said or f"{plugin} gives no reason"
    if _FULL.search(said) and (holding := holders.holders(holders.GPU)):
        return f"{said}; {_held(holding)}"
    return f"{said}; `nvidia-smi` shows whether the driver works, its version and who uses the GPU"


def _holder(said: str) -> str:
    """The process that holds a TPU, and what to do about it."""
    if holding := holders.holders(holders.TPU):
        return _held(holding)
    if named := re.search(r"\bpid (\d+)", said):
        program = holders.program(holders.PROC / named[1])
        return f"process {named[1]} ({program}) uses it: end it, or wait until it ends"
    return (
        "no process of this user holds it: `sudo lsof -w /dev/accel* /dev/vfio/*` shows those of "
        f"others, and where there is none, one that was killed has left {LOCKFILE}, which "
        f"`sudo rm {LOCKFILE}` removes"
    )


def _held(holding: list[holders.Holder]) -> str:
    who = listing(map(str, holding), "and")
    has, them = ("has", "it") if len(holding) == 1 else ("have", "them")
    ends = "it ends" if len(holding) == 1 else "they end"
    return f"{who} {has} {holding[0].file} open: end {them}, or wait until {ends}"


def _noted(error: str) -> bool:
    """Note an error of JAX by the kind of device that it is about."""
    found = _ERROR.search(error)
    kind = found and _kind(found[1])
    if not found or not kind:
        return False
    _errors[kind] = _ADVICE.sub("", error[found.end() :])
    return True


def note(error: RuntimeError) -> None:
    """Note the error with which JAX says that it has no such device."""
    _noted(str(error))


def _drop_failed() -> bool:
    """Leave platforms that failed out of JAX_PLATFORMS; False where no other is left."""
    platforms = _platforms()
    if not platforms:
        return True  # JAX goes on without it, when asked again
    _required.update(kind for one in platforms if (kind := _kind(one)) in _errors and kind)
    left = [one for one in platforms if _kind(one) not in _errors]
    if left:
        jax.config.update("jax_platforms", ",".join(left))
    return bool(left)


def _is_asked_for(kind: str) -> bool:
    platforms = _platforms()
    return kind in _required or not platforms or any(_kind(one) == kind for one in platforms)


def _platforms() -> list[str]:
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    return platforms.split(",") if platforms else []


def _kind(platform: str) -> str | None:
    return next((kind for kind, names in PLATFORMS.items() if platform in names), None)


@contextmanager
def _listening() -> Iterator[None]:
    """In this block what JAX logs of devices that do not start is noted, and not printed."""
    log = logging.getLogger("jax._src.xla_bridge")
    log.addFilter(_keep)
    try:
        yield
    finally:
        log.removeFilter(_keep)


def _keep(record: logging.LogRecord) -> bool:
    if not _LOGGED.match(text := str(record.msg)):
        return True
    if "plugin" in text and record.exc_info and (error := record.exc_info[1]):
        _errors.setdefault("gpu", str(error))
    return False
