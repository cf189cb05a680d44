"""XLA options by which collectives run beside compute, where a chip's compiler must be asked."""

import os
from collections.abc import Mapping

from windlass.devices.chips import Chip

# For a v5e and a v5p libtpu all-gathers asynchronously by itself; for a v6e it waits for each,
# unless all of these are set. Peak memory is the same.
_ASYNC_ALL_GATHER = (
    "xla_enable_async_all_gather",
    "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_enable_async_collective_fusion_multiple_steps",
    "xla_tpu_overlap_compute_collective_tc",
)


def options(
    chip: Chip | None, devices: int, environ: Mapping[str, str] = os.environ
) -> dict[str, bool]:
    """Compiler options for so many devices of a chip; flags that the environment sets win."""
    if chip is None or chip.name != "TPU v6e" or devices == 1:
        return {}
    given = " ".join(environ.get(name, "") for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS"))
    named = {flag.lstrip("-").partition("=")[0] for flag in given.split()}
    return {name: True for name in _ASYNC_ALL_GATHER if name not in named}
