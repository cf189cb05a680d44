"""Sharding rules: axis names, and the two tables that map them to mesh axes."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

# Mesh axes that a named axis is split over; a name that is absent is never split. Models name axes,
# and only this table says where they go. `embed` differs between the two: weights are stored in
# pieces and all-gathered, one layer at a time, to meet activations that are whole.
WEIGHTS = dict(
    embed="fsdp",
    vocab="tensor",
    heads="tensor",
    kv_heads="tensor",
    mlp="tensor",
    experts="expert",
)
ROWS = ("data", "fsdp", "expert")  # outside of expert layers `expert` is data parallelism
# `features` are the columns of what is summed over the batch: a shard each for the devices whose
# parts are summed.
ACTIVATIONS = dict(
    batch=ROWS,
    features=ROWS,
    heads="tensor",
    kv_heads="tensor",
    mlp="tensor",
    vocab="tensor",
)


class Placed(eqx.Module):
    """A module that owns weights, and names the axes of each.

    `axes` has an entry for each array field; a stacked array has `layers` in front of them.
    `matrices` are the fields that are multiplied with activations: they are decayed, and cast to
    the precision of the computation. The others (norms, biases) are neither. `fixed` are those
    that are part of the architecture (a reservoir, a table of indices): never trained, decayed,
    averaged or cast, whatever a recipe says.
    `rounded` are those from which the module makes its matrix by rounding: never cast, since
    what is rounded is a float32 number. `precise` are matrices that are multiplied in float32.
    """

    axes: eqx.AbstractVar[dict[str, tuple[str, ...]]]
    matrices: eqx.AbstractClassVar[tuple[str, ...]]
    fixed: ClassVar[tuple[str, ...]] = ()
    rounded: ClassVar[tuple[str, ...]] = ()
    precise: ClassVar[tuple[str, ...]] = ()

    @property
    def maps(self) -> dict[str, int]:
        """The matrices from one hidden state to another: how many axes, the first, each reads."""
        return {}

    @property
    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The axes that an array has in checkpoints elsewhere, each some of its own here."""
        return {}


class Stacked(eqx.Module):
    """Modules of one form side by side: each array has the axis `along` in front of its own."""

    along: eqx.AbstractClassVar[str]


@dataclasses.dataclass(frozen=True)
class ArrayFacts:
    """A module's declarations about one of its arrays."""

    axes: tuple[str, ...] = ()
    is_matrix: bool = False
    reads: int | None = None  # axes; None where it is no map between hidden states
    is_fixed: bool = False
    is_rounded: bool = False
    is_precise: bool = False
    stacked: tuple[str, ...] = ()  # the named axis in front of `axes`, inside of a `Stacked`


def annotate(tree: PyTree, function: Callable[[Any, ArrayFacts], Any]) -> PyTree:
    """`function(leaf, about)` of every leaf; of one outside any `Placed` nothing is known.

    An optimiser's moments are trees of the same modules as the weights, so the same names reach
    them: nothing has to be declared twice.
    """

    def visit(node, stacked=()):
        if not isinstance(node, Placed | Stacked):
            return function(node, ArrayFacts(stacked=stacked))
        stacked = (node.along,) if isinstance(node, Stacked) else stacked
        children, structure = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda inner: inner is not node
        )
        return structure.unflatten(
            [field(node, path[0].name, child, stacked) for path, child in children]
        )

    def field(node, name, child, stacked):
        if isinstance(node, Stacked) or name not in node.axes:  # an inner module
            return jax.tree.map(lambda inner: visit(inner, stacked), child, is_leaf=_is_placed)
        if child is None:
            return None
        about = ArrayFacts(
            axes=node.axes[name],
            is_matrix=name in node.matrices,
            reads=node.maps.get(name),
            is_fixed=name in node.fixed,
            is_rounded=name in node.rounded,
            is_precise=name in node.precise,
            stacked=stacked,
        )
        # Of one array, or of those that a stack has apart for each layer.
        return jax.tree.map(lambda x: function(x, about), child)

    return jax.tree.map(visit, tree, is_leaf=_is_placed)


def placements(tree: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Shardings of every array of a model, or of a whole train state."""
    return annotate(
        tree,
        lambda x, about: NamedSharding(
            mesh, _spec(WEIGHTS, about.stacked + about.axes, x.shape, mesh)
        ),
    )


def matrices(tree: PyTree) -> PyTree:
    """Boolean pytree: True at every array that its module declares a matrix."""
    return annotate(tree, lambda x, about: about.is_matrix)


def cast(tree: PyTree, dtype: jnp.dtype | str) -> PyTree:
    """Mixed-precision cast: matrices in `dtype`, everything else as it is.

    Activations take their precision from the embedding they come from, so this alone decides what
    a model computes in.
    """

    return annotate(tree, lambda x, about: x.astype(dtype) if is_cast(x, about) else x)


def is_cast(x: Any, about: ArrayFacts) -> bool:
    """An array in the precision of the computation: a matrix, and none that is kept as it is."""
    is_kept = about.is_fixed or about.is_rounded or about.is_precise
    is_kept = is_kept or not jnp.issubdtype(x.dtype, jnp.floating)
    return about.is_matrix and not is_kept


def is_trainable(x: Any, about: ArrayFacts) -> bool:
    """An array that can have a gradient, and may change."""
    return not about.is_fixed and jnp.issubdtype(x.dtype, jnp.floating)


def stack_of(node: Placed) -> tuple[int, ...]:
    """The sizes of the axes along which a module is stacked, one for each layer."""
    shapes = annotate(node, lambda x, about: x.shape[: x.ndim - len(about.axes)])
    return jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple))[0]


def undivided(tree: PyTree, mesh: Mesh | AbstractMesh) -> list[str]:
    """Notes on axes that are not sharded as the table says, as their size does not divide."""
    notes: dict[str, None] = {}

    def look(x, about):
        axes = about.stacked + about.axes
        sizes = x.shape[x.ndim - len(axes) :]
        for name, size in zip(axes, sizes, strict=True):
            ways = _ways(mesh, WEIGHTS.get(name))
            if name == "kv_heads" and size < ways:
                heads = f"{size} kv head{'s' * (size > 1)} on tensor {ways}"
                notes[f"{heads}: keys and values are held {ways // size} times"] = None
            elif size % ways:
                notes[f"{name} ({size}) is not split {ways} ways over {WEIGHTS[name]}"] = None

    annotate(tree, look)
    return list(notes)


def shard(x: Array, axes: str) -> Array:
    """State an activation's layout by the names of its axes: `shard(x, "batch seq embed")`."""
    return x if _mesh().empty else jax.sharding.reshard(x, layout(axes, x.shape))


def layout(
    axes: str | Sequence[str], shape: Sequence[int], mesh: Mesh | AbstractMesh | None = None
) -> PartitionSpec | None:
    """Partition spec of an activation of this shape; None where there is no mesh."""
    mesh = mesh or _mesh()
    names = axes.split() if isinstance(axes, str) else axes
    if len(names) != len(shape):
        raise ValueError(f"{axes!r} names {len(names)} axes; the array has shape {shape}")
    return None if mesh.empty else _spec(ACTIVATIONS, names, shape, mesh)


def stored(axes: Sequence[str], shape: Sequence[int]) -> PartitionSpec | None:
    """Partition spec of a weight of this shape where it is kept; None where a compiler lays it out,
    or there is no mesh.
    """
    mesh = _mesh()
    return None if mesh.empty or mesh.are_all_axes_auto else _spec(WEIGHTS, axes, shape, mesh)


def gathered(weight: Array, axes: tuple[str, ...], like: Sequence[int] | None = None) -> Array:
    """All-gather of a weight over the mesh axis that only stores it in pieces (FSDP).

    Over others, too, that do not divide an array of the shape `like`. Where the compiler is to lay
    everything out, as at init, that is left to it.
    """
    if _mesh().empty or _mesh().are_all_axes_auto:
        return weight
    return jax.sharding.reshard(weight, _gathered_spec(axes, like or weight.shape))


def _gathered_spec(axes: tuple[str, ...], shape: Sequence[int]) -> PartitionSpec:
    return _spec(_met(), axes, shape, _mesh())


def in_use(axes: tuple[str, ...], shape: Sequence[int]) -> PartitionSpec:
    """Partition spec of experts' weights in use: gathered, and each expert where it is stored."""
    return _spec(_met() | {"experts": WEIGHTS["experts"]}, axes, shape, _mesh())


def _met() -> dict[str, Any]:
    """Axes that weights and activations have split alike, and are multiplied in pieces."""
    return {name: axis for name, axis in WEIGHTS.items() if axis == ACTIVATIONS.get(name)}


def reduce_scattered(parts: Array, axes: tuple[str, ...], weight: Any) -> Array:
    """Sum of the parts of a weight's gradient, laid out as the abstract array of the weight is.

    In front, `parts` has an axis for the groups of devices that have rows of the batch of their
    own, each of which has one part.
    """
    to = stored(axes, parts.shape[1:])
    if to is None or len(parts) == 1:
        total = jnp.squeeze(parts, axis=0) if len(parts) == 1 else jnp.sum(parts, axis=0)
        return total if to is None else jax.sharding.reshard(total, weight.sharding.spec)
    over = over_rows(len(parts))
    scattered = tuple(name for name in over if name in to)
    others = tuple(name for name in over if name not in to)

    def local(part):
        total = part[0]
        for name in scattered:  # first: what is then summed over the others is less
            at = to.index(name)
            total = jax.lax.psum_scatter(total, name, scatter_dimension=at, tiled=True)
        return jax.lax.psum(total, others)

    spec = PartitionSpec(over, *_gathered_spec(axes, parts.shape[1:]))
    summed = jax.shard_map(local, in_specs=spec, out_specs=to)
    return like_weight(kept_apart(summed(jax.sharding.reshard(parts, spec))), weight)


def like_weight(gradient: Array, weight: Any) -> Array:
    """A gradient laid out as its weight, which one that was made outside of a run has otherwise."""
    to = weight.sharding.spec
    is_so = jax.typeof(gradient).sharding.spec == to
    return gradient if is_so else jax.sharding.reshard(gradient, to)


def kept_apart(total: Array) -> Array:
    """A sum over devices of which a compiler is to make no part of another sum.

    Of those of a tied table, or of microbatches, it would hold all until the last is there; libtpu
    0.0.48 refuses the latter ("RET_CHECK failure … while_loop_all_reduce_code_motion").
    """
    return jax.lax.optimization_barrier(total)


def replicated(x: Array) -> Array:
    """All-gather of an array over every mesh axis: each device holds all of it."""
    return x if _mesh().empty else jax.sharding.reshard(x, PartitionSpec())


def by_rows(function: Callable, tokens: Sequence[Array], whole: Sequence[Array]) -> Any:
    """The function where each device has its own rows of some arrays, and all of others.

    What it gives has rows, too. For kernels, of which a compiler does not know how to split them.
    """
    rows = layout(("batch",), tokens[0].shape[:1])
    assert rows is not None  # devices that have kernels are known by their mesh
    specs = (*[rows] * len(tokens), *[PartitionSpec()] * len(whole))
    arrays = map(jax.sharding.reshard, (*tokens, *whole), specs)
    # The checker of what varies over the mesh does not see into kernels.
    return jax.shard_map(function, in_specs=specs, out_specs=rows, check_vma=False)(*arrays)


def row_axes(mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Partition spec of rows that divide evenly."""
    return PartitionSpec(_there(mesh, ROWS))


def batch_shards(rows: int) -> int:
    """Number of shards of a batch of `rows`: groups of devices that it is split over."""
    ways = _ways(_mesh(), ACTIVATIONS["batch"])
    return 1 if rows % ways else ways


def over_rows(rows: int) -> tuple[str, ...]:
    """Mesh axes of several devices that a batch of `rows` is split over."""
    names = ACTIVATIONS["batch"] if batch_shards(rows) > 1 else ()
    return tuple(name for name in names if _ways(_mesh(), name) > 1)


def split_over(axis: str, size: int) -> str | tuple[str, ...] | None:
    """The mesh axis that an activation's named axis of this size is split over, if any."""
    mesh_axis = _there(_mesh(), ACTIVATIONS[axis])
    return None if size % _ways(_mesh(), mesh_axis) or _mesh().empty else mesh_axis


def tensor_ways() -> int:
    return _ways(_mesh(), "tensor")


def device() -> AbstractDevice:
    """Kind of the mesh's devices, which need not be here; a CPU where there is no mesh."""
    return getattr(_mesh(), "abstract_device", None) or AbstractDevice("cpu", None, "cpu")


def is_nvidia(platform: str, device_kind: str) -> bool:
    """Return True if these are JAX's words for a GPU of NVIDIA's."""
    return platform in ("gpu", "cuda") and not device_kind.startswith(("AMD", "gfx"))


def _mesh() -> AbstractMesh:
    return jax.sharding.get_abstract_mesh()


def _is_placed(node) -> bool:
    return isinstance(node, Placed | Stacked)


def _ways(mesh, mesh_axis: str | tuple[str, ...] | None) -> int:
    names = (mesh_axis,) if isinstance(mesh_axis, str) else mesh_axis or ()
    return math.prod(mesh.shape.get(name, 1) for name in names)


def _spec(table, axes, shape, mesh) -> PartitionSpec:
    stacked = [None] * (len(shape) - len(axes))  # the leading `layers` axis of scanned blocks
    sizes = shape[len(stacked) :]
    there = [_there(mesh, table.get(name)) for name in axes]
    split = [
        over if size % _ways(mesh, over) == 0 else None
        for over, size in zip(there, sizes, strict=True)
    ]
    return PartitionSpec(*stacked, *split)


def _there(mesh, mesh_axis: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    """The mesh axes without that of experts where a mesh has none, as in most runs."""
    if isinstance(mesh_axis, tuple):
        return tuple(name for name in mesh_axis if _there(mesh, name))
    return None if mesh_axis == "expert" and "expert" not in mesh.shape else mesh_axis
