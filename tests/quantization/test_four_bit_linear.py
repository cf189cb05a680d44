"""A frozen base in 4 bits: linear maps as codes and scales, on one device and on a mesh."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from windlass import adapters
from windlass.adapters.lora import Adapter
from windlass.config.start import FrozenBase
from windlass.errors import UserError
from windlass.layers.linear import Linear
from windlass.layers.stack import arrange
from windlass.quantization.four_bit_linear import FourBitLinear, frozen

NF4, INT4 = FrozenBase(kind="nf4", group=16), FrozenBase(kind="int4", group=16)
key = jax.random.key


def linear(**sizes: int) -> Linear:
    sizes = {"heads": 4, "head_dim": 32, "embed": 48} | sizes
    return Linear("heads head_dim", "embed", sizes, bias=True, key=key(0))


CONFIG = replace(tiny.config("llama"), head_dim=16)
LORA = Adapter(rank=3, alpha=5.0)


@eqx.filter_jit
def beside(base: FrozenBase):
    """A small model in 4 bits, with a LoRA that is not at its start."""
    model = LORA.adapt(frozen(CONFIG.init(key(0)), base), names={}, key=key(1))
    own, rest = eqx.partition(model, adapters.own(eqx.filter(model, eqx.is_array)))
    return eqx.combine(jax.tree.map(lambda x: x + 0.02, own), rest)


@eqx.filter_jit
def step(own, rest, batch):
    return jax.value_and_grad(lambda own: tiny.loss(eqx.combine(own, rest), batch))(own)


@pytest.mark.parametrize("base", [NF4, INT4], ids=lambda base: base.kind)
def test_a_map_computes_with_its_dequantised_matrix_forward_and_backward(base):
    plain = linear()
    found = FourBitLinear(plain, base)
    assert found.codes.shape == (4, 16, 48) and found.scales.shape == (4, 2, 48)
    matrix = found.merged()
    assert 0.03 < tiny.apart(matrix.weight, plain.weight) < 0.3
    x = jax.random.normal(key(1), (2, 3, 4, 32))
    assert np.allclose(found(x), matrix(x), atol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(found(x) ** 2))(x)
    assert np.allclose(gradient, jax.grad(lambda x: jnp.sum(matrix(x) ** 2))(x), atol=1e-5)


def test_the_backward_pass_dequantises_again_and_holds_no_matrix():
    found, x = FourBitLinear(linear(), NF4), jnp.ones((2, 3, 4, 32))
    _, backward = jax.vjp(found.product, x)
    held = [leaf for leaf in jax.tree.leaves(backward) if eqx.is_array(leaf)]
    assert {leaf.dtype.name for leaf in held if leaf.size > x.size} <= {"uint8"}
    assert all(leaf.shape != x.shape for leaf in held)


def test_groups_are_as_large_as_divides_the_inputs():
    assert FourBitLinear(linear(head_dim=96), FrozenBase(kind="nf4")).scales.shape == (4, 3, 48)


def test_a_model_in_4_bits_under_lora_computes_as_its_merged_one_does():
    model, batch = beside(NF4), tiny.rows(CONFIG.vocab)

    @eqx.filter_jit
    def losses(model):
        return tiny.loss(model, batch), tiny.loss(adapters.merged(model), batch)

    found, merged = map(float, losses(model))
    assert found == pytest.approx(merged, rel=1e-5)
    assert isinstance(adapters.plain(model).blocks.kinds[0].mlp.down, FourBitLinear)


@pytest.mark.parametrize(
    "base", [NF4, pytest.param(INT4, marks=pytest.mark.long)], ids=lambda base: base.kind
)
def test_loss_and_gradients_are_the_same_on_a_mesh_of_all_three_axes(base):
    model = eqx.filter_jit(arrange)(beside(base), remat="saved", unroll=1)
    batch = tiny.rows(CONFIG.vocab)
    found = []
    for sizes in ((1, 1, 1), (2, 2, 2)):
        with tiny.on(sizes) as mesh:
            whole, rows = tiny.placed(model, batch, mesh)
            own, rest = eqx.partition(whole, adapters.own(whole))
            found.append(jax.device_get(step(own, rest, rows)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert tiny.apart(found[1][1], found[0][1]) < 1e-5


def test_what_cannot_be_in_4_bits_is_refused():
    with pytest.raises(UserError, match="head_dim 45"):
        frozen(linear(head_dim=45), FrozenBase(kind="nf4", group=18))
    with pytest.raises(UserError) as refusal:
        frozen(linear(head_dim=20), FrozenBase(kind="nf4"))
    assert "have no even ones of 8 or more:  (head_dim 20); leave model.base out" in str(
        refusal.value
    )
    with pytest.raises(UserError, match="^model.base is int4; this model has no linear maps to"):
        frozen(tiny.model("echo_state"), FrozenBase(kind="int4"))
