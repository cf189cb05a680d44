"""Page-locked memory of the host, through which arrays come off a GPU.

Half a gigabyte takes a quarter of a second to allocate, in which threads that ask for memory stand
still. XLA keeps what it has for the next save.
"""

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Bool, Shaped

from windlass.checkpoint.fingerprint import as_words

LOCKED = "pinned_host"
PIECE = 2**26  # bytes that are reserved at once: as many are taken of the device for a moment


def is_used_by(arrays: dict[str, Array]) -> bool:
    """Test for arrays that are on GPUs alone."""
    devices = {device for array in arrays.values() for device in array.sharding.device_set}
    return {device.platform for device in devices} == {"gpu"}


def share_zeros(arrays: dict[str, Array]) -> dict[str, Array]:
    """The same arrays; of those of zeros all that are alike are one array, and on the host.

    Before the first step moments are zeros, and twice as large as the weights.
    """
    copies: dict[Any, Array] = {}
    has_bits = jax.device_get({name: _has_bits(array) for name, array in arrays.items()})

    def shared(name: str, array: Array) -> Array:
        if has_bits[name] or _replicas(array) > 1:  # of which one alone is to be copied
            return array
        kind = array.shape, array.dtype, array.sharding
        if kind not in copies:
            copies[kind] = jax.device_put(array, array.sharding.with_memory_kind(LOCKED))
        return copies[kind]

    return {name: shared(name, array) for name, array in arrays.items()}


def reserve(arrays: Iterable[jax.ShapeDtypeStruct]) -> None:
    """Allocate what copies of such arrays will take, as far as there is as much.

    By a program, beside which other threads run Python: beside `jax.device_put` they do not.
    """
    held = []
    for device in jax.local_devices():
        size = sum(_bytes(array) for array in arrays if device in array.sharding.device_set)
        locked = SingleDeviceSharding(device, memory_kind=LOCKED)
        piece = jax.jit(lambda: jnp.zeros(PIECE, jnp.uint8), out_shardings=locked)
        with suppress(JaxRuntimeError):
            held += [piece().block_until_ready() for _ in range(-(-size // PIECE))]


def _bytes(array: Any) -> int:
    """Bytes that come off each device, where replicas share the work."""
    shard = math.prod(array.sharding.shard_shape(array.shape))
    return shard * array.dtype.itemsize // _replicas(array)


def _replicas(array: Any) -> int:
    """Devices that have the same part of an array."""
    parts = math.prod(array.shape) // max(1, math.prod(array.sharding.shard_shape(array.shape)))
    return len(array.sharding.device_set) // max(1, parts)


@jax.jit
def _has_bits(array: Shaped[Array, "..."]) -> Bool[Array, ""]:
    return jnp.any(as_words(array) != 0)
