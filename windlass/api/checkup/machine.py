"""Checks of a machine: versions, devices, memory, disk and the compilation cache."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax

from windlass.api.checkup.check import Check, absent, well, wrong
from windlass.config import KINDS, listing
from windlass.devices import chips, failing, selection
from windlass.devices import versions as packages
from windlass.errors import UserError
from windlass.telemetry import about, compile_cache
from windlass.telemetry.memory import device_limit
from windlass.units import counted, gib, size

LEAST_MEMORY = 2 * 2**30  # bytes of a host that are free, below which hardly anything trains
LEAST_DISK = 5 * 2**30  # bytes, a few checkpoints of a small model
SHOWN = ("windlass", "python", "jax", "jaxlib", "libtpu", *packages.CUDA)
HIDING = ("TPU_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS")
# How to find a TPU that should be here, for whoever rents one.
CLOUD = (
    "`gcloud compute tpus tpu-vm list --zone=ZONE` lists the TPU VMs of a project, "
    "`gcloud compute tpus tpu-vm describe NAME --zone=ZONE` shows the type and health of one, and "
    "`windlass launch RECIPE --on v5e-8 --dry-run` shows how to rent one"
)


def versions() -> Check:
    """Versions of what a run is computed with, and whether those of JAX's packages agree."""
    have = about.versions()
    found = ", ".join(f"{name} {have[name]}" for name in SHOWN if name in have)
    if problems := [what for _, what in packages.disagreements()]:
        return wrong("versions", found, "; ".join(problems))
    return well("versions", found)


def devices(expect: int | None) -> Iterator[Check]:
    """The best devices that answer, those that are here and do not, and how many were expected."""
    try:
        present = selection.present()
    except UserError as error:
        yield wrong("devices", str(error), "JAX_PLATFORMS=cpu leaves accelerators out")
        return
    reasons = failing.reasons(present)
    for kind, why in reasons.items():
        said, _, advice = why.partition("; ")
        more = f"; {CLOUD}" if kind == "tpu" else ""
        found = f"a {kind.upper()} is here and does not answer: {said}"
        yield wrong("devices", found, f"{advice or said}{more}")
    best = next((kind for kind in KINDS if present.get(kind)), None)
    count = len(present[best]) if best else 0
    found = selection.inventory({best: present[best]}) if best else "none"
    if expect is not None and count != expect:
        yield wrong("devices", f"{found}, and {expect} expected", _missing(best, count, expect))
    elif not reasons:
        yield well("devices", found)


def memory() -> Iterator[Check]:
    """Memory of the devices and of the host."""
    if accelerators := _accelerators():
        chip = chips.find(accelerators[0].device_kind)
        limit = device_limit(accelerators) or (chips.usable(chip) if chip else None)
        each = "an unknown amount" if limit is None else f"{gib(limit)} GiB"
        yield well("device memory", f"{each} for programs on each of {len(accelerators)}")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = available_memory()
    cores = counted(about.cores(), "core")
    if free is None:
        yield well("host memory", f"{gib(total)} GiB, {cores}")
    elif free < LEAST_MEMORY:
        advice = "end other programs: `ps aux --sort=-rss | head` shows the largest"
        yield wrong("host memory", f"{gib(free)} GiB free of {gib(total)}, {cores}", advice)
    else:
        yield well("host memory", f"{gib(free)} GiB free of {gib(total)}, {cores}")


def _accelerators() -> list:
    try:
        return [one for one in jax.devices() if one.platform != "cpu"]
    except RuntimeError:  # none starts, which is a check of its own
        return []


def available_memory() -> int | None:
    """Bytes of memory that programs can still have; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in lines)
    free = sizes.get("MemAvailable", "").split()
    return int(free[0]) * 1024 if free else None


def disk() -> Iterator[Check]:
    """Room where runs and the cache are written."""
    cache = os.environ.get("WINDLASS_CACHE") or "~/.cache/windlass"
    places = {
        "runs": (Path("runs"), "run.dir=FOLDER puts a run on another disk"),
        "cache": (Path(cache).expanduser(), "WINDLASS_CACHE=FOLDER puts the cache on another disk"),
    }
    for name, (place, advice) in places.items():
        there = next(one for one in (place.absolute(), *place.absolute().parents) if one.exists())
        free = shutil.disk_usage(there).free
        title, found = f"disk for {name}", f"{size(free)} free at {there}"
        if not os.access(there, os.W_OK):
            yield wrong(title, f"{there} cannot be written to by this user", advice)
        elif free < LEAST_DISK:
            yield wrong(title, found, f"{advice}, and `windlass runs --delete RUN` makes room")
        else:
            yield well(title, found)


def compiled() -> Check:
    """The compilation cache."""
    kept = compile_cache.keep()
    if kept.warning is not None:
        return wrong("compile cache", "not in use", kept.warning)
    if kept.folder is None:
        how = "JAX_ENABLE_COMPILATION_CACHE=true has programs kept for the next start"
        return absent("compile cache", "turned off", how)
    return well("compile cache", f"{size(kept.size)} in {kept.folder}")


def _missing(kind: str | None, count: int, expect: int) -> str:
    """Advice where there are fewer devices than expected, or more."""
    hidden = [name for name in HIDING if os.environ.get(name)]
    if hidden:
        values = listing((f"{name}={os.environ[name]}" for name in hidden), "and")
        return f"{values} in the environment may hide some"
    if kind in (None, "cpu"):
        return f"no accelerator is attached. {CLOUD}. For GPUs, `nvidia-smi` lists them"
    if count > expect:
        return f"device.count={expect} trains on {expect} of them"
    if kind == "tpu":
        return f"a host of a larger slice has a part of its chips (docs/hosts.md). {CLOUD}"
    return "`nvidia-smi` lists the GPUs that the driver sees"
