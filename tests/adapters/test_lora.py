"""LoRA on every family: at first the same model, then one that merges into a plain one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from tests import tiny
from windlass import adapters
from windlass.adapters.lora import Adapter

KINDS = {
    "plain": Adapter(rank=3, alpha=5.0),
    "dora": Adapter(rank=3, alpha=5.0, scaling="rslora", dora=True),
}


def moved(model):
    """An adapted model whose adapters are not at their start."""
    own, rest = eqx.partition(model, adapters.own(eqx.filter(model, eqx.is_array)))
    waves = jax.tree.map(
        lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), own
    )
    return eqx.combine(waves, rest)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_starts_as_nothing_and_merges_into_a_plain_model(unlike, kind):
    model, batch = tiny.model(unlike), tiny.rows(tiny.config(unlike).vocab)

    @eqx.filter_jit
    def losses(model):
        start = KINDS[kind].adapt(model, names={}, key=jax.random.key(1))
        trained = moved(start)
        models = (model, start, trained, adapters.merged(trained))
        return [tiny.loss(each, batch) for each in models], adapters.plain(trained)

    found, plain = losses(model)
    base, start, trained, merged = map(float, found)
    assert start == pytest.approx(base, rel=1e-6)
    assert abs(trained - base) > 1e-3
    assert merged == pytest.approx(trained, rel=1e-5)
    assert eqx.tree_equal(plain, model)
