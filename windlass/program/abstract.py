"""A model without numbers: the shapes of its arrays, and all of it that is no array."""

from functools import lru_cache
from typing import Any

import equinox as eqx
import jax

from windlass.adapters import Adapter
from windlass.layers.sketch import sketched
from windlass.models import names
from windlass.residuals import Architecture


@lru_cache(maxsize=8)  # a plan asks for the same model on each target, and with every setting
def blank(built: Architecture, adapter: Adapter | None) -> Any:
    """The model of an architecture, adapted where there is an adapter; on no mesh."""

    def made() -> Any:
        key = jax.random.key(0)
        model = built.init(key)
        table = names(built.model)
        return model if adapter is None else adapter.adapt(model, names=table, key=key)

    with sketched():
        whole = eqx.filter_eval_shape(made)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_shape(x) else x, whole
    )


def is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)
