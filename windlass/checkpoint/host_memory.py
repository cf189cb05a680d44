"""Page-locked host memory, through which arrays come off a GPU."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxtyping import PyTree

PLATFORMS = ("gpu", "cuda")
PIECE = 2**26  # bytes that are allocated at once: as many are taken of the device for a moment


def reserve(tree: PyTree) -> None:
    """Allocate as much page-locked memory as copies of abstract arrays take; JAX keeps it for them.

    By a program, which lets other threads run Python meanwhile: `jax.device_put` does not.
    """
    for device in jax.local_devices():
        if device.platform not in PLATFORMS:
            continue
        size = sum(_bytes_on(device, array) for array in jax.tree.leaves(tree))
        pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
        piece = jax.jit(lambda: jnp.zeros(PIECE, jnp.uint8), out_shardings=pinned)
        jax.block_until_ready([piece() for _ in range(-(-size // PIECE))])


def _bytes_on(device: jax.Device, array: jax.ShapeDtypeStruct) -> int:
    sharding = array.sharding or SingleDeviceSharding(jax.devices()[0])
    if device not in sharding.device_set:
        return 0
    return math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
