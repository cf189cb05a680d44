"""Scalar quantisers: learned scales of a matrix, an output or a group, on three grids."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests import tiny
from tests.adapters.test_grid import gradients, matrix
from tests.quantization.test_levels import Gain, Round
from windlass.adapters.scalar import Adapter
from windlass.config import read, tree
from windlass.devices.axes import matrices
from windlass.errors import UserError
from windlass.layers.linear import Linear
from windlass.program.abstract import is_shape
from windlass.program.trainable import choose

key = jax.random.key
SIZES = dict(heads=4, head_dim=16, embed=6)
EVERY = [
    Adapter(),
    Adapter(bits=3, granularity="tensor"),
    Adapter(bits=2),
    Adapter(bits="ternary", granularity=32),
    Adapter(bits=4, grid="balanced", granularity="tensor"),
    Adapter(bits=2, grid="balanced", granularity=32),
]
NAMED = pytest.mark.parametrize(
    "adapter", EVERY, ids=lambda one: f"{one.bits} {one.chosen_grid} {one.granularity}"
)


def linear() -> Linear:
    return Linear("heads head_dim", "embed", SIZES, key=key(0))


def reference(adapter: Adapter, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The dequantised matrix [inputs, outputs], as the papers write it."""
    half = 0 if adapter.bits == "ternary" else 2 ** (adapter.bits - 1)
    size = adapter.granularity if isinstance(adapter.granularity, int) else len(weight)
    blocks = weight.reshape(-1, size, weight.shape[1])
    scale = scale if adapter.granularity == "tensor" else scale.reshape(-1, 1, weight.shape[1])
    shared = (0, 1, 2) if adapter.granularity == "tensor" else (1,)
    count = blocks.numel() // scale.numel()
    if adapter.chosen_grid == "balanced":
        largest = blocks.detach().abs().amax(shared, keepdim=True)
        step = (torch.nn.functional.softplus(scale) + 1e-8) * largest / half
        codes = torch.clamp(Round.apply(blocks / step + 0.5), 1 - half, half)
        return (step * (codes - 0.5)).reshape(weight.shape)
    if adapter.chosen_grid == "lsq":
        step = Gain.apply(scale, (count * (half - 1)) ** -0.5)
        codes = Round.apply(torch.clamp(blocks / step, -half, half - 1))
        return (step * codes).reshape(weight.shape)
    # ParetoQ: of the width alpha of all cells together, 3 or 4 of them.
    cells, shift = (3, 0.0) if adapter.bits == "ternary" else (4, 0.5)
    alpha = Gain.apply(scale, count**-0.5) * (cells / 2)
    clipped = torch.clamp(blocks / alpha, -1 + 1e-6, 1 - 1e-6) * (cells / 2) - shift
    return (alpha * (Round.apply(clipped) + shift) / (cells / 2)).reshape(weight.shape)


@NAMED
def test_the_map_and_its_gradients_are_those_of_the_papers_in_torch(adapter):
    made: Any = tiny.adapted(linear(), adapter)
    x, outer = (jax.random.normal(key(n), s) for n, s in ((1, (5, 4, 16)), (2, (5, 6))))

    @eqx.filter_jit
    def gradients(made, x):
        loss = lambda made, x: jnp.sum(outer * made(x))  # noqa: E731
        return made(x), jax.grad(loss, argnums=(0, 1))(made, x)

    y, (d_made, d_x) = gradients(made, x)
    ours = {"x": d_x.reshape(5, 64), "latent": d_made.latent.reshape(64, 6)}
    ours |= {"scale": d_made.scale, "y": y}

    w, s, inputs = (
        torch.tensor(np.array(a)).double().requires_grad_()
        for a in (made.latent.reshape(64, 6), made.scale, x.reshape(5, 64))
    )
    output = inputs @ reference(adapter, w, s)
    (torch.tensor(np.array(outer)) * output).sum().backward()
    theirs = {"x": inputs.grad, "latent": w.grad, "scale": s.grad, "y": output.detach()}
    for name, expected in theirs.items():
        assert expected is not None
        bound = 2e-6 * float(expected.abs().max())
        np.testing.assert_allclose(ours[name], expected.numpy(), rtol=1e-5, atol=bound)
    share = float((ours["latent"] == 0).mean())
    assert share < 0.3 and float(jnp.abs(d_made.scale).min()) > 0


@NAMED
def test_a_map_starts_at_scales_of_least_error(adapter):
    weight = np.asarray(linear().weight)
    made: Any = tiny.adapted(linear(), adapter)
    assert (np.asarray(made.latent) == weight).all()

    def error(scale) -> float:
        moved = eqx.tree_at(lambda one: one.scale, made, scale)
        return float(np.mean((matrix(moved) - weight) ** 2))

    least = error(made.scale)
    if adapter.chosen_grid == "balanced":
        others = [made.scale + step for step in (-0.3, -0.1, 0.1, 0.3)]
    else:
        others = [made.scale * share for share in (0.7, 0.9, 1.1, 1.4)]
    assert least < 0.98 * min(map(error, others))


def test_a_balanced_grid_at_4_bits_has_levels_of_a_half_offset():
    adapter = Adapter(bits=4, grid="balanced", granularity="tensor")
    made: Any = tiny.adapted(Linear("embed", "mlp", dict(embed=64, mlp=64), key=key(3)), adapter)
    factor = jax.nn.softplus(made.scale) + 1e-8
    step = factor * jnp.abs(made.latent).max() / 8
    levels = np.unique(np.asarray(made.merged().weight / step).round(4))
    assert levels.tolist() == [c + 0.5 for c in range(-8, 8)]


def test_bits_per_weight_count_the_scales_in_16_bits():
    made: list[Any] = [tiny.adapted(linear(), one) for one in EVERY]
    bits = [one.bits_per_weight for one in made]
    expected = [4 + 16 / 64, 3 + 16 / 384, 2 + 16 / 64, np.log2(3) + 0.5, 4 + 16 / 384, 2.5]
    assert bits == pytest.approx(expected)


def test_scales_can_be_trained_alone_and_are_not_decayed():
    def trained(**keys) -> set[str]:
        make = lambda: Adapter(**keys).adapt(linear(), names={}, key=key(1))  # noqa: E731
        arrays: Any = eqx.filter(eqx.filter_eval_shape(make), is_shape)
        assert matrices(arrays).latent and not matrices(arrays).scale
        mask = choose(arrays, None).mask
        return {name for name in ("latent", "scale") if getattr(mask, name)}

    assert trained() == {"latent", "scale"}
    assert trained(trains="scales") == {"scale"}
    with pytest.raises(UserError, match="nothing would be trained"):
        trained(trains="none")


@pytest.mark.parametrize(
    "adapter",
    [Adapter(granularity="tensor"), Adapter(grid="balanced"), Adapter(bits=2, granularity=32)],
    ids=["tensor", "channel", "group"],
)
def test_a_map_and_its_gradients_are_the_same_on_a_mesh_that_splits_it(adapter):
    maps = "embed", "heads head_dim"
    alone, split = (gradients(adapter, *maps, sizes) for sizes in ((1, 1, 1), (1, 2, 2)))
    assert tiny.apart(split, alone) < 1e-5


def test_keys_are_read_back_and_wrong_ones_are_refused():
    for adapter in EVERY:
        assert read(Adapter, tree(adapter)) == adapter
    with pytest.raises(UserError) as refusal:
        read(Adapter, {"bits": 5, "granularity": "row"})
    assert "bits" in str(refusal.value) and "granularity" in str(refusal.value)
    with pytest.raises(ValueError) as refused:
        Adapter(bits="ternary", grid="balanced", granularity=1, targets=())
    assert refused.value.args == (
        "grid is balanced, which has no level at 0; bits: 2 is the least it has",
        "granularity is 1; a group has 2 inputs or more",
        "targets is empty; it must choose a linear map",
    )
    with pytest.raises(UserError) as refusal:
        Adapter(granularity=24, targets=("*.gate",)).adapt(
            tiny.abstract(tiny.config("llama")), names={}, key=key(1)
        )
    assert str(refusal.value) == (
        "adapter.granularity has groups of 24 inputs, into which these maps cannot be cut: "
        "blocks.mlp.gate reads 32; no map here can"
    )
