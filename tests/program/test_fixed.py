"""Fixed arrays: drawn on the host, the same bits on any mesh, and the same after training."""

from io import StringIO

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from tests import tiny
from tests.training.campaign import RECIPE, weights
from windlass.checkpoint.store import load_frozen
from windlass.devices.axes import cast
from windlass.devices.sketch import sketched
from windlass.errors import UserError
from windlass.layers.initializers import host
from windlass.program.built import Built
from windlass.program.programs import Programs
from windlass.program.trainable import choose
from windlass.starting.describe import describe
from windlass.telemetry.console import ConsoleReport
from windlass.training.train import train

FROZEN = {"family": "frozen", "vocab": 257, "embed": 16, "units": 24, "layers": 2, "seed": 5}
RESERVOIR = "blocks.kinds.0.reservoir.weight"


def expected(seed: int, units: int, radius: float) -> np.ndarray:
    """What a reservoir is, in NumPy alone."""
    words = np.asarray(jax.random.key_data(jax.random.key(seed)))
    weight = np.random.default_rng(words).normal(size=(units, units))
    return (weight * (radius / np.abs(np.linalg.eigvals(weight)).max())).astype(np.float32)


def recipe(**train) -> dict:
    return RECIPE | {
        "model": FROZEN,
        "optim": {"kind": "adamw", "learning_rate": 1e-2, "weight_decay": 0.5},
        "train": {"steps": 3, "batch": 8, "ema": 0.9, "seed": 9} | train,
        "checkpoint": {"every": 100},
        "precision": {"compute": "bfloat16"},
        "device": {"kind": "cpu", "count": 8},
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
    }


@pytest.mark.long
def test_training_leaves_a_fixed_array_as_it_was_drawn(tmp_path):
    console = Console(record=True, width=1000, file=StringIO())
    with ConsoleReport(console) as report:
        train(recipe(), [f"run.dir={tmp_path}/run"], report=report)
    shape = jax.ShapeDtypeStruct((2, 24, 24), jnp.float32)
    stored = load_frozen(tmp_path / "run", {"model": {RESERVOIR: shape}}, {}, part=True)
    frozen = np.asarray(stored["model"][RESERVOIR])
    assert (frozen == expected(5, 24, 0.9)).all()
    assert np.abs(np.linalg.eigvals(frozen[1])).max() == pytest.approx(0.9, rel=1e-5)
    assert not [name for name in weights(tmp_path / "run") if "reservoir" in name]
    assert "parameters   9,840 trainable of 10,992 (89.5197%), 1,152 fixed" in console.export_text()


def test_the_bits_are_the_same_on_one_device_and_on_a_mesh():
    found = []
    for keys in (["device.count=1", "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1"], []):
        described = describe(recipe(), keys)
        with described.scope():
            _, frozen = Programs(Built(described), 3).init()
            found.append(jax.device_get(frozen.model))
    assert eqx.tree_equal(*found)
    assert len(jax.tree.leaves(found[0])) == 1


def test_a_fixed_array_keeps_its_type_in_a_model_that_computes_in_another():
    model = eqx.filter_eval_shape(cast, tiny.abstract(tiny.config("frozen")), "bfloat16")
    assert model.blocks.kinds[0].reservoir.weight.dtype == jnp.float32
    assert model.blocks.kinds[0].reads.weight.dtype == jnp.bfloat16


def test_patterns_pass_over_fixed_arrays_and_a_pattern_of_nothing_else_is_refused():
    arrays = eqx.filter(tiny.model("frozen"), eqx.is_array)
    everything, blocks = choose(arrays, None), choose(arrays, ("blocks.*",))
    assert everything.trained + everything.fixed == everything.total
    assert everything.fixed == blocks.fixed == 2 * 24 * 24
    assert not everything.mask.blocks.kinds[0].reservoir.weight
    assert not blocks.mask.blocks.kinds[0].reservoir.weight
    assert blocks.mask.blocks.kinds[0].reads.weight
    with pytest.raises(UserError) as refusal:
        choose(arrays, ("embedding.*", "blocks.reservoir.*"))
    assert str(refusal.value) == (
        "train.trainable: blocks.reservoir.* matches only fixed arrays, which are never trained: "
        "blocks.reservoir.weight; leave it out, or name others"
    )


def test_integers_are_never_trained():
    arrays = {"codes": jnp.zeros(3, jnp.uint8), "weight": jnp.zeros(4)}
    assert choose(arrays, None) == ({"codes": False, "weight": True}, 4, 7, 3)


def test_an_initializer_on_the_host_draws_each_layer_by_its_key_and_a_sketch_draws_nothing():
    drawn = []

    def draw(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int) -> np.ndarray:
        drawn.append(shape)
        return rng.normal(size=shape) / fan_in

    keys = jax.random.split(jax.random.key(0), 3)
    make = lambda key: host(draw)(key, (2, 4), 2)  # noqa: E731
    with sketched():
        assert jax.eval_shape(jax.vmap(make), keys).shape == (3, 2, 4)
        assert not np.any(jax.jit(jax.vmap(make))(keys))
    assert not drawn
    found = np.asarray(jax.jit(jax.vmap(make))(keys))
    words = np.asarray(jax.random.key_data(keys))
    assert (found == [np.float32(draw(np.random.default_rng(w), (2, 4), 2)) for w in words]).all()
    assert len(np.unique(found)) == found.size
