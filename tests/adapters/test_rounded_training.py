"""Training on a grid: it loses less than rounding after training."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

from tests import tiny
from windlass.adapters.grid import Adapter as Grid
from windlass.adapters.scalar import Adapter as Scalar
from windlass.sources.stories import Source

LENGTH, ROWS, RATE = 48, 16, 3e-3


def batches() -> list[dict[str, jax.Array]]:
    """Stories as bytes, a row each; the last batch is held out."""
    source = Source(count=200 * ROWS)
    texts = [source[number]["text"].encode("ascii")[: LENGTH + 1] for number in range(len(source))]
    rows = [[np.frombuffer(text, np.uint8).astype(np.int32)] for text in texts]
    return [tiny.packed(rows[at : at + ROWS], LENGTH) for at in range(0, len(rows), ROWS)]


@eqx.filter_jit
def step(model: Any, moments: Any, batch: Any, rate: jax.Array) -> tuple[Any, Any, jax.Array]:
    loss, gradient = eqx.filter_value_and_grad(tiny.loss)(model, batch)
    with jax.numpy_dtype_promotion("standard"):  # optax's
        updates, moments = optax.scale_by_adam().update(gradient, moments)
    return eqx.apply_updates(model, jax.tree.map(lambda u: -rate * u, updates)), moments, loss


def trained(model: Any, some: list) -> Any:
    """The model after a step on each batch, at a rate that falls to 0."""
    moments = optax.scale_by_adam().init(eqx.filter(model, eqx.is_array))
    for number, batch in enumerate(some):
        rate = jax.numpy.float32(RATE * (1 - number / len(some)))
        model, moments, _ = step(model, moments, batch, rate)
    return model


@pytest.mark.long
def test_a_model_trained_on_a_grid_is_better_than_one_rounded_onto_it_after_the_same_tokens():
    config = dataclasses.replace(tiny.config("qwen3"), vocab=128, mlp=64, head_dim=16, layers=1)
    *first, last = batches()
    loss = lambda model: float(eqx.filter_jit(tiny.loss)(model, last))  # noqa: E731
    start = trained(tiny.made(config), first[:120])
    plain = trained(start, first[120:])
    assert loss(plain) < 2.0
    for adapter in (Grid(), Scalar(bits=2)):
        rounded = loss(tiny.adapted(plain, adapter))
        ours = loss(trained(tiny.adapted(start, adapter), first[120:]))
        print(f"{loss(plain):.4f} plain, {rounded:.4f} rounded, {ours:.4f} trained rounded")
        assert loss(plain) < ours < rounded
