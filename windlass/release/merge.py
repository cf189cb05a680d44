"""The tensors of a model with adapters merged and 4-bit maps as matrices, made when written."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from windlass import adapters
from windlass.hub import fused
from windlass.hub.names import Array, arrays
from windlass.hub.shards import ShardTensor
from windlass.hub.weights import in_order
from windlass.layers.embedding import TokenTable
from windlass.layers.linear import Linear, LinearMap


def tensors(model: Any, names: Mapping[str, str]) -> list[ShardTensor]:
    """Tensors as `hub.weights.tensors` of the merged model, which is never whole in memory."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_made)
    nodes = {jax.tree_util.keystr(p, simple=True, separator="."): node for p, node in leaves}
    unordered = []
    for array in arrays(abstract(model), names):
        owner, _, field = array.path.rpartition(".")
        if _is_made(nodes.get(owner)):
            unordered += _merged(array, nodes[owner], field)
        else:
            unordered += _plain(array._replace(value=nodes[array.path]))
    return sorted(fused.joined(unordered), key=lambda one: in_order(one.name))


def abstract(model: Any) -> Any:
    """The abstract model with its adapters merged, on no mesh."""
    is_array = lambda x: isinstance(x, jax.Array | jax.ShapeDtypeStruct)  # noqa: E731
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x, model
    )
    return eqx.filter_eval_shape(adapters.merged, shapes)


def _plain(array: Array) -> list[ShardTensor]:
    dtype = np.dtype(array.value.dtype)
    fixed = array.is_fixed
    return [ShardTensor(name, array.shape, dtype, bring, fixed) for name, bring in array.out()]


def _merged(array: Array, node: LinearMap, field: str) -> list[ShardTensor]:
    def bring(place: tuple[int, ...]) -> np.ndarray:
        one = node
        for number in place:
            one = _layer(one, jnp.int32(number))
        return np.ascontiguousarray(array.layout.outward(np.asarray(_part(one, field))))

    dtype = np.dtype(array.value.dtype)
    return [
        ShardTensor(name, array.shape, dtype, partial(bring, place))
        for place, name in zip(np.ndindex(*array.stack), array.names(), strict=True)
    ]


@eqx.filter_jit
def _part(node: LinearMap, field: str) -> jax.Array:
    return getattr(adapters.merged(node), field)


@eqx.filter_jit
def _layer(node: LinearMap, number: jax.Array) -> LinearMap:
    return jax.tree.map(lambda x: x[number] if eqx.is_array(x) else x, node)


def _is_made(node: Any) -> bool:
    """Return True if the matrix of a map or a table is computed from arrays that are none."""
    if isinstance(node, TokenTable):
        return node.tuned is not None
    return isinstance(node, LinearMap) and not isinstance(node, Linear)
