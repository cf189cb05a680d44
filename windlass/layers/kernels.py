"""How queries meet keys: the attention kernels, and which of them a device gets."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from windlass.devices import chips
from windlass.devices.axes import layout, tensor_ways
from windlass.layers.sketch import is_sketched

# Plain XLA holds a number for every pair of positions, in every head: 4 GiB a row at this length
# with 16 heads. Flash kernels hold none of them.
LONGEST_WITHOUT_FLASH = 8192

# The name of attention in a program, where its operations are counted by it; a window follows.
NAME = "causal_attention"
GRADIENT = "causal_gradient"  # and of its backward pass, where it is only sketched

MIXED = "mixed"  # what attention gives, to whoever decides what a backward pass may find saved
LANES = 128  # the width of a TPU's registers: lengths are padded to a multiple of it
LARGEST_BLOCK = 512  # positions that the TPU kernel takes at a time


class Kernel(NamedTuple):
    """A way to compute attention, and in words why a device gets it."""

    name: str  # cudnn, splash or xla
    why: str

    @property
    def is_flash(self) -> bool:
        return self.name != "xla"


def choose(platform: str, device_kind: str, dtype: str, head_dim: int, length: int) -> Kernel:
    """The fastest kernel that a kind of device has for such heads and rows.

    `platform` is what JAX calls that of a device; what plain XLA computes is always right.
    """
    if platform == "tpu":
        return Kernel("splash", "Pallas splash attention, by documents")
    if platform not in ("gpu", "cuda") or device_kind.startswith(("AMD", "gfx")):
        return Kernel("xla", f"plain XLA: there is no flash kernel for {platform} devices")
    chip = chips.find(device_kind)
    widest = 128 if chip is None else chip.widest_head
    reasons = {
        f"{dtype} matrices": dtype not in ("bfloat16", "float16"),
        f"{device_kind}": chip is not None and not chip.has_bfloat16,
        f"heads of {head_dim}, only of multiples of 8 up to {widest}": head_dim % 8
        or head_dim > widest,
        f"rows of an odd length, {length}": length % 2,
    }
    for what, applies in reasons.items():
        if applies:
            return Kernel("xla", f"plain XLA: cuDNN has no flash kernel for {what}")
    return Kernel("cudnn", "cuDNN flash attention, with a mask of documents")


def attend(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch slots kv_heads dim"],
    v: Float[Array, "batch slots kv_heads dim"],
    *,
    document: Int[Array, "batch seq"],
    slots: Int[Array, "batch slots"],
    first: int | Int[Array, ""],
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "batch seq heads dim"]:
    """Mix values by the similarity of queries and keys, each device its own rows and heads.

    Query i stands at slot `first + i` and sees the slots up to its own that hold its document;
    with a window, the last so many of them, its own included. Scores are multiplied by `scale`,
    1/sqrt(dim) where it is not said.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    kernel = _kernel(q, slots, first)
    mix = _program(kernel, window, scale)
    rows = layout(("batch",), q.shape[:1])
    if rows is None:  # no mesh
        return mix(q, k, v, document, slots, first)
    heads, row = PartitionSpec(*rows, None, "tensor", None), PartitionSpec(*rows, None)
    specs = (heads, heads, heads, row, row)
    inputs = [
        jax.sharding.reshard(x, spec)
        for x, spec in zip((q, k, v, document, slots), specs, strict=True)
    ]
    local = jax.shard_map(
        mix,
        in_specs=(*specs, PartitionSpec()),
        out_specs=heads,
        check_vma=kernel == "xla",  # the checker does not see into the others
    )
    return local(*[*inputs, jnp.asarray(first, jnp.int32)])


def spread(x: Float[Array, "batch seq kv_heads dim"]) -> Float[Array, "batch seq more_heads dim"]:
    """Keys or values so that each device has the head its queries belong to.

    With fewer key heads than devices to compute them, a head is held by several.
    """
    heads, ways = x.shape[2], tensor_ways()
    if heads % ways == 0:
        return x
    rows = layout(("batch",), x.shape[:1])
    assert rows is not None and ways % heads == 0

    def own(x):
        mine = jax.lax.axis_index("tensor") // (ways // heads)
        return jax.lax.dynamic_slice_in_dim(x, mine, 1, axis=2)

    return jax.shard_map(
        own,
        in_specs=PartitionSpec(*rows, None, None, None),
        out_specs=PartitionSpec(*rows, None, "tensor", None),
    )(x)


def keeps(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy for `jax.checkpoint`: what cuDNN's kernel leaves for its backward pass is kept.

    The other kernels name what they leave `MIXED`; this one lets nobody name it.
    """
    return primitive.name == "dot_product_attention_fwd_wrapper"


def xla(q, k, v, document, slots, first, *, window: int | None, scale: float) -> Array:
    back = first + jnp.arange(q.shape[1])[:, None] - jnp.arange(slots.shape[1])
    seen = (back >= 0) & (document[:, :, None] == slots[:, None, :])
    if window is not None:
        seen &= back < window
    dtype = q.dtype
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if dtype == jnp.float16 and (device is None or device.platform == "cpu"):
        # A CPU has no product of float16 that is summed in float32.
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    with jax.numpy_dtype_promotion("standard"):  # JAX mixes float16 and float32 there
        mixed = jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], scale=scale)
    return checkpoint_name(mixed.astype(dtype), MIXED)


def cudnn(q, k, v, document, slots, first, *, window: int | None, scale: float) -> Array:
    same = document[:, None, :, None] == slots[:, None, None, :]
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=same,
        is_causal=True,
        scale=scale,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


def splash(
    q, k, v, document, slots, first, *, window: int | None, scale: float, interpret: bool = False
) -> Array:
    # Imported by those who have a TPU, or pretend to: it takes half a second.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = q.shape[1:3]
    # Positions past the end are seen by no position before it, and what they see is cut off.
    missing = -length % LANES
    whole = length + missing
    q, k, v = (jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) for x in (q, k, v))
    document, slots = (jnp.pad(x, ((0, 0), (0, missing))) for x in (document, slots))
    block = next(size for size in range(LARGEST_BLOCK, 0, -LANES) if whole % size == 0)
    left = None if window is None else window - 1
    kernel = kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([masks.LocalMask((whole, whole), (left, 0), 0)] * heads),
        block_sizes=kernels.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        residual_checkpoint_name=MIXED,
        interpret=interpret,
    )
    # The kernel multiplies nothing, and wants heads before positions.
    q, k, v = (x.swapaxes(1, 2) for x in (q * jnp.asarray(scale, q.dtype), k, v))
    mixed: Any = jax.vmap(kernel)(q, k, v, kernels.SegmentIds(document, slots))
    return mixed.swapaxes(1, 2)[:, :length].astype(v.dtype)


def sketch(q, k, v, document, slots, first, *, window: int | None, scale: float) -> Array:
    """What a flash kernel reads, gives and leaves for its backward pass, and no attention.

    For whoever only counts: tracing the real ones takes longer than all else in a step, and one of
    them asks for a device.
    """

    def backward(q, k, v, mixed, sums, d):
        whole = mixed * d * sums[..., None].astype(d.dtype)
        return q + whole, k + jnp.sum(whole), v + jnp.sum(whole)

    gradient = jax.jit(_named(backward, GRADIENT, window))

    @jax.custom_vjp
    def mix(q, k, v):
        return q + jnp.sum(k + v)

    def forward(q, k, v):
        mixed = checkpoint_name(mix(q, k, v), MIXED)
        sums = checkpoint_name(jnp.max(mixed, axis=-1).astype(jnp.float32), MIXED)
        return mixed, (q, k, v, mixed, sums)

    mix.defvjp(forward, lambda left, d: gradient(*left, d))
    return mix(q, k, v)


KERNELS = {"xla": xla, "cudnn": cudnn, "splash": splash, "sketch": sketch}


def _kernel(q: Array, slots: Array, first: Any) -> str:
    """By the devices of the mesh; the flash kernels are for whole rows."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    is_whole = isinstance(first, int) and first == 0 and q.shape[1] == slots.shape[1]
    if device is None or not is_whole:
        return "xla"
    _, length, _, dim = q.shape
    chosen = choose(device.platform, device.device_kind, q.dtype.name, dim, length)
    return "sketch" if chosen.is_flash and is_sketched() else chosen.name


@functools.cache
def _program(kernel: str, window: int | None, scale: float):
    """A kernel as a part of its own in a program."""

    def mix(q, k, v, document, slots, first):
        return KERNELS[kernel](q, k, v, document, slots, first, window=window, scale=scale)

    return jax.jit(_named(mix, NAME, window))


def _named(function: Callable, name: str, window: int | None) -> Callable:
    function.__name__ = name if window is None else f"{name}_{window}"
    return function
