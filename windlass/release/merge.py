"""The tensors of a model with its adapter merged into it, each made when it is written."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from windlass import adapters
from windlass.adapters import Adapted
from windlass.hub.names import Array, arrays
from windlass.hub.shards import ShardTensor
from windlass.hub.weights import in_order


def tensors(model: Any, names: Mapping[str, str]) -> list[ShardTensor]:
    """Tensors as `hub.weights.tensors` of the merged model, which is never whole in memory."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_adapted)
    nodes = {jax.tree_util.keystr(p, simple=True, separator="."): node for p, node in leaves}
    unordered = []
    for array in arrays(abstract(model), names):
        owner, _, field = array.path.rpartition(".")
        if _is_adapted(nodes.get(owner)):
            unordered += _merged(array, nodes[owner], field)
        else:
            unordered += _plain(array._replace(value=nodes[array.path]))
    return sorted(unordered, key=lambda one: in_order(one.name))


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


def _merged(array: Array, node: Adapted, field: str) -> list[ShardTensor]:
    def bring(number: int) -> np.ndarray:
        one = node if array.layers is None else _layer(node, jnp.int32(number))
        return np.ascontiguousarray(array.layout.outward(np.asarray(_part(one, field))))

    dtype = np.dtype(array.value.dtype)
    return [
        ShardTensor(name, array.shape, dtype, partial(bring, number))
        for number, name in enumerate(array.names())
    ]


@eqx.filter_jit
def _part(node: Adapted, field: str) -> jax.Array:
    return getattr(node.merged(), field)


@eqx.filter_jit
def _layer(node: Adapted, number: jax.Array) -> Adapted:
    return jax.tree.map(lambda x: x[number] if eqx.is_array(x) else x, node)


def _is_adapted(node: Any) -> bool:
    return isinstance(node, Adapted)
