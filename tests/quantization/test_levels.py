"""Uniform levels: values and straight-through gradients beside a reference in torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from windlass.quantization.levels import Levels, quantized

GRIDS = {
    "lsq 4 bits": (Levels(-8, 7), 0.3),
    "lsq 3 bits": (Levels(-4, 3), 0.5),
    "ternary": (Levels(-1, 1, 0.0, 0.5), 0.9),
    "stretched 2 bits": (Levels(-2, 1, 0.5, 0.5), 0.7),
    "balanced 4 bits": (Levels(-8, 7, 0.5, 0.5), 0.2),
    "a turned scale": (Levels(-8, 7), -0.3),
}


class Round(torch.autograd.Function):
    """Rounding whose gradient is that of its input."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0]


class Gain(torch.autograd.Function):
    """A number whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * ctx.factor, None


def reference(weight, scale, levels: Levels, gain: float):
    """Fake quantisation as LSQ has it, clipped before rounding, or clamped behind it."""
    scale = Gain.apply(scale, gain)
    steps = weight / scale - levels.offset
    if levels.margin:
        return scale * (torch.clamp(Round.apply(steps), levels.low, levels.high) + levels.offset)
    return scale * (Round.apply(torch.clamp(steps, levels.low, levels.high)) + levels.offset)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("shared", [(0,), (0, 1)], ids=["channel", "tensor"])
def test_values_and_gradients_are_those_of_a_straight_through_estimator_in_torch(name, shared):
    rng, (levels, size) = np.random.default_rng(1), GRIDS[name]
    weight, outer = jnp.asarray(rng.normal(size=(2, 96, 8)).astype(np.float32))
    shape = [1 if axis in shared else n for axis, n in enumerate(weight.shape)]
    scale = jnp.asarray((size * rng.uniform(0.5, 1.5, shape)).astype(np.float32))
    loss = lambda w, s: jnp.sum(outer * quantized(w, s, levels, 0.05))  # noqa: E731
    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(weight, scale)
    ours = jax.jit(quantized, static_argnums=2)(weight, scale, levels)

    w, s = (torch.tensor(np.array(x)).double().requires_grad_() for x in (weight, scale))
    theirs = reference(w, s, levels, 0.05)
    (torch.tensor(np.array(outer)) * theirs).sum().backward()
    np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-6)
    for ours, leaf in zip(found, (w, s), strict=True):
        theirs = np.asarray(leaf.grad)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6 * np.abs(theirs).max())
    share = (np.asarray(found[0]) == 0).mean()
    assert 0 < share < 0.6  # some are beyond the outermost levels


def test_levels_that_paretoq_names_and_those_of_a_half_offset():
    weight, one = jnp.linspace(-3, 3, 241)[:, None], jnp.ones((1, 1))
    values = lambda *given: sorted(set(np.asarray(quantized(weight, one, Levels(*given))).ravel()))  # noqa: E731
    assert values(-2, 1, 0.5, 0.5) == [-1.5, -0.5, 0.5, 1.5]
    assert values(-1, 1, 0.0, 0.5) == [-1, 0, 1]
    assert values(-4, 3) == [-3, -2, -1, 0, 1, 2, 3]
    wide = np.asarray(quantized(4 * weight, one, Levels(-8, 7, 0.5, 0.5)))
    assert sorted(set(wide.ravel())) == [c + 0.5 for c in range(-8, 8)]


def test_a_clipped_weight_gives_the_scale_its_true_derivative():
    """Beyond the outermost level the value is s × level, which is smooth in s."""
    weight, levels = jnp.full((4, 1), 9.0), Levels(-8, 7)
    loss = lambda s: jnp.sum(quantized(weight, s, levels))  # noqa: E731
    scale, step = jnp.full((1, 1), 0.5), 2.0**-8
    difference = (loss(scale + step) - loss(scale - step)) / (2 * step)
    assert float(jax.grad(loss)(scale)[0, 0]) == float(difference) == 4 * 7
