"""Attention kernels: cuDNN flash, Pallas splash and plain XLA, and which of them a device gets."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from windlass.columns import DocumentsPerRow
from windlass.devices import chips
from windlass.devices.axes import device, is_nvidia, layout, tensor_ways
from windlass.devices.sketch import is_sketched
from windlass.layers.pattern import CAUSAL, Pattern

# Plain XLA holds a number for every pair of positions, in every head: 4 GiB a row at this length
# with 16 heads. Flash kernels hold none of them.
LONGEST_WITHOUT_FLASH = 8192

MIXED = "mixed"  # checkpoint name of attention's output, for rematerialization policies

# What cuDNN's kernels take to be told of documents, in positions of their places, filled or empty,
# for each position of the rows: blocks are started for all of them.
MOST_SEGMENTS = 16  # beyond this a mask is faster
MERGED = 2  # outputs of two calls put together
AWAITED = 3  # a loop, whose number of rounds the host waits for, and its second round now and then
SHORTEST = 256  # places
SPREAD = 1.5  # of the documents of a row about their mean, in parts of it

_DOCUMENTS: ContextVar[DocumentsPerRow | None] = ContextVar("_DOCUMENTS", default=None)


@contextmanager
def rows_of(documents: DocumentsPerRow | None) -> Iterator[None]:
    """Attention traced here is over rows of so many documents; None: of any number."""
    before = _DOCUMENTS.set(documents)
    try:
        yield
    finally:
        _DOCUMENTS.reset(before)


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
    return Kernel("cudnn", "cuDNN flash attention, by documents")


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
    kernel = _kernel(q, slots, first, pattern)
    mix = _program(kernel, pattern, scale, _DOCUMENTS.get() if kernel == "cudnn" else None)
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
    documents: DocumentsPerRow | None = None,
) -> Array:
    """cuDNN's kernels, which know documents by their lengths or by a mask.

    A mask costs them half as much time again, and what it hides is computed all the same. Rows of
    a single document need neither: what stands behind it is padding, which no query of the document
    sees.
    """
    is_plain = pattern.causal and pattern.window is None and q.shape[-1] <= 128
    if is_plain and documents is not None and documents.most > 1 and _takes_lengths(q):
        calls = Calls.of(documents, q.shape[0], q.shape[1], scale)
        if calls is not None:
            return _by_lengths(calls, q, k, v, document)
    is_single = pattern.causal and documents is not None and documents.most == 1
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


def _takes_lengths(q: Array) -> bool:
    chip = chips.find(device().device_kind)
    return chip is not None and chip.has_segments and q.size < 2**31  # offsets have 32 bits


class DocumentPlaces(NamedTuple):
    """Places for documents in a call of cuDNN's kernel, each of as many positions."""

    count: int
    span: int

    @property
    def size(self) -> int:
        return self.count * self.span


class Calls(NamedTuple):
    """Calls of cuDNN's kernel by which attention is computed within documents.

    The longest documents have places as long as a row. Of n positions, the document behind the p
    longest has less than n / p: none is too long for shorter places behind those, whatever the
    data. A batch with more documents than places takes further rounds of the last call.
    """

    places: tuple[DocumentPlaces, ...]
    rounds: int  # of a batch that has most documents
    scale: float

    @property
    def documents(self) -> int:
        return self.before + self.places[-1].count * self.rounds

    @property
    def before(self) -> int:
        """Documents that have a place before those of the last call."""
        return sum(each.count for each in self.places[:-1])

    @staticmethod
    def of(documents: DocumentsPerRow, rows: int, length: int, scale: float) -> "Calls | None":
        """The calls that take least time; None where a mask takes less."""
        most = documents.at_most(rows)
        likely = rows * math.ceil(documents.mean * (1 + SPREAD / math.sqrt(rows)))
        found = [
            calls
            for count in dict.fromkeys((most, min(likely, most)))
            for span in _spans(length)
            if (calls := _with_places(count, most, rows, length, span, scale))
        ]
        best = min(found, key=lambda calls: calls.cost(rows * length))
        return best if best.cost(rows * length) <= MOST_SEGMENTS else None

    def cost(self, positions: int) -> float:
        merged, awaited = len(self.places) > 1, self.rounds > 1
        cells = sum(each.size for each in self.places)
        return cells / positions + MERGED * merged + AWAITED * awaited


def _spans(length: int) -> Iterator[int]:
    """Lengths of places: that of a row, halved as often as it can be."""
    yield length
    while length % 2 == 0 and length >= 2 * SHORTEST:
        length //= 2
        yield length


def _with_places(
    count: int, most: int, rows: int, length: int, span: int, scale: float
) -> Calls | None:
    """Calls with places for so many documents, most of them of this span; None: there are none."""
    each = rows * length // span  # cuDNN takes them by rows of this span, two of each at least
    first = () if span == length else (DocumentPlaces(each, length),)
    count, most = (one - sum(places.count for places in first) for one in (count, most))
    if count <= 0:
        return None
    last = DocumentPlaces(each * max(2, -(-count // each)), span)
    return Calls((*first, last), max(1, -(-most // last.count)), scale)


class Segments(NamedTuple):
    """Documents of all rows, which are laid end to end, in the order of their places."""

    begin: Int[Array, " documents"]  # position of the first token; of an empty place, the end
    size: Int[Array, " documents"]
    number: Int[Array, "batch seq"]  # of the document of each position


def segmented(document: Int[Array, "batch seq"], calls: Calls) -> Segments:
    """Documents by their places: the longest first, those of a call in the order of the rows.

    Padding is computed with the document before it, which does not see it.
    """
    is_first = jnp.diff(document, axis=1, prepend=document[:, :1] - 1) != 0
    is_first &= (document >= 0) | (jnp.arange(document.shape[1]) == 0)
    most, end = calls.documents, is_first.size
    begin = jnp.nonzero(is_first.ravel(), size=most + 1, fill_value=end)[0].astype(jnp.int32)
    size = jnp.diff(begin)
    number = (jnp.cumsum(is_first.ravel()) - 1).reshape(is_first.shape).astype(jnp.int32)
    if not calls.before:
        return Segments(begin[:-1], size, number)
    rank = jnp.argsort(jnp.argsort(-size))
    order = jnp.argsort(rank >= calls.before)  # which is stable
    place = jnp.argsort(order).astype(jnp.int32)
    return Segments(begin[order], size[order], place[number])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_lengths(calls: Calls, q: Array, k: Array, v: Array, document: Array) -> Array:
    """Causal attention within documents, in as many calls as a batch needs.

    Places are for the documents of the whole batch: a row may have many where others have few.
    """
    return _by_lengths_forward(calls, q, k, v, document)[0]


def _by_lengths_forward(calls: Calls, q: Array, k: Array, v: Array, document: Array):
    segments = segmented(document, calls)

    def computed(held: "Held") -> tuple[Array, Array]:
        return flash(q, k, v, held, calls.scale)

    mixed, *sums = computed(first := _held(calls, segments, 0))
    for number in range(1, len(calls.places)):
        own, more = computed(held := _held(calls, segments, number))
        mixed = jnp.where(held.holds(segments.number), own, mixed)
        sums.append(more)

    def further(number, mixed):
        held = _held(calls, segments, number)
        return jnp.where(held.holds(segments.number), computed(held)[0], mixed)

    if calls.rounds > 1:
        mixed = jax.lax.fori_loop(len(calls.places), _needed(calls, segments), further, mixed)
    mixed, sums, segments = jax.tree.map(
        lambda x: checkpoint_name(x, MIXED), (mixed, sums, segments)
    )
    return mixed, (q, k, v, mixed, sums, segments)


def _by_lengths_backward(calls: Calls, kept, d: Array):
    q, k, v, mixed, sums, segments = kept

    def joined(number: int | Array, sums: Array | None, gradients: Any) -> Any:
        held = _held(calls, segments, number)
        if sums is None:  # which are kept of the first rounds
            _, sums = flash(q, k, v, held, calls.scale)
        own = flash_gradient(q, k, v, held, calls.scale, mixed=mixed, sums=sums, d=d)
        if gradients is None:
            return own
        is_own = held.holds(segments.number)
        return tuple(jnp.where(is_own, *pair) for pair in zip(own, gradients, strict=True))

    gradients = None
    for number, one in enumerate(sums):
        gradients = joined(number, one, gradients)
    if calls.rounds > 1:
        gradients = jax.lax.fori_loop(
            len(calls.places),
            _needed(calls, segments),
            lambda number, gradients: joined(number, None, gradients),
            gradients,
        )
    assert gradients is not None
    return *gradients, None


_by_lengths.defvjp(_by_lengths_forward, _by_lengths_backward)


class Held(NamedTuple):
    """Documents of a call."""

    begin: Int[Array, " places"]  # position of the first token
    size: Int[Array, " places"]
    span: int  # that none is longer than
    first: int | Int[Array, ""]  # number of the first of them

    def holds(self, number: Int[Array, "batch seq"]) -> Bool[Array, "batch seq 1 1"]:
        """Mask of the positions of these documents, from the numbers of theirs."""
        after = self.first + len(self.begin)
        return ((number >= self.first) & (number < after))[..., None, None]


def _held(calls: Calls, segments: Segments, number: int | Array) -> Held:
    """Documents of a call by its number; behind the last of `places` are its further rounds."""
    if isinstance(number, int) and number < len(calls.places) - 1:
        places, first = calls.places[number], sum(each.count for each in calls.places[:number])
    else:
        places = calls.places[-1]
        first = calls.before + (number - len(calls.places) + 1) * places.count
    begin, size = (
        jax.lax.dynamic_slice(x, [first], [places.count]) for x in (segments.begin, segments.size)
    )
    return Held(begin, size, places.span, first)


def _needed(calls: Calls, segments: Segments) -> Int[Array, ""]:
    """Number of calls that a batch needs."""
    behind = jnp.max(segments.number) - calls.before
    return len(calls.places) + jnp.maximum(behind, 0) // calls.places[-1].count


def flash(q, k, v, held: Held, scale: float) -> tuple[Array, Array]:
    """cuDNN's attention within documents, and the logarithms of its sums."""
    lowest, packed, how = _packed(q, k, v, held, scale)
    rows = (_cut(x, held.span) for x in (q, k, v))
    mixed, sums = lowest._dot_product_attention_fwd_p.bind(*rows, *packed, **how, is_training=True)
    return mixed.reshape(q.shape), sums


def flash_gradient(
    q, k, v, held: Held, scale: float, *, mixed: Array, sums: Array, d: Array
) -> tuple[Array, ...]:
    lowest, packed, how = _packed(q, k, v, held, scale)
    (q, k, v, mixed, d), shapes = (
        [_cut(x, held.span) for x in (q, k, v, mixed, d)],
        [x.shape for x in (q, k, v)],
    )
    found = lowest._dot_product_attention_bwd_p.bind(q, k, v, *packed, sums, mixed, d, **how)
    return tuple(x.reshape(shape) for x, shape in zip(found, shapes, strict=True))


def _cut(x: Array, span: int) -> Array:
    """Rows as long as a place, which cuDNN starts blocks for; a document may begin in any."""
    return x.reshape(-1, span, *x.shape[2:])


def _packed(q, k, v, held: Held, scale: float) -> tuple[Any, Sequence[Array], dict[str, Any]]:
    """JAX's module, and what its operations of cuDNN take of packed rows.

    JAX shows them nowhere else; its own function before 0.11.1 takes keys of fewer heads than
    queries have from wrong places, and counts places for documents in each row by itself.
    """
    from jax._src.cudnn import fused_attention_stablehlo as lowest

    layout = lowest.AttentionLayout.BTNH.value
    version = lowest.check_cudnn_version()
    lowest.check_is_flash_attention(q, k, v, layout, version, False, True, True)
    positions = q.shape[0] * q.shape[1]
    rows = positions // held.span
    # As many offsets as JAX has for each row; what follows the last is the end.
    after = jnp.full(rows, positions, held.begin.dtype)
    offsets = jnp.concatenate([held.begin, after]).reshape(rows, -1)
    lengths = held.size.reshape(rows, -1)
    none = jnp.zeros(0, q.dtype)
    packed = [
        *(none, lengths, lengths),
        *(offsets * math.prod(x.shape[2:]) for x in (q, k)),
        *(none, none),
    ]
    how = dict(
        scale=scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),  # no bias, no gradient of it
        mask_type=lowest.MaskType.PADDING_CAUSAL,
        layout=layout,
        sliding_window_length=None,
    )
    return lowest, packed, how


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


def _kernel(q: Array, slots: Array, first: Any, pattern: Pattern) -> str:
    """Kernel for the devices of the mesh; the flash kernels are for whole rows."""
    here, (_, length, _, dim) = device(), q.shape
    cells = -(-length // pattern.stride)
    is_whole = isinstance(first, int) and first == 0 and slots.shape[1] == cells
    if not is_whole:
        return "xla"
    chosen = choose(here.platform, here.device_kind, q.dtype.name, dim, length, pattern)
    return "sketch" if chosen.is_flash and is_sketched() else chosen.name


@functools.cache
def _program(kernel: str, pattern: Pattern, scale: float, documents: DocumentsPerRow | None):
    """A kernel as a part of its own in a program."""
    how: dict[str, Any] = {} if documents is None else {"documents": documents}

    def mix(*arrays):
        return KERNELS[kernel](*arrays, pattern=pattern, scale=scale, **how)

    return jax.jit(_named(mix, pattern))


def _named(function: Callable, pattern: Pattern) -> Callable:
    function.__name__ = pattern.name
    return function
