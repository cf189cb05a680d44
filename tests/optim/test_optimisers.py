"""What holds for every file in optim/."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.training.bench import Bench
from windlass import optim
from windlass.checkpoint.store import Store
from windlass.config import read, tree
from windlass.config.sections import fields, holds, leaves
from windlass.devices.axes import placements
from windlass.layers.linear import Linear
from windlass.layers.norm import RMSNorm
from windlass.optim import Descent, Group, Schedule

NAMES = sorted(module.name for module in pkgutil.iter_modules(optim.__path__))


def optimizer(name: str, **keys: Any) -> Descent:
    found = importlib.import_module(f"windlass.optim.{name}").Optimizer
    return found(**{"learning_rate": 1e-3, **keys})


def others(section: Any) -> Iterator[tuple[str, Any]]:
    """Each field of a section, and the section with another value there."""
    for name, (_, annotation) in fields(type(section)).items():
        value, slot = getattr(section, name), holds(annotation)
        if slot.shape == "section" and slot.of is not Schedule:
            for inner, changed in others(value):
                yield f"{name}.{inner}", dataclasses.replace(section, **{name: changed})
            continue
        if slot.shape == "section":
            new = Schedule(warmup_steps=7)
        elif slot.shape == "tuple":
            new = (Group(match="norm.*", learning_rate=1.0),)
        elif isinstance(value, bool):
            new = not value
        elif isinstance(value, str):
            new = next(word for word in leaves(annotation) if word != value)
        else:
            new = 0.5 if value is None else type(value)(0.8 * value)
        yield name, dataclasses.replace(section, **{name: new})


def program(optimizer: Descent, weights) -> str:
    def update(w):
        built = optimizer.build(100, weights)
        with jax.numpy_dtype_promotion("standard"):
            return built.update(w, built.init(w), w, step=3)

    return str(jax.make_jaxpr(update)(weights))


@pytest.mark.parametrize("name", NAMES)
def test_every_field_changes_the_update(name):
    weights, usual = tiny.model("gru"), optimizer(name)
    before = program(usual, weights)
    changes = dict(others(usual))
    assert {"learning_rate", "weight_decay", "clip_norm", "groups", "schedule"} <= set(changes)
    for field, changed in changes.items():
        assert program(changed, weights) != before, f"{field} is a key, and unread"


@pytest.mark.parametrize("name", NAMES)
def test_a_section_reads_back_from_its_own_words(name):
    usual = optimizer(name, groups=(Group(match="*", learning_rate=1.0),))
    assert read(type(usual), tree(usual)) == usual


# Of Adafactor a share of each matrix's size; of Lion what every number moves by.
RATES = dict(adafactor=3e-2, lion=2e-3)


def learned(name: str, sizes: tuple[int, int, int]) -> tuple[Bench, list[float]]:
    """Six steps on the same rows."""
    bench = Bench("gru", sizes, 1, optim=optimizer(name, learning_rate=RATES.get(name, 5e-3)))
    return bench, [bench.go(bench.rows(0))["loss"] for _ in range(6)]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_optimiser_learns_the_same_on_a_mesh_with_moments_that_are_placed_and_stored(
    name, tmp_path, capfd
):
    _, losses = learned(name, (1, 1, 1))
    assert losses[-1] < 0.9 * losses[0]
    bench, found = learned(name, (2, 2, 2))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert "nvoluntary" not in capfd.readouterr().err
    places = placements(bench.state, bench.mesh)
    for x, place in zip(jax.tree.leaves(bench.state), jax.tree.leaves(places), strict=True):
        assert x.sharding.is_equivalent_to(place, x.ndim)
    store = Store(tmp_path, say=print)
    store.save(6, bench.state, {})
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), bench.state
    )
    restored = store.restore(shapes, {})
    store.close()
    assert restored is not None and eqx.tree_equal(restored.state, bench.state)


@pytest.mark.parametrize(
    "name", ["muon", *(pytest.param(name, marks=pytest.mark.long) for name in ("adamw", "lion"))]
)
def test_a_first_moment_in_bfloat16_takes_half_the_memory_and_learns_about_the_same(name):
    sizes = dict(embed=6, mlp=8)
    linear = Linear("embed", "mlp", sizes, bias=True, key=jax.random.key(0))
    weights = {"linear": linear, "norm": RMSNorm("embed", sizes, eps=1e-6)}
    gradients = [jax.tree.map(lambda x, s=s: s * x + 0.1, weights) for s in (1.0, 0.5, 2.0)]

    def run(moment: str):
        built = optimizer(name, moment=moment, weight_decay=0.0).build(100, weights)
        update, state, updates = jax.jit(built.update), built.init(weights), None
        with jax.numpy_dtype_promotion("standard"):
            for gradient in gradients:
                updates, state = update(gradient, state, weights, step=3)
        return updates, jax.tree.leaves(state)

    (exact, wide), (close, narrow) = run("float32"), run("bfloat16")
    halved = [x for x in narrow if x.dtype == jnp.bfloat16]
    assert sum(x.size for x in halved) == sum(x.size for x in jax.tree.leaves(weights))
    assert [x.shape for x in narrow] == [x.shape for x in wide]
    assert {x.dtype.name for x in wide} == {"float32", "int32"}
    assert tiny.apart(close, exact) < 0.02
