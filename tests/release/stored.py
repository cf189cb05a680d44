"""Runs as they stand at step 0, without the time that initialising and training take."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from tests import trained
from windlass.checkpoint.store import Store
from windlass.data.vocabulary import Vocabulary
from windlass.program.built import Built
from windlass.program.step import Frozen
from windlass.run_folder import folder as folders
from windlass.starting.describe import describe


def run(
    place: Path,
    vocabulary: Vocabulary,
    change: Callable[[Any], Any] = lambda model: model,
    **sections: Any,
) -> Path:
    """A run of random arrays, norms and biases too, which `change` may change."""
    recipe = trained.recipe() | {"tokenizer": {"kind": "byte"}} | sections
    described = describe(recipe, [f"run.dir={place}/run"])
    rng = np.random.default_rng(7)

    def random(x: jax.ShapeDtypeStruct) -> jax.Array:
        is_code = jnp.issubdtype(x.dtype, jnp.integer)
        values = rng.integers(16, size=x.shape) if is_code else rng.normal(0, 0.2, x.shape)
        return jax.device_put(values.astype(x.dtype), x.sharding)

    with described.scope():
        built = Built(described)
        arrays = jax.tree.map(random, built.abstract)
        model = change(eqx.combine(arrays, built.static))
        weights, rest = built.parted(eqx.filter(model, eqx.is_array))
        store = Store(place / "run", say=print)
        if jax.tree.leaves(rest):
            store.save_frozen(Frozen(rest, {}), built.identity)
        store.save(0, {"weights": weights}, built.identity)
        store.close()
        folders.store(place / "run", built.run, vocabulary)
    return place / "run"
