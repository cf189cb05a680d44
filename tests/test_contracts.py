"""Every file of an open set defines what its folder's contract asks: a new one is tested too."""

import dataclasses
import importlib
from dataclasses import MISSING
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

from tests import tiny
from windlass import formats, models, objectives, optim, residuals, sources
from windlass.adapters.lora import Adapter
from windlass.columns import sized
from windlass.config import Open, read, tree
from windlass.config.sections import default, fields
from windlass.config.start import Start
from windlass.layers.head import Head
from windlass.layers.residual import Connection
from windlass.teacher_cache import columns_of


def files(package) -> list:
    found = Open(package.__name__, tag="", attribute="").names()
    return [pytest.param(f"{package.__name__}.{name}", id=name) for name in found]


def section(module: str, attribute: str) -> Any:
    """The section a file defines, which is frozen, has only keywords and says what it is."""
    found = getattr(importlib.import_module(module), attribute)
    assert found.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(found))
    assert found.__doc__ and not found.__doc__.startswith(f"{attribute}(")
    return found


@pytest.mark.parametrize("module", files(models))
def test_a_family_defines_a_config_and_its_model(module):
    config = section(module, "Config").tiny()
    assert isinstance(config, models.Config)
    assert isinstance(config.causal, bool)
    assert all(getattr(config, axis, size) == size for axis, size in config.sizes.items())
    assert read(type(config), tree(config)) == config

    def call(model):
        assert isinstance(model, models.Model)
        assert isinstance(model.head, Head)
        return model(tiny.rows(config.vocab))

    hidden, auxiliary, cache = eqx.filter_eval_shape(call, tiny.abstract(config))
    assert hidden.shape == (8, 12, config.sizes["embed"])
    assert isinstance(auxiliary, dict)
    assert cache is None


@pytest.mark.parametrize("module", files(objectives))
def test_an_objective_names_its_columns_and_can_be_called(module):
    objective = section(module, "Objective")
    assert issubclass(objective, objectives.BaseObjective)
    assert isinstance(objective.columns, tuple)
    assert callable(made(objective))


@pytest.mark.parametrize("module", files(objectives))
def test_an_objective_hands_on_what_the_model_reports(module):
    objective, batch = made(section(module, "Objective")), tiny.rows(96)
    batch |= {"reference": jnp.zeros_like(batch["weight"]), "puzzle": jnp.arange(8)}
    batch |= {"candidates": jnp.ones((8, 12, 4), jnp.uint8)}
    taught = sized(columns_of(3, 1, "float16"), 12).items()
    batch |= {name: jnp.asarray(column.padded(8)) for name, column in taught}
    adapted = partial(Adapter(rank=2).adapt, names={}, key=jax.random.key(0))
    # The one that reports something itself, or else one that the objective can be computed with.
    families = (tiny.config(name) for name in ("router", "recursive", "llama"))
    config = next(one for one in families if not objective.problems(one))
    model = eqx.filter_eval_shape(adapted, tiny.abstract(config))

    def tally(model):
        given = dict(helpers=dict.fromkeys(objective.helpers, model), step=jnp.int32(0), steps=1)
        carry = objective.start(model, batch)
        found, after = objective(model, batch, key=None, carry=carry, **given)
        assert jax.tree.structure(after) == jax.tree.structure(carry)
        return found

    found = eqx.filter_eval_shape(tally, model)
    assert found.auxiliary == eqx.filter_eval_shape(lambda model: model(batch)[1], model)


def made(objective: Any) -> Any:
    """An objective, with helpers wherever it must have some."""
    needed = [name for name, (field, _) in fields(objective).items() if default(field) is MISSING]
    return objective(**dict.fromkeys(needed, Start(path="teacher")))


@pytest.mark.parametrize("module", files(residuals))
def test_a_residual_narrows_to_what_was_widened_and_connects_every_branch(module):
    residual = section(module, "Residual")()
    assert isinstance(residual, residuals.BaseResidual)
    x = jax.random.normal(jax.random.key(0), (2, 3, 8))
    assert jnp.allclose(residual.narrow(residual.widen(x)), x, atol=1e-6)
    made = lambda: residual.connection(  # noqa: E731
        "mlp", jnp.int32(1), {"embed": 8}, key=jax.random.key(1)
    )
    assert isinstance(eqx.filter_eval_shape(made), Connection)


@pytest.mark.parametrize("module", files(optim))
def test_an_optimiser_builds_a_transformation_and_tells_its_rate(module):
    optimizer = section(module, "Optimizer")(learning_rate=0.1)
    assert isinstance(optimizer, optim.Descent)
    assert isinstance(optimizer, section(module, "Rule"))
    built = optimizer.build(10, {"weight": jnp.ones(3)})
    assert isinstance(built, optax.GradientTransformation)
    state = jax.eval_shape(built.init, {"weight": jnp.ones(3)})
    assert all(x.dtype != jnp.float64 for x in jax.tree.leaves(state))
    assert optimizer.rate(10)(jnp.int32(3)).shape == ()


@pytest.mark.parametrize("module", files(sources))
def test_a_source_says_what_it_yields(module):
    source = section(module, "Source")
    assert source.yields in ("text", "tokens", "blocks")
    reads = "rows" if source.yields == "blocks" else "__getitem__"
    assert all(callable(getattr(source, name)) for name in ("__len__", reads, "fingerprint"))
    # Which know limits and weights.
    assert issubclass(source, sources.Blocks if source.yields == "blocks" else sources.Documents)


@pytest.mark.parametrize("module", files(formats))
def test_a_format_says_what_it_reads_and_what_becomes_of_long_documents(module):
    found = section(module, "Format")
    assert callable(found.render)
    assert issubclass(found, formats.BaseFormat)
    assert found.reads in ("text", "rows")
    assert found.longer in ("split", "cut", "drop")
