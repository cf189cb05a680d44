"""The abstract model: shapes and dtypes of its arrays, and all of it that is no array."""

from functools import lru_cache
from typing import Any

import equinox as eqx
import jax

from windlass.adapters import BaseAdapter
from windlass.devices.sketch import sketched
from windlass.residuals import Architecture


@lru_cache(maxsize=8)  # a plan needs the same model on each target, and with every setting
def abstract_model(architecture: Architecture, adapters: tuple[BaseAdapter, ...]) -> Any:
    """The abstract model of an architecture with these adapters, in their order; on no mesh."""

    def init() -> Any:
        key = jax.random.key(0)
        model = architecture.init(key)
        for adapter in adapters:
            model = adapter.adapt(model, names=architecture.names, key=key)
        return model

    with sketched():
        shapes = eqx.filter_eval_shape(init)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_shape(x) else x, shapes
    )


def is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)
