"""Peak memory of a step per device, by part: its state, and the live buffers at the peak."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import PyTree

from windlass.analysis import liveness, per_device
from windlass.analysis.liveness import Buffer, CompilerModel
from windlass.analysis.per_device import has_vocab_axis
from windlass.devices.axes import ArrayFacts, annotate
from windlass.devices.chips import Chip, usable
from windlass.layers.attention import Attention
from windlass.layers.stack import Stack
from windlass.networks.experts.layer import Experts
from windlass.planning.traced import Traced

LANES = 128  # width of a TPU's registers
TILE_BYTES = 32  # of a column of its tiles: 8 numbers of 4 bytes, 16 of 2
# In the order in which they are reported.
PARTS = (
    "weights frozen adapters optimiser average carry gradients copies activations layer logits "
    "vocabulary gathered rows other".split()
)
# Known to the byte.
STORED = ("weights", "frozen", "adapters", "optimiser", "average", "carry", "rows")
# By benchmarks/plan_accuracy.md: the most by which a step exceeded its estimate. Little is
# known of XLA for CPUs: of two small models one took half as much again, the other five times.
ERROR = {"tpu": 0.10, "gpu": 0.05, "cpu": 4.0}
KERNELS = 16 * 2**20  # bytes, that a TPU's compiler counts besides
DRIVER = 0.3 * 2**30  # bytes, of libraries and streams, that a GPU's allocator counts besides
COMPUTED_BYTES = 2  # of a number in the compute dtype of TPUs
UNSTACKED = 1.4  # times its residuals that a layer leaves until the end of an iteration, measured
TRIFLE = 1e-4  # of all, below which a part is among the others


class Memory(NamedTuple):
    """Bytes per device, by part, in the order of `PARTS`."""

    parts: dict[str, float]
    limit: int  # what a program may use of the device
    error: float  # the share by which `total` may be too low

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Return True if it fits, also if the estimate is as much too low as it ever was."""
        return self.total * (1 + self.error) <= self.limit

    def as_compiled(self, peak: int | float) -> "Memory":
        """The same, scaled to a compiler's peak; stored parts are exact."""
        stored = {name: size for name, size in self.parts.items() if name in STORED}
        rest = {name: size for name, size in self.parts.items() if name not in STORED}
        factor = (peak - sum(stored.values())) / sum(rest.values())
        parts = {name: stored.get(name, factor * size) for name, size in self.parts.items()}
        return Memory(parts, self.limit, 0.0)


def memory(traced: Traced) -> Memory:
    """The peak memory of a traced step, without compiling anything."""
    chip = traced.described.chip or traced.target.chip
    parts = {part: 0.0 for part in PARTS} | stored(traced)
    kinds = _Kinds(traced)
    for buffer in liveness.peak_buffers(traced.program, _compiler_model(traced, chip)):
        parts[kinds.part(buffer)] += buffer.bytes
    for part, size in _besides(traced, chip):
        parts[part] += size
    least = TRIFLE * sum(parts.values())
    always = (*STORED, "other")
    small = {part: size for part, size in parts.items() if size < least and part not in always}
    parts["other"] += sum(small.values())
    large = {part: size for part, size in parts.items() if size and part not in small}
    return Memory(large, usable(chip), ERROR[chip.kind])


def stored(traced: Traced) -> dict[str, int]:
    """The arguments of the step, which are donated: its results take the same buffers."""
    state, frozen = traced.state, traced.frozen
    rest = (state.step, state.key, state.progress, state.loss_scale)
    is_adapted = bool(traced.described.run.adapter)
    return {
        "adapters" if is_adapted else "weights": _bytes(state.weights),
        "frozen": _bytes(frozen),
        "optimiser": _bytes(state.moments),
        "average": _bytes(state.ema),
        "carry": _bytes(state.carry),
        "rows": _bytes(traced.batch),
        "other": _bytes(rest),
    }


def _besides(traced: Traced, chip: Chip) -> Iterator[tuple[str, float]]:
    """Buffers that only the compiled program shows."""
    if chip.kind == "gpu":
        yield "other", DRIVER
    if chip.kind != "tpu":
        return
    yield "other", KERNELS
    if traced.split["fsdp"] == 1:
        # Projections to heads are copied to the layout of the loop, where no all-gather does it.
        relaid = _relaid(traced.frozen.model, traced.described.run.train.remat)
        arrays = eqx.filter(relaid, annotate(relaid, _is_map_to_heads))
        yield "copies", _bytes(arrays)
    yield "copies", _sum(traced.state.weights, _widened)
    if traced.split["fsdp"] > 1:
        yield "copies", _sum(traced.frozen.model, _gathered_by_copy)


def _padded(width: int) -> int:
    return -(-width // LANES) * LANES


def _sum(model: PyTree, size: Callable[[Any, ArrayFacts], int]) -> int:
    return sum(jax.tree.leaves(annotate(eqx.filter(model, _is_shape), size)))


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _widened(x: Any, about: ArrayFacts) -> int:
    """Bytes by which the copy of an adapter's factor is padded for a grouped matmul.

    The kernel takes matrices of experts row by row, so that a rank of 16, as the innermost axis,
    fills registers of 128. Other matmuls take axes in any order.
    """
    if about.stacked != (Experts.along,) or about.reads is None:
        return 0
    shape, written = _shard_shape(x), len(about.axes) - about.reads
    columns = math.prod(shape[-written:])
    return math.prod(shape[:-written]) * (_padded(columns) - columns) * COMPUTED_BYTES


def _gathered_by_copy(x: Any, about: ArrayFacts) -> int:
    """Bytes of the copy of a frozen stack, in a layout from which its shards are all-gathered.

    Shards of whole tiles are joined where they lie. Others are first copied, once for all layers,
    with the gathered axis outermost. Of experts, which are multiplied row by row, an innermost axis
    has to fill registers; elsewhere it may lie along the columns of tiles.
    """
    if not about.is_matrix or x.dtype.itemsize > COMPUTED_BYTES:  # a cast is in any layout
        return 0
    shape = _shard_shape(x)
    cut = [i for i in range(x.ndim) if _is_over_fsdp(x, i)]
    if len(cut) != 1 or x.ndim == len(about.axes):
        return 0
    (axis,) = cut
    is_innermost = about.stacked == (Experts.along,) and axis == x.ndim - 1
    tile = LANES if is_innermost else TILE_BYTES // x.dtype.itemsize
    if shape[axis] % tile == 0:
        return 0
    others = [size for i, size in enumerate(shape) if i and i != axis]
    return round(math.prod(shape) * x.dtype.itemsize * min(_padded(n) / n for n in others))


def _is_joined(x: Any) -> bool:
    """Return True if shards of whole registers are all-gathered where they lie, innermost."""
    cut = [size for i, size in enumerate(_shard_shape(x)) if _is_over_fsdp(x, i)]
    return bool(cut) and cut[0] % LANES == 0


def _is_over_fsdp(x: Any, axis: int) -> bool:
    return axis < len(x.sharding.spec) and "fsdp" in per_device.names(x.sharding.spec[axis])


def _is_map_to_heads(x: Any, about: ArrayFacts) -> bool:
    return about.reads == 1 and len(about.axes) > 2


def _relaid(model: PyTree, remat: str) -> PyTree:
    """A model without the maps to heads that a loop reads as they lie.

    Those of queries and keys, whose rotation takes them in any layout, unless the backward pass
    computes them again.
    """

    def without(node: Any) -> Any:
        if not isinstance(node, Attention) or remat == "full":
            return node
        return eqx.tree_at(lambda one: (one.query, one.key), node, (None, None))

    return jax.tree.map(without, model, is_leaf=lambda node: isinstance(node, Attention))


def _compiler_model(traced: Traced, chip: Chip) -> CompilerModel:
    is_tpu = chip.kind == "tpu"
    kernel = traced.described.attention
    is_flash = kernel is not None and kernel.name != "xla"
    head = traced.described.run.model.sizes.get("head_dim") if is_flash else None
    joined = {_shard_shape(x) for x in jax.tree.leaves(traced.state.weights) if _is_joined(x)}

    def bytes_of(shape: tuple[int, ...], itemsize: int) -> int:
        if is_tpu and len(shape) > 3 and shape[-1] == head and shape not in joined:
            # The kernel takes head_dim as the innermost axis, padded to whole registers.
            shape = (*shape[:-1], _padded(shape[-1]))
        return math.prod(shape) * itemsize

    return CompilerModel(
        fuses_epilogues=is_tpu,
        reuses_buffers=is_tpu,
        materializes_shared=chip.kind == "cpu",
        has_random_kernel=chip.kind == "gpu",
        bytes_of=bytes_of,
        lanes=LANES if is_tpu else None,
        # In another layout, and on most beside it what is made of it, in half the precision.
        indexed=0.0 if not is_tpu else 1.0 if chip.slug == "v6e" else 1.5,
        sums_devices_at_once=chip.slug == "v6e",
        layers_per_round=max((len(one.kinds) for one in _stacks(traced.frozen.model)), default=1),
        unstacked=0.0 if chip.kind == "cpu" else UNSTACKED,
        has_residuals=chip.kind == "gpu",
        zeros_at_once=chip.kind == "gpu",
    )


def _stacks(model: PyTree) -> list[Stack]:
    leaves = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, Stack))
    return [one for one in leaves if isinstance(one, Stack)]


class _Kinds:
    """The parts of memory that buffers belong to, by their shapes."""

    def __init__(self, traced: Traced):
        sizes = traced.described.run.model.sizes
        self.vocab = sizes["vocab"]
        arrays = jax.tree.leaves((traced.state.weights, traced.frozen.model))
        shapes = {tuple(getattr(x, "shape", ())) for x in arrays}
        # That of tokens, and of further inputs that layers have of them.
        self.tables = {shape for shape in shapes if len(shape) == 2 and shape[0] == self.vocab}
        self.tables |= {(self.vocab, sizes.get("embed"))}
        self.depth = int(traced.batches.accumulation > 1)  # of what is whole in a microbatch
        self.weights = {_shard_shape(x) for x in jax.tree.leaves(traced.state.weights)}

    def part(self, buffer: Buffer) -> str:
        # Accumulated gradients have a leading axis, of the data-parallel shards.
        if buffer.whole[-2:] in self.tables and math.prod(buffer.shape[:-2]) == 1:
            return "vocabulary"
        if has_vocab_axis(buffer.whole, self.vocab):
            return "logits"
        if buffer.maker == "reshard":
            return "gathered"
        if buffer.depth > self.depth:
            return "layer"
        if buffer.shape in self.weights:
            return "copies" if buffer.maker == "convert_element_type" else "gradients"
        return "activations"


def _bytes(tree: PyTree) -> int:
    return sum(math.prod(_shard_shape(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _shard_shape(x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
