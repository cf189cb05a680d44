"""Attention kernels: cuDNN flash, Pallas splash and plain XLA, and which of them a device gets."""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from windlass.columns import DocumentsInRows
from windlass.devices import chips
from windlass.devices.axes import device, is_nvidia, layout, tensor_ways
from windlass.devices.sketch import is_sketched
from windlass.layers import document_attention
from windlass.layers.pattern import CAUSAL, Pattern

# Plain XLA holds a number for every pair of positions, in every head: 4 GiB a row at this length
# with 16 heads. Flash kernels hold none of them.
LONGEST_WITHOUT_FLASH = 8192

MIXED = "mixed"  # checkpoint name of attention's output, for rematerialization policies

LARGEST = 2**31  # elements of queries that our kernels' offsets reach


class RowsOfStep(NamedTuple):
    """The rows of a step, as attention sees them."""

    documents: DocumentsInRows | None = None  # None: where they lie is not known
    deterministic: bool = False  # each step gives the same bits again


ANY_ROWS = RowsOfStep()
_ROWS: ContextVar[RowsOfStep] = ContextVar("_ROWS", default=ANY_ROWS)


@contextmanager
def rows_of(documents: DocumentsInRows | None, *, deterministic: bool = False) -> Iterator[None]:
    """Attention traced here is over rows of packed documents, one in each or several."""
    before = _ROWS.set(RowsOfStep(documents, deterministic))
    try:
        yield
    finally:
        _ROWS.reset(before)


class Kernel(NamedTuple):
    """An attention kernel, and the reason why a device gets it."""

    name: str  # cudnn, splash or xla
    why: str

    @property
    def is_flash(self) -> bool:
        return self.name != "xla"


def choose(
    platform: str,
    device_kind: str,
    dtype: str,
    head_dim: int,
    length: int,
    pattern: Pattern = CAUSAL,
    *,
    deterministic: bool = False,
) -> Kernel:
    """The fastest kernel that a kind of device has for such heads, rows and pattern.

    `platform` is what JAX calls that of a device; what plain XLA computes is always right.
    """
    if pattern.sinks:
        return Kernel("xla", "plain XLA: the flash kernels here have no attention sinks")
    if platform == "tpu":
        return Kernel("splash", "Pallas splash attention, by documents")
    if not is_nvidia(platform, device_kind):
        return Kernel("xla", f"plain XLA: there is no flash kernel for {platform} devices")
    chip = chips.find(device_kind)
    widest = 128 if chip is None else chip.widest_head
    reasons = {
        f"{dtype} matrices": dtype not in ("bfloat16", "float16"),
        f"{device_kind}": chip is not None and not chip.has_bfloat16,
        f"heads of {head_dim}, only of multiples of 8 up to {widest}": head_dim % 8
        or head_dim > widest,
        f"rows of an odd length, {length}": length % 2,
        f"a stride of {pattern.stride}": pattern.stride > 1,
        "a window in both directions": pattern.window is not None and not pattern.causal,
    }
    for what, applies in reasons.items():
        if applies:
            return Kernel("xla", f"plain XLA: cuDNN has no flash kernel for {what}")
    why = "cuDNN flash attention, by documents"
    if deterministic:
        why = "our flash attention within packed documents, plain XLA elsewhere: deterministic"
    return Kernel("cudnn", why)


def attend(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch slots kv_heads dim"],
    v: Float[Array, "batch slots kv_heads dim"],
    *,
    document: Int[Array, "batch seq"],
    slots: Int[Array, "batch slots"],
    first: int | Int[Array, ""],
    causal: bool = True,
    stride: int = 1,
    phase: Int[Array, "batch seq"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq heads dim"]:
    """Attention, softmax(scale q k^T + mask) v, each device its own rows and heads.

    With attention sinks each softmax has one more logit, that of its head, with a value of zero.

    Query i stands at position t = first + i of its row and sees the slots that hold its document,
    up to t where it is causal; with a window only those whose newest input is less than `window`
    positions from t. `scale` is 1/sqrt(dim) where none is given.

    With a stride, slot j holds a cell of `stride` positions, whose newest input is at j * stride +
    phase. Cells of a document are counted from its beginning, so that the phase, in [0, stride),
    is the same for all of them, and it is given for each query; None is stride - 1, that of a
    document at the beginning of the row. A query that sees no cell gets zeros.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    pattern = Pattern(causal, window, stride, sinks=sinks is not None)
    beside = () if sinks is None else (sinks,)
    of_step = _ROWS.get()
    kernel = _kernel(q, slots, first, pattern, of_step)
    mix = _program(kernel, pattern, scale, of_step if kernel == "cudnn" else None)
    at = first if stride == 1 else _standing(document, first, stride, phase)
    rows = layout(("batch",), q.shape[:1])
    if rows is None:  # no mesh
        return mix(q, k, v, document, slots, at, *beside)
    heads, row = PartitionSpec(*rows, None, "tensor", None), PartitionSpec(*rows, None)
    at = jnp.asarray(at, jnp.int32)
    specs = (heads, heads, heads, row, row, row if at.ndim else PartitionSpec())
    specs += (PartitionSpec("tensor"),) * len(beside)
    inputs = [
        jax.sharding.reshard(x, spec)
        for x, spec in zip((q, k, v, document, slots), specs[:5], strict=True)
    ]
    local = jax.shard_map(
        mix,
        in_specs=specs,
        out_specs=heads,
        check_vma=kernel == "xla",  # the checker does not see into the others
    )
    return local(*inputs, jax.sharding.reshard(at, row) if at.ndim else at, *beside)


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
    """Rematerialization policy: what cuDNN's kernel leaves for its backward pass is saved.

    The other kernels name what they leave `MIXED`; this one lets nobody name it.
    """
    return primitive.name == "dot_product_attention_fwd_wrapper"


def xla(q, k, v, document, slots, at, *sinks: Array, pattern: Pattern, scale: float) -> Array:
    seen = visible(document, slots, at, pattern)
    dtype = q.dtype
    if dtype == jnp.float16 and device().platform == "cpu":
        # A CPU has no product of float16 that is summed in float32.
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    with jax.numpy_dtype_promotion("standard"):  # JAX mixes float16 and float32 there
        mask, bias = seen[:, None], None
        if sinks:
            k, v, mask, bias = _with_sinks(k, v, mask, *sinks)
        mixed = jax.nn.dot_product_attention(q, k, v, bias, mask, scale=scale)
    mixed = mixed.astype(dtype)
    if pattern.stride > 1:
        mixed = _seeing(mixed, document, slots, at, pattern)
    return checkpoint_name(mixed, MIXED)


def _with_sinks(
    k: Array, v: Array, mask: Array, sinks: Float[Array, " heads"]
) -> tuple[Array, Array, Array, Array]:
    """One more slot, of zeros, that all queries see, and the bias that gives it a head's logit."""
    k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, v))
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=True)
    bias = jnp.pad(sinks.astype(k.dtype)[:, None], ((0, 0), (k.shape[1] - 1, 0)))
    return k, v, mask, bias[None, :, None]


def cudnn(
    q,
    k,
    v,
    document,
    slots,
    at,
    *,
    pattern: Pattern,
    scale: float,
    rows: RowsOfStep = ANY_ROWS,
) -> Array:
    """cuDNN's flash attention; within several documents of a row, that of our kernels.

    cuDNN knows documents by a mask, and computes what it hides. Rows of a single document need
    none: what stands behind it is padding, which no query of the document sees.
    """
    if _is_ours(q, pattern, rows):
        how: dict[str, Any] = dict(scale=scale, window=pattern.window, saved_as=MIXED)
        return document_attention.attend(q, k, v, document, **how)
    is_single = pattern.causal and rows.documents == "one"
    same = document[:, None, :, None] == slots[:, None, None, :]
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=None if is_single else same,
        is_causal=pattern.causal,
        scale=scale,
        local_window_size=None if pattern.window is None else (pattern.window - 1, 0),
        implementation="cudnn",
    )


def _is_ours(q: Array, pattern: Pattern, rows: RowsOfStep) -> bool:
    """True if our kernels attend within the documents of such rows."""
    known = ("one", "several") if rows.deterministic else ("several",)
    in_reach = q.shape[-1] <= document_attention.WIDEST and q.size < LARGEST
    return rows.documents in known and pattern.causal and in_reach


def splash(
    q, k, v, document, slots, at, *, pattern: Pattern, scale: float, interpret: bool = False
) -> Array:
    from windlass.layers import splash

    how: dict[str, Any] = dict(pattern=pattern, scale=scale, saved_as=MIXED, interpret=interpret)
    mixed = splash.attend(q, k, v, document, slots, at, **how)
    return mixed if pattern.stride == 1 else _seeing(mixed, document, slots, at, pattern)


def sketch(q, k, v, document, slots, at, *, pattern: Pattern, scale: float) -> Array:
    """Stand-in for a flash kernel: its inputs, outputs and saved residuals, and no attention.

    For whoever only counts: tracing the real ones takes longer than all else in a step, and one of
    them needs a device.
    """

    def backward(q, k, v, mixed, sums, d):
        whole = mixed * d * sums[..., None].astype(d.dtype)
        return q + whole, k + jnp.sum(whole), v + jnp.sum(whole)

    gradient = jax.jit(_named(backward, pattern._replace(is_backward=True)))

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


def visible(
    document: Int[Array, "batch seq"],
    slots: Int[Array, "batch slots"],
    at: int | Int[Array, ""] | Int[Array, "batch seq"],
    pattern: Pattern,
) -> Bool[Array, "batch seq slots"]:
    """The mask: which slots each query sees."""
    if pattern.stride == 1:
        back = at + jnp.arange(document.shape[1])[:, None] - jnp.arange(slots.shape[1])
    else:
        back = jnp.asarray(at)[..., None] - pattern.stride * jnp.arange(slots.shape[1])
    past = back >= 0 if pattern.causal else True
    seen = past & (document[:, :, None] == slots[:, None, :])
    if pattern.window is not None:
        seen &= back < pattern.window
        seen = seen if pattern.causal else seen & (back > -pattern.window)
    return seen


def _standing(
    document: Array, first: int | Array, stride: int, phase: Array | None
) -> Int[Array, "batch seq"]:
    """Positions of queries on the axis of cells, where slot j begins at j * stride."""
    back = stride - 1 if phase is None else phase
    at = first + jnp.arange(document.shape[1], dtype=jnp.int32) - back
    return jnp.broadcast_to(at, document.shape)


def _seeing(mixed: Array, document: Array, slots: Array, at: Array, pattern: Pattern) -> Array:
    """Zeros for queries that see no slot: a softmax over nothing is over all that is masked."""
    sees = jnp.any(visible(document, slots, at, pattern), axis=-1)
    return jnp.where(sees[:, :, None, None], mixed, 0)


def _kernel(q: Array, slots: Array, first: Any, pattern: Pattern, rows: RowsOfStep) -> str:
    """Kernel for the devices of the mesh; the flash kernels are for whole rows."""
    here, (_, length, _, dim) = device(), q.shape
    cells = -(-length // pattern.stride)
    is_whole = isinstance(first, int) and first == 0 and slots.shape[1] == cells
    if not is_whole:
        return "xla"
    chosen = choose(here.platform, here.device_kind, q.dtype.name, dim, length, pattern)
    # XLA ends a step with an IndexError that has the gradient of the same cuDNN attention twice and
    # is deterministic (openxla/xla, pull request 46500).
    if chosen.name == "cudnn" and rows.deterministic and not _is_ours(q, pattern, rows):
        return "xla"
    return "sketch" if chosen.is_flash and is_sketched() else chosen.name


@functools.cache
def _program(kernel: str, pattern: Pattern, scale: float, rows: RowsOfStep | None):
    """A kernel as a part of its own in a program."""
    how: dict[str, Any] = {} if rows is None else {"rows": rows}

    def mix(*arrays):
        return KERNELS[kernel](*arrays, pattern=pattern, scale=scale, **how)

    return jax.jit(_named(mix, pattern))


def _named(function: Callable, pattern: Pattern) -> Callable:
    function.__name__ = pattern.name
    return function
