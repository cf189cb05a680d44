"""Memory of a run, as the devices report it."""

import re
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

STATUS = Path("/proc/self/status")  # where Linux has the sizes of a process


def memory(devices: Sequence[Any]) -> dict[str, int]:
    """Bytes in use now, and at most so far, on the fullest of the devices of this process.

    A CPU keeps no count of its own: there it is the memory of the process that counts.
    """
    counted = _counted(devices)
    if not counted:
        return _resident()
    now = max(stats["bytes_in_use"] for stats in counted)
    peak = max(stats.get("peak_bytes_in_use", now) for stats in counted)
    return {"memory_bytes": now, "peak_memory_bytes": peak}


def device_peak(devices: Sequence[Any]) -> int | None:
    """Bytes in use at most so far on the fullest device; None where devices keep no count."""
    return max((x.get("peak_bytes_in_use", 0) for x in _counted(devices)), default=0) or None


def device_limit(devices: Sequence[Any]) -> int | None:
    """Bytes that a program may use of the smallest device; None where devices do not report it."""
    return min((x["bytes_limit"] for x in _counted(devices) if x.get("bytes_limit")), default=None)


def program_parts(program: jax.stages.Compiled, platform: str) -> dict[str, int] | None:
    """Memory of a compiled program on each device: arguments, results and temporaries.

    None where its compiler does not report it.
    """
    memory = program.memory_analysis()
    if memory is None:
        return None
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    # What comes out in the place of what went in is there once.
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    if platform == "tpu":
        # Its temporaries are counted with room that is never held at once.
        temporaries = memory.peak_memory_in_bytes - arguments - results
    return {"arguments": arguments, "results": results, "temporaries": temporaries}


def is_exhausted(error: Exception) -> bool:
    """Test for an out-of-memory error of a device."""
    return str(error).startswith("RESOURCE_EXHAUSTED")


def _counted(devices: Sequence[Any]) -> list[dict[str, int]]:
    local = [device for device in devices if device.process_index == jax.process_index()]
    return [stats for device in local if (stats := device.memory_stats())]


def _resident() -> dict[str, int]:
    if not STATUS.exists():  # macOS, which reports the peak alone, in bytes
        return {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE))
    return {
        "memory_bytes": int(sizes["VmRSS"]) * 1024,
        "peak_memory_bytes": int(sizes["VmHWM"]) * 1024,
    }
