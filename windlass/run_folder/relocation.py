"""Relocation: what differs when a run resumes on other devices, in a line."""

from typing import Any

from windlass.units import counted


def relocation(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Devices, mesh and batch of a run at its last start and now; None where they are the same."""
    names = ("device", "mesh", "batch", "processes", "compute")
    has_other_cores = _cores(before) != _cores(now) and None not in (_cores(before), _cores(now))
    if all(_of(before, name) == _of(now, name) for name in names) and not has_other_cores:
        return None
    is_cast = before["compute"] != now["compute"]
    was, is_now = (_placement(chose, is_cast, has_other_cores) for chose in (before, now))
    batch = now["batch"]
    size = batch["per_device"] * batch["accumulation"] * batch["shards"]
    return (
        f"before on {was}; now on {is_now}: the same batch of {size}, losses agree but not to the "
        "bit"
    )


def _of(chose: dict[str, Any], name: str) -> Any:
    if name == "device":  # however it was requested
        return chose[name]["kind"], chose[name]["count"]
    return chose[name]


def _cores(chose: dict[str, Any]) -> int | None:
    """Cores of a CPU: XLA divides its sums among them, and another order is other bits."""
    return chose["device"].get("cores")


def _placement(chose: dict[str, Any], is_cast: bool, has_other_cores: bool) -> str:
    """`8 × cpu in 2 processes as fsdp 8, 2 sequences per device`."""
    device, batch = chose["device"], chose["batch"]
    split = " × ".join(f"{name} {size}" for name, size in chose["mesh"].items() if size > 1)
    parts = [f"{device['count']} × {device['kind']}"]
    if has_other_cores:
        parts.append(f"on {device['cores']} core{'s' * (device['cores'] != 1)}")
    parts += [f"in {chose['processes']} processes"] if chose["processes"] > 1 else []
    parts += [f"as {split}"] if split else []
    parts += [f"in {chose['compute']}"] if is_cast else []
    sequences = counted(batch["per_device"], "sequence")
    more = f" × {batch['accumulation']} accumulation" if batch["accumulation"] > 1 else ""
    return f"{' '.join(parts)}, {sequences} per device{more}"
