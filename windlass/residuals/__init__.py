"""Residual connections: what takes the place of x + F(x). `residual.kind` in a recipe is the file.

A file defines `Residual`, a section that extends `BaseResidual`: `widen` and `narrow`, and between
them one stream or several through the blocks; and the connection of each branch of each layer, a
module that may own weights. It changes a model that is built, before adapters do, and they leave
its maps alone. No family knows of it.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves, tree_map_with_path
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from windlass.config.start import FrozenBase
from windlass.errors import UserError
from windlass.layers.dropout import number
from windlass.layers.head import ScoreHead
from windlass.layers.initializers import small
from windlass.layers.residual import Connection, Plain, Streams
from windlass.layers.stack import Stack
from windlass.models import HEAD, Config, names
from windlass.quantization.four_bit_linear import frozen

Model = TypeVar("Model")

KEY = 2  # folded into the key of a model's weights for those of its connections
HEAD_KEY = 3  # and for those of its scores
SCORE = "score.weight"  # a head of scores in the checkpoints of others


class BaseResidual(Streams):
    """Interface of a residual, beside its keys; one stream unless it overrides that."""

    is_plain: ClassVar[bool] = False  # as families are built: nothing changes

    @abstractmethod
    def connection(
        self,
        branch: str,  # the block's name for it: attention, mlp, ...
        layer: Int[Array, ""],  # from 0, and traced: all layers of a kind are made at once
        sizes: Mapping[str, int],  # of the model's axes
        *,
        key: PRNGKeyArray,
    ) -> Connection:
        """The connection of a branch of a layer."""

    def connect(self, model: Model, sizes: Mapping[str, int], *, key: PRNGKeyArray) -> Model:
        """The model with a connection of this kind wherever its blocks have a plain one."""
        if not any(map(_is_plain, tree_leaves(model, is_leaf=_is_plain))):
            kind = type(self).__module__.rpartition(".")[2]
            raise UserError(
                f"residual.kind is {kind}; the blocks of this model have no residual connection "
                "that it could replace: residual=plain leaves them as they are"
            )

        def visit(path, node):
            if not isinstance(node, Stack):
                return node
            own = jax.random.fold_in(key, number(path))
            return replace(node, kinds=self._kinds(node, sizes, own), streams=self)

        return tree_map_with_path(visit, model, is_leaf=lambda node: isinstance(node, Stack))

    def _kinds(self, stack: Stack, sizes: Mapping[str, int], key: PRNGKeyArray) -> PyTree:
        def visit(path, node):
            if not _is_plain(node):
                return node
            layers = jnp.asarray(stack.numbers(path[0].idx))
            keys = jax.random.split(jax.random.fold_in(key, number(path)), len(layers))
            branch = path[-1].name.removesuffix("_residual")
            make = partial(self.connection, branch, sizes=sizes)
            return eqx.filter_vmap(lambda layer, key: make(layer, key=key))(layers, keys)

        return tree_map_with_path(visit, stack.kinds, is_leaf=_is_plain)


@dataclass(frozen=True)
class Architecture:
    """A family's config with a residual, a head and the form it is stored in: all but adapters."""

    model: Config
    residual: BaseResidual | None = None  # None: as the family has it
    base: FrozenBase | None = None  # None: matrices
    scores: int = 0  # outputs of a head in place of the LM head; 0: that stays

    def init(self, key: PRNGKeyArray) -> Any:
        model, own = self.model.init(key), jax.random.fold_in(key, KEY)
        if self.scores:
            model = _scored(model, self.scores, key=jax.random.fold_in(key, HEAD_KEY))
        if self.residual is not None:
            model = self.residual.connect(model, self.model.sizes, key=own)
        return model if self.base is None else frozen(model, self.base)

    @property
    def names(self) -> Mapping[str, str]:
        """The family's table of names elsewhere, where a head of scores has another."""
        table = names(self.model)
        return {**table, HEAD: SCORE} if self.scores and table else table


def _scored(model: Any, scores: int, *, key: PRNGKeyArray) -> Any:
    embed = model.embedding.weight.shape[1]
    head = ScoreHead(small(key, (scores, embed), embed))
    return eqx.tree_at(lambda one: one.output, model, head, is_leaf=lambda x: x is None)


def _is_plain(node) -> bool:
    return isinstance(node, Plain)
