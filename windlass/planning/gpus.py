"""Cross-compilation for GPUs that are not here: their descriptions for JAX's CUDA compiler."""

from importlib.util import find_spec
from typing import NamedTuple

from windlass.devices.chips import Chip

PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


class Core(NamedTuple):
    """Cores of a GPU, as a compiler needs them, by NVIDIA's tables of compute capability."""

    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    shared: int  # bytes of shared memory that a block may request
    shared_core: int  # bytes of it in a core
    threads: int  # that a core holds
    units: int  # of float32 in a core
    cache: int  # bytes of the second level
    clock: float  # GHz


_KIB, _MIB = 2**10, 2**20
CORES = {
    "t4": Core((7, 5), 40, 64 * _KIB, 64 * _KIB, 1024, 64, 4 * _MIB, 1.59),
    "v100-16gb": Core((7, 0), 80, 96 * _KIB, 96 * _KIB, 2048, 64, 6 * _MIB, 1.53),
    "v100-32gb": Core((7, 0), 80, 96 * _KIB, 96 * _KIB, 2048, 64, 6 * _MIB, 1.53),
    "l4": Core((8, 9), 58, 99 * _KIB, 100 * _KIB, 1536, 128, 48 * _MIB, 2.04),
    "a100-40gb": Core((8, 0), 108, 163 * _KIB, 164 * _KIB, 2048, 64, 40 * _MIB, 1.41),
    "a100-80gb": Core((8, 0), 108, 163 * _KIB, 164 * _KIB, 2048, 64, 40 * _MIB, 1.41),
    "h100": Core((9, 0), 132, 227 * _KIB, 228 * _KIB, 2048, 128, 50 * _MIB, 1.98),
    "h200": Core((9, 0), 132, 227 * _KIB, 228 * _KIB, 2048, 128, 50 * _MIB, 1.98),
    "b200": Core((10, 0), 148, 227 * _KIB, 228 * _KIB, 2048, 128, 126 * _MIB, 1.97),
}


def topology(chip: Chip, devices: int) -> list | None:
    """Topology to compile for; None where nothing here can."""
    from jax.experimental import topologies

    if why_not(chip):
        return None
    described = topologies.get_topology_desc(
        "", "cuda", target_config=description(chip), topology=f"1x1x{devices}"
    )
    return list(described.devices)


def why_not(chip: Chip) -> str:
    """Reason why nothing here compiles for an absent GPU; empty where something does."""
    if not any(find_spec(name.replace("-", "_")) for name in PLUGINS):
        return (
            f"no {chip.name} is here, and JAX's plugin for CUDA is missing, which cross-compiles "
            "for one; `pip install 'windlass-lm[cuda]'` has it"
        )
    if chip.slug not in CORES:
        return f"no {chip.name} is here, and its cores are not in the catalogue"
    return ""


def description(chip: Chip) -> str:
    """XLA's `GpuTargetConfigProto` of a GPU, as text."""
    core = CORES[chip.slug]
    major, minor = core.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * _KIB}
  shared_memory_per_core: {core.shared_core}
  shared_memory_per_block_optin: {core.shared}
  threads_per_core_limit: {core.threads}
  core_count: {core.cores}
  fpus_per_core: {core.units}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  memory_bandwidth: {int(chip.bandwidth or 0)}
  l2_cache_size: {core.cache}
  clock_rate_ghz: {core.clock}
  device_memory_size: {chip.memory_bytes}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{chip.device_kinds[0]}"
"""
