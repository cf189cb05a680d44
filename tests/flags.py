"""How the tests compile: much is compiled and little computed, so without what makes code fast."""

from importlib.metadata import version


def quick(devices: int = 1) -> str:
    """XLA's flags for some simulated devices."""
    flags = [
        f"--xla_force_host_platform_device_count={devices}",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",  # the other cores compile for other tests
    ]
    if version("jaxlib").startswith("0.10."):  # later ones do not know it, and refuse to start
        flags.append("--xla_cpu_use_fusion_emitters=false")  # a third of the time to compile
    return " ".join(flags)
