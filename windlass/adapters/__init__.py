"""Adapters: what takes the place of a model's linear maps. `adapter.kind` in a recipe is the file.

A file defines `Adapter`, a section that extends `BaseAdapter` with
`adapt(model, names=..., key=...)`, which puts an `Adapted` in the place of each linear map that its
patterns choose; `replaced` does the walking. `names` is the family's table of Hugging Face names,
by which a map may be called too. Of a list in a recipe each is applied to what those before it
made. An adapter that is fitted to the matrices it replaces (SVD, clip search, k-means) does so in
`fit`, in NumPy on the host, before the first step. No family knows of adapters.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from windlass.config import Problem
from windlass.devices.axes import Stacked, stack_of
from windlass.errors import UserError
from windlass.layers.dropout import number
from windlass.layers.embedding import TokenRows, TokenTable
from windlass.layers.linear import Linear, LinearMap
from windlass.layers.names import first_match, name, refuse_idle
from windlass.layers.residual import Connection
from windlass.layers.stack import Stack

Model = TypeVar("Model")

EVERY = "all-linear"  # PEFT's word for every linear map


class Adapted(LinearMap):
    """A linear map in the place of another.

    `base` is what it keeps of the other: the map itself, or None where arrays of its own stand for
    it, as a quantiser's do. `trains` names the fields, arrays and parts, that are trained where a
    recipe has no patterns.
    """

    base: eqx.AbstractVar[LinearMap | None]
    trains: eqx.AbstractVar[tuple[str, ...]]

    @property
    def code_bits(self) -> Mapping[str, int]:
        """Bits of each code, by the field of integers that holds them; files may be as small."""
        return {}

    @property
    def weight(self) -> Float[Array, "..."]:
        """The matrix of the one map that computes the same."""
        return self.merged().weight

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of a weight once deployed, with its share of scales; None: it is no quantiser."""
        return None


class RoundedMap(Adapted):
    """A linear map whose matrix is rounded from latent weights, kept and trained in float32.

    The gradient reaches them by a straight-through estimator. `scale` is the step between levels,
    or a part of it, where it is learned.
    """

    latent: Float[Array, "..."]
    scale: Float[Array, "..."] | None
    bias: Float[Array, "..."] | None
    reads: tuple[str, ...] = eqx.field(static=True)
    writes: tuple[str, ...] = eqx.field(static=True)
    trains: tuple[str, ...] = eqx.field(static=True)
    base: None
    matrices: ClassVar[tuple[str, ...]] = ("latent",)
    rounded: ClassVar[tuple[str, ...]] = ("latent", "scale")

    @abstractmethod
    def dequantized(self) -> Float[Array, "..."]:
        """The matrix that is multiplied, in float32."""

    @property
    @abstractmethod
    def scale_axes(self) -> tuple[str, ...]: ...

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        latent = self.reads + self.writes
        return {"latent": latent, "scale": self.scale_axes, "bias": self.writes}

    @property
    def maps(self) -> dict[str, int]:
        return {"latent": len(self.reads)}

    def merged(self) -> Linear:
        return Linear.of(self.reads, self.writes, self.dequantized(), self.bias)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.merged()(x)

    def product(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.merged().product(x)


TrainsOfRounded = Literal["weights", "scales", "none"]


def trained_fields(trains: TrainsOfRounded) -> tuple[str, ...]:
    """Fields of a `RoundedMap` that a recipe trains; with the weights their scales."""
    return {"weights": ("latent", "scale", "bias"), "scales": ("scale",), "none": ()}[trains]


class BaseAdapter:
    """Interface of an adapter's section, beside its keys."""

    # Default form of an export of its run: a PEFT folder, the merged model, or as it is, in files
    # that only Windlass reads.
    exports: ClassVar[Literal["peft", "merged", "own"]] = "merged"
    free: ClassVar[tuple[str, ...]] = ()  # keys that change nothing of what its arrays mean

    @abstractmethod
    def adapt(self, model: Model, *, names: Mapping[str, str], key: PRNGKeyArray) -> Model: ...

    @property
    def gguf(self) -> str | None:
        """The GGML type that holds its maps exactly, such as Q4_0; None: there is none."""
        return None

    def at(self, linear: LinearMap) -> "BaseAdapter":
        """The settings for one map, of an adapter that treats them differently."""
        return self

    def fit(self, weight: np.ndarray, reads: int) -> dict[str, np.ndarray]:
        """Fields of the `Adapted` that `adapt` makes, fitted to the matrix that it replaces.

        The matrix is of one layer, float32, [reads..., writes...], and `reads` the number of axes
        read. All fields that depend on it are returned: where no base is kept, `adapt` makes zeros
        of their shapes. Called on the host, by the first process, once before the run; never where
        the arrays come from another run with the same adapter.
        """
        return {}

    def convert(self, there: Adapted, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        """As `fit`, from a map that another run adapted otherwise; None: `fit` is to be asked.

        `there` is that map, of one layer, with NumPy arrays. The matrix is what all adapters of
        that run together make of it.
        """
        return None


class Peft(BaseAdapter):
    """An adapter that PEFT knows: it may start from a folder of PEFT's, and be exported as one.

    It has the keys `path`, where it starts from, `targets`, and `whole`: patterns of weights that
    are trained as they are beside it.
    """

    exports = "peft"
    whole: tuple[str, ...] = ()
    peft_type: ClassVar[str]
    # From its parts to what PEFT puts behind the name of a map; the first is in every adapter.
    peft_parts: ClassVar[Mapping[str, str]]
    peft_keys: ClassVar[tuple[str, ...]]  # of adapter_config.json that are read, or change nothing

    @abstractmethod
    def to_peft(self, places: "Sequence[Site]") -> dict[str, Any]:
        """These settings as adapter_config.json has them, for maps in these places."""

    @classmethod
    @abstractmethod
    def from_peft(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        """The keys of a recipe that an adapter_config.json stands for, and what cannot be read."""

    def rank_of(self, called: Sequence[str]) -> int | None:
        """Rank that a map of a layer has, by its names; None: that of all, and 0: it is left out.

        Arrays are as wide as the largest rank of a map in any layer, and files have its own.
        """
        return None

    @abstractmethod
    def vllm_flags(self) -> str | None:
        """The flags with which vLLM serves it beside its model; None: it does not."""


def replaced(
    model: Model,
    patterns: Sequence[str],
    make: Callable[[LinearMap, tuple[int, ...], PRNGKeyArray], Adapted],
    *,
    names: Mapping[str, str],
    key: PRNGKeyArray,
) -> Model:
    """The model with `make(map, stack, key)` in the place of each linear map that patterns choose.

    Of maps that are stacked, each layer's is made by itself; `stack` is how they are.
    """
    targets = chosen(model, patterns, names)

    def visit(path, node):
        if not _is_map(node) or name(path) not in targets:
            return node
        stack, own = stack_of(node), jax.random.fold_in(key, number(path))

        def each(node, key):
            return make(node, stack, key)

        for _ in stack:
            each = eqx.filter_vmap(each)
        return each(node, jax.random.split(own, stack) if stack else own)

    return jax.tree_util.tree_map_with_path(visit, model, is_leaf=_is_map)


class Site(NamedTuple):
    """A linear map of one layer."""

    name: str  # of the map, in all layers
    layer: int | None  # None: it is of no stack
    # with the layer's number, and `{expert}` for that of an expert: in this package, and elsewhere
    called: tuple[str, ...]


def sites(model: PyTree, maps: Sequence[str], names: Mapping[str, str]) -> dict[str, list[Site]]:
    """The places of these maps by the path of each module: one for each of its layers, in order."""
    found = {}
    for path, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_map):
        if _is_map(node) and (full := name(path)) in maps:
            stack, layers = _stack(model, path)
            places = [_site(full, stack, one, names) for one in layers or (None,)]
            found[jax.tree_util.keystr(path)] = places
    return found


def _stack(model: PyTree, path: tuple) -> tuple[str, range | None]:
    """The name of the stack that a path leads through, and which layers; None: through none."""
    node = model
    for place, step in enumerate(path):
        if isinstance(node, Stack):
            return name(path[:place]), node.numbers(path[place + 1].idx)
        match step:
            case jax.tree_util.GetAttrKey(name=field):
                node = getattr(node, field)
            case jax.tree_util.SequenceKey(idx=number) | jax.tree_util.DictKey(key=number):
                node = node[number]
    return "", None


def _site(full: str, stack: str, layer: int | None, names: Mapping[str, str]) -> Site:
    own = full if layer is None else f"{stack}.{layer}{full.removeprefix(stack)}"
    elsewhere = [names[full].format(layer=layer, expert="{expert}")] if full in names else []
    return Site(full, layer, (own, *elsewhere))


def refuse_cut(
    model: PyTree, patterns: Sequence[str], names: Mapping[str, str], size: int, what: str
) -> None:
    """Refuse maps whose inputs are no whole number of groups of this size."""
    inputs: dict[str, int] = {}
    targets = chosen(model, patterns, names)

    def visit(path, node):
        if _is_map(node) and name(path) in targets:
            inputs[name(path)] = _inputs(node)

    jax.tree_util.tree_map_with_path(visit, model, is_leaf=_is_map)
    cut = [f"{one} reads {count}" for one, count in inputs.items() if count % size]
    if cut:
        whole = [one for one, count in inputs.items() if count % size == 0]
        advice = f"adapter.targets: [{', '.join(whole)}] leaves out those it cannot" * bool(whole)
        raise UserError(
            f"{what} has groups of {size} inputs, into which these maps cannot be cut: "
            f"{', '.join(cut)}; {advice or 'no map here can'}"
        )


def _inputs(node: LinearMap) -> int:
    """Inputs of a map, of each layer where maps are stacked."""

    def weight(node):
        first = (0,) * len(stack_of(node))
        one = jax.tree.map(lambda x: x[first] if eqx.is_array(x) else x, node)
        return one.merged().weight

    return math.prod(eqx.filter_eval_shape(weight, node).shape[: len(node.reads)])


def merged(model: Model) -> Model:
    """The plain model that computes the same, in float32 where maps were adapted or in few bits."""

    def visit(node):
        if isinstance(node, TokenTable):
            return node if node.tuned is None else node.merged()
        if not isinstance(node, LinearMap) or isinstance(node, Linear):
            return node
        merge = lambda one: one.merged()  # noqa: E731
        for _ in stack_of(node):
            merge = eqx.filter_vmap(merge)
        return merge(node)

    return jax.tree.map(visit, model, is_leaf=lambda x: isinstance(x, LinearMap | TokenTable))


def plain(model: Model) -> Model:
    """An adapted model with its adapters off; one that replaced its base stays on."""

    def visit(node):
        if isinstance(node, TokenTable):
            return node.without_rows()
        while isinstance(node, Adapted) and node.base is not None:
            node = node.base
        return node

    return jax.tree.map(visit, model, is_leaf=lambda x: isinstance(x, Adapted | TokenTable))


def standing_in(model: PyTree) -> dict[str, Adapted]:
    """The maps by path whose matrix an adapter dropped, as that adapter has them."""
    found = {}
    for path, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_adapted):
        if isinstance(node, Adapted):
            while isinstance(node.base, Adapted):
                node = node.base
            if node.base is None:
                found[jax.tree_util.keystr(path, simple=True, separator=".")] = node
    return found


def own(model: PyTree) -> PyTree:
    """Mask of adapter arrays: True there, False at those of the model it adapts."""
    return _marked(model, lambda node, field: field != "base")


def trained(model: PyTree) -> PyTree:
    """Mask of the arrays that an adapter declares to be trained."""
    return _marked(model, lambda node, field: field in node.trains)


def bits_per_weight(model: PyTree) -> float | None:
    """Bits per weight of all maps that are quantised; None: there are none."""
    bits, weights = 0.0, 0
    for node in jax.tree.leaves(model, is_leaf=_is_adapted):
        while isinstance(node, Adapted) and node.bits_per_weight is None:
            node = node.base
        if isinstance(node, Adapted) and node.bits_per_weight is not None:
            size = _weights(node)
            bits, weights = bits + size * node.bits_per_weight, weights + size
    return bits / weights if weights else None


def in_experts(model: PyTree) -> set[str]:
    """The linear maps of experts, by name."""
    found = set()
    is_apart = lambda node: isinstance(node, LinearMap | Stacked)  # noqa: E731
    for path, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_apart):
        if isinstance(node, Stacked):
            inside = jax.tree_util.tree_leaves_with_path(node, is_leaf=_is_map)
            found |= {name((*path, *rest)) for rest, one in inside if _is_map(one)}
    return found


def adapted_maps(model: PyTree) -> dict[str, int]:
    """The number of adapted linear maps by name, of all layers and all experts."""
    counts: dict[str, int] = {}
    for path, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_adapted):
        if isinstance(node, Adapted):
            counts[name(path)] = counts.get(name(path), 0) + math.prod(stack_of(node))
    return counts


def is_adapted(model: PyTree) -> bool:
    return any(map(_is_adapted, jax.tree.leaves(model, is_leaf=_is_adapted)))


def chosen(model: Any, patterns: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """The linear maps that patterns choose, by our names, of which some may be written as PEFT's.

    As `blocks.attention.*` chooses `blocks.attention.query`, so do `q_proj`, `self_attn.q_proj`.
    The maps of a residual connection are none of the model's, and are never chosen.
    """
    apart = (LinearMap, Connection)
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda x: isinstance(x, apart))
    maps = dict.fromkeys(name(path) for path, node in nodes if _is_map(node))
    called = {one: [one, EVERY, *_elsewhere(names.get(one))] for one in maps}
    words = [word for each in called.values() for word in each]
    idle = [p for p in patterns if all(first_match(word, [p]) is None for word in words)]
    short = dict.fromkeys(each[2] for each in called.values() if len(each) > 2)
    refuse_idle("adapter.targets", idle, [*maps, *short], "linear map")
    return [
        one
        for one, each in called.items()
        if any(first_match(word, patterns) is not None for word in each)
    ]


def _elsewhere(full: str | None) -> list[str]:
    """The last word of a name elsewhere, its last two, and so on up to the layer's number.

    The map that is a part of a fused tensor has the name of that.
    """
    words = (full or "").rpartition("{layer}.")[2].partition("[")[0].split(".")
    return [".".join(words[-n:]) for n in range(1, len(words) + 1)] if full else []


def _marked(model: PyTree, mark: Callable[[Adapted, str], bool]) -> PyTree:
    """`mark(node, field)` at the arrays of each field of an adapted map, False at all others."""

    def visit(node):
        if isinstance(node, TokenRows):
            return jax.tree.map(lambda _: True, node)
        if not isinstance(node, Adapted):
            return False
        children, structure = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda inner: inner is not node
        )
        return structure.unflatten([of(node, path[0].name, child) for path, child in children])

    def of(node, field, child):
        if mark(node, field):
            return jax.tree.map(lambda _: True, child)
        return jax.tree.map(visit, child, is_leaf=_is_adapted)

    return jax.tree.map(visit, model, is_leaf=lambda x: isinstance(x, Adapted | TokenRows))


def _weights(node: Adapted) -> int:
    """The number of weights of a map, of all its layers."""
    stack = stack_of(node)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[len(stack) :], x.dtype), node)
    weight = eqx.filter_eval_shape(lambda one: one.merged().weight, one)
    return math.prod(stack) * weight.size


def _is_map(node: Any) -> bool:
    return isinstance(node, LinearMap)


def _is_adapted(node: Any) -> bool:
    return isinstance(node, Adapted)
