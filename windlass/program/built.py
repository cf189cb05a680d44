"""The abstract model of a run: shapes, dtypes and shardings, and what becomes of them at init."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from windlass import adapters, models
from windlass.checkpoint.fingerprint import named
from windlass.config import tree
from windlass.devices.axes import annotate, cast, is_cast, placements
from windlass.layers.stack import arrange
from windlass.program import trainable
from windlass.program.abstract import blank, is_shape
from windlass.program.described import Described

ADAPTER_KEY = 1  # what is folded into the key of the weights for those of the adapter


class Built:
    """The model of a described run, before it has any numbers in it."""

    def __init__(self, described: Described):
        self.described, self.run, self.mesh = described, described.run, described.mesh
        arrays, self.static = eqx.partition(
            self._arranged(blank(self.run.architecture, self.run.adapter)), is_shape
        )
        self.trainable = trainable.choose(arrays, self.run.train.trainable)
        # What is not trained need not be more precise than what it is multiplied in.
        lowered = annotate(
            arrays, lambda x, about: described.compute if is_cast(x, about) else x.dtype
        )
        self.abstract: PyTree = jax.tree.map(
            lambda x, low, is_trained, place: jax.ShapeDtypeStruct(
                x.shape, x.dtype if is_trained else low, sharding=place
            ),
            arrays,
            lowered,
            self.trainable.mask,
            placements(arrays, self.mesh),
        )
        self.base = adapters.plain(self.abstract)  # the model as its family has it

    def init(self, key: PRNGKeyArray, taken: dict[str, Array] | None = None) -> Any:
        """The model with random weights, but for arrays that are `taken`, by path.

        A path is one of the family's own model, or of the adapted one.
        """
        taken = taken or {}
        model = _filled(self._arranged(self.run.architecture.init(key)), taken, self.base)
        if self.run.adapter is None:
            return model
        own_key = jax.random.fold_in(key, ADAPTER_KEY)
        adapted = self.run.adapter.adapt(model, names=self.names, key=own_key)
        return _filled(adapted, taken, self.abstract)

    def _arranged(self, model: Any) -> Any:
        train = self.run.train
        return arrange(model, remat=train.remat, unroll=train.layers_per_loop)

    @property
    def names(self) -> Mapping[str, str]:
        return models.names(self.run.model)

    def parted(self, arrays: PyTree) -> tuple[PyTree, PyTree]:
        """What is trained, and what is not."""
        return eqx.partition(arrays, self.trainable.mask)

    def model(self, weights: PyTree, frozen: PyTree) -> Any:
        """The model as it computes."""
        return cast(eqx.combine(weights, frozen, self.static), self.described.compute)

    @property
    def identity(self) -> dict[str, str | int | float]:
        """What a checkpoint must agree on with whoever reads its weights."""
        family = type(self.run.model).__module__.rpartition(".")[2]
        given = {name: x for name, x in tree(self.run.model).items() if x is not None}
        fields = ", ".join(f"{name} {value}" for name, value in given.items())
        identity: dict[str, str | int | float] = {"model": f"{family} ({fields})"}
        if not self.run.residual.is_plain:
            identity["residual"] = _told(self.run.residual)
        adapter, patterns = self.run.adapter, self.run.train.trainable
        if adapter is not None:
            identity["adapter"] = _told(adapter)
        trained = "*" if adapter is None else "the adapter"
        return identity | {"trainable": trained if patterns is None else " ".join(patterns)}


def _told(member: Any) -> str:
    """A member of an open set with its keys, but for where it started from."""
    kind = type(member).__module__.rpartition(".")[2]
    said = {name: x for name, x in tree(member).items() if name != "path"}
    return f"{kind} ({', '.join(f'{key} {value}' for key, value in said.items())})"


def _filled(model: Any, taken: dict[str, Array], like: PyTree) -> Any:
    """The model with the arrays that are taken, by path, and of the types of another."""
    arrays, static = eqx.partition(model, eqx.is_array)
    types = [x.dtype for x in jax.tree.leaves(like)]
    found = [taken.get(path, x) for path, x in named(arrays).items()]
    values = [jnp.asarray(x, dtype) for x, dtype in zip(found, types, strict=True)]
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), values), static)
