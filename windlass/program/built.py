"""The abstract model of a run: shapes, dtypes and shardings, and what becomes of them at init."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from windlass.adapters import Adapted, BaseAdapter
from windlass.checkpoint.fingerprint import named
from windlass.config import tree
from windlass.config.start import FrozenBase
from windlass.devices.axes import annotate, cast, is_cast, placements
from windlass.layers.embedding import TokenTable
from windlass.layers.linear import LinearMap
from windlass.layers.stack import arrange
from windlass.program import trainable
from windlass.program.abstract import abstract_model, is_shape
from windlass.program.described import Described
from windlass.residuals import Architecture

# Initial arrays of a run: by the number of adapters applied before, then by path of the model.
InitialArrays = Mapping[int, Mapping[str, Array]]

ADAPTER_KEY = 1  # folded into the key of the weights for those of the adapter


class AbstractHelper(NamedTuple):
    """A frozen model that the objective names: its abstract arrays, and all that is no array."""

    arrays: PyTree
    static: PyTree


class Built:
    """The model of a described run, before it has any numbers in it."""

    def __init__(self, described: Described):
        self.described, self.run, self.mesh = described, described.run, described.mesh
        arrays, self.static = eqx.partition(
            self._arranged(abstract_model(self.run.architecture, self.run.adapter)), is_shape
        )
        self.trainable = trainable.of_run(arrays, self.run)
        lowered = self._lowered(arrays)
        self.abstract: PyTree = jax.tree.map(
            lambda x, low, is_trained, place: jax.ShapeDtypeStruct(
                x.shape, x.dtype if is_trained else low, sharding=place
            ),
            arrays,
            lowered,
            self.trainable.mask,
            placements(arrays, self.mesh),
        )
        self.helpers = {
            name: self._helper(helper.architecture) for name, helper in self.run.helpers.items()
        }

    @cached_property
    def stages(self) -> list[PyTree]:
        """The abstract model as its family has it, and after each adapter; the last is `abstract`.

        Arrays that are there to the end are of the types that they have then.
        """
        adapters = self.run.adapter
        before = [self._stage(adapters[:number]) for number in range(len(adapters))]
        return [*before, self.abstract]

    def _stage(self, applied: tuple[BaseAdapter, ...]) -> PyTree:
        model = self._arranged(abstract_model(self.run.architecture, applied))
        arrays = eqx.filter(model, is_shape)
        placed = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            arrays,
            placements(arrays, self.mesh),
        )
        is_apart = lambda x: isinstance(x, LinearMap | TokenTable)  # noqa: E731
        return jax.tree.map(_as_at_the_end, placed, self.abstract, is_leaf=is_apart)

    def init(
        self, key: PRNGKeyArray, initial: InitialArrays | None = None, adapters: int | None = None
    ) -> Any:
        """The model with random weights, but for `initial` arrays; with only so many adapters."""
        initial, stages = initial or {}, self.stages
        adapter_key = jax.random.fold_in(key, ADAPTER_KEY)
        model = self._arranged(self.run.architecture.init(key))
        model = _filled(model, initial.get(0, {}), stages[0])
        for number, adapter in enumerate(self.run.adapter[:adapters], start=1):
            own = adapter_key if number == 1 else jax.random.fold_in(adapter_key, number)
            model = adapter.adapt(model, names=self.names, key=own)
            model = _filled(model, initial.get(number, {}), stages[number])
        return model

    def _arranged(self, model: Any) -> Any:
        return arrange(model, remat=self.run.train.remat, unroll=self.described.layers_per_loop)

    def _lowered(self, arrays: PyTree) -> PyTree:
        """The dtypes of arrays that are not trained: no more precise than what they meet."""
        compute = self.described.compute
        return annotate(arrays, lambda x, about: compute if is_cast(x, about) else x.dtype)

    def _helper(self, architecture: Architecture) -> AbstractHelper:
        arrays, static = eqx.partition(self._arranged(abstract_model(architecture, ())), is_shape)
        placed = jax.tree.map(
            lambda x, low, place: jax.ShapeDtypeStruct(x.shape, low, sharding=place),
            arrays,
            self._lowered(arrays),
            placements(arrays, self.mesh),
        )
        return AbstractHelper(placed, static)

    def joined(self, helpers: dict[str, PyTree]) -> dict[str, Any]:
        """The modules of the helpers, of their arrays."""
        return {name: eqx.combine(x, self.helpers[name].static) for name, x in helpers.items()}

    @property
    def names(self) -> Mapping[str, str]:
        return self.run.architecture.names

    def parted(self, arrays: PyTree) -> tuple[PyTree, PyTree]:
        """Partition of arrays into the trained and the frozen."""
        return eqx.partition(arrays, self.trainable.mask)

    def model(self, weights: PyTree, frozen: PyTree) -> Any:
        """The model as it computes."""
        return cast(self.whole(weights, frozen), self.described.compute)

    def whole(self, weights: PyTree, frozen: PyTree) -> Any:
        """The model with its arrays as they are stored."""
        return eqx.combine(weights, frozen, self.static)

    @property
    def identity(self) -> dict[str, str | int | float]:
        """Identity for checkpoints: what whoever reads the weights must agree on."""
        identity: dict[str, str | int | float] = {"model": model_identity(self.run.model)}
        patterns = self.run.train.trainable
        if not self.run.residual.is_plain:
            identity["residual"] = _summary(self.run.residual)
        if self.run.base is not None:
            identity["base"] = base_identity(self.run.base)
        if self.run.adapter:
            identity["adapter"] = ", then ".join(map(_summary, self.run.adapter))
        added = "the adapter" if self.run.residual.is_plain else "the adapter and the residual"
        trained = added if self.run.adapter else "*"
        if not self.run.objective.has_gradient:
            trained = "nothing"
        identity |= {"trainable": trained if patterns is None else " ".join(patterns)}
        kept = self.run.objective.identity
        return identity | {f"objective.{name}": value for name, value in kept.items()}


def model_identity(config: Any) -> str:
    """Identity of a family's config, without the keys it leaves out."""
    family = type(config).__module__.rpartition(".")[2]
    given = {name: x for name, x in tree(config).items() if x is not None}
    return f"{family} ({', '.join(f'{name} {value}' for name, value in given.items())})"


def base_identity(base: FrozenBase) -> str:
    """Identity of a base in few bits: the arrays of another mean other matrices."""
    zeros = " with zero points" * base.zeros
    return f"{base.kind} in groups of {base.size}{zeros}, scales of {base.scales}"


def _summary(member: Any) -> str:
    """Summary of a member of an open set: its keys, but for where it started from."""
    kind = type(member).__module__.rpartition(".")[2]
    settings = {name: x for name, x in tree(member).items() if name != "path" and x not in ([], ())}
    return f"{kind} ({', '.join(f'{key} {value}' for key, value in settings.items())})"


def _as_at_the_end(node: Any, last: Any) -> Any:
    """A map of an abstract model as the last one has it, or as it is where that has it no more."""
    if isinstance(node, TokenTable):
        return last if node.tuned is not None else last.without_rows()
    if not _is_map(node):
        return last
    structure = jax.tree.structure(node)
    while isinstance(last, Adapted) and jax.tree.structure(last) != structure:
        last = last.base
    return node if last is None else last


def _is_map(node: Any) -> bool:
    return isinstance(node, LinearMap)


def _filled(model: Any, initial: Mapping[str, Array], like: PyTree) -> Any:
    """The model with initial arrays, by path, cast to the dtypes of another."""
    arrays, static = eqx.partition(model, eqx.is_array)
    types = [x.dtype for x in jax.tree.leaves(like)]
    leaves = [initial.get(path, x) for path, x in named(arrays).items()]
    values = [jnp.asarray(x, dtype) for x, dtype in zip(leaves, types, strict=True)]
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), values), static)
