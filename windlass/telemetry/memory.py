"""How much memory a run takes, as the devices tell it."""

import re
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

STATUS = Path("/proc/self/status")  # where Linux tells a process its own sizes


def memory(devices: Sequence[Any]) -> dict[str, int]:
    """Bytes in use now, and at most so far, on the fullest of the devices of this process.

    A CPU keeps no count of its own: there it is the memory of the process that counts.
    """
    local = [device for device in devices if device.process_index == jax.process_index()]
    counted = [stats for device in local if (stats := device.memory_stats())]
    if not counted:
        return _resident()
    now = max(stats["bytes_in_use"] for stats in counted)
    peak = max(stats.get("peak_bytes_in_use", now) for stats in counted)
    return {"memory_bytes": now, "peak_memory_bytes": peak}


def _resident() -> dict[str, int]:
    if not STATUS.exists():  # macOS, which tells the peak alone, in bytes
        return {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE))
    return {
        "memory_bytes": int(sizes["VmRSS"]) * 1024,
        "peak_memory_bytes": int(sizes["VmHWM"]) * 1024,
    }
