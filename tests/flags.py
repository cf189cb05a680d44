"""How the tests compile: much is compiled and little computed, so without what makes code fast."""

import os
from importlib.metadata import version

DEVICES = "--xla_force_host_platform_device_count"


def quick(devices: int = 1) -> str:
    """XLA's flags for some simulated devices."""
    flags = [
        f"{DEVICES}={devices}",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",  # the other cores compile for other tests
    ]
    if version("jaxlib").startswith("0.10."):  # later ones do not know it, and refuse to start
        flags.append("--xla_cpu_use_fusion_emitters=false")  # a third of the time to compile
    return " ".join(flags)


def with_devices(devices: int) -> str:
    """This process's flags for one it starts: compiled the same way, for other devices.

    Each of the others may be other machine code, and so other bits: on x86-64 even into how many
    parts a program is compiled is one of them.
    """
    flags = [one for one in os.environ.get("XLA_FLAGS", "").split() if not one.startswith(DEVICES)]
    return " ".join([*flags, f"{DEVICES}={devices}"])
