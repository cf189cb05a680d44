"""Page-locked host memory, through which arrays come off a GPU."""

from collections import defaultdict
from collections.abc import Iterable

import jax
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

PLATFORMS = ("gpu", "cuda")
_HELD: dict[jax.Device, int] = defaultdict(int)  # bytes that copies have taken at once


def reserve(arrays: Iterable[Array]) -> None:
    """Have JAX hold as much page-locked memory as copies of the arrays take; it keeps it for them.

    `jax.device_put`, by which Orbax copies, allocates it with Python's lock held, for seconds of a
    state of gigabytes, in which nothing else is traced or compiled. A program lets go of the lock.
    """
    shards = [one for array in arrays for one in array.addressable_shards if one.replica_id == 0]
    for device in {one.device for one in shards}:
        own = [one.data for one in shards if one.device == device]
        size = sum(one.nbytes for one in own)
        if device.platform in PLATFORMS and size > _HELD[device]:
            _HELD[device] = size
            pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
            jax.block_until_ready(jax.jit(lambda *arrays: arrays, out_shardings=pinned)(*own))
