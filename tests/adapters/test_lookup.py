"""Look-up tables with scales of low rank: what they compute, train, start from and take."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from windlass import adapters
from windlass.adapters.lookup import Adapter, _as_half, _nearest
from windlass.adapters.lora import Adapter as Lora
from windlass.checkpoint.fingerprint import named
from windlass.config import read
from windlass.errors import UserError
from windlass.layers.linear import Linear, LinearMap
from windlass.models.qwen3 import Config
from windlass.program.abstract import abstract_model, is_shape
from windlass.program.trainable import choose
from windlass.quantization import scales, tables
from windlass.quantization.four_bit import looked_up
from windlass.residuals import Architecture

QWEN3: Any = Config(
    vocab=151936, embed=1024, mlp=3072, layers=28, heads=16, kv_heads=8, head_dim=128, theta=1e6
)
SMALL: dict[str, Any] = dict(rank=3, group=8)
FORMS: dict[str, dict[str, Any]] = {
    "ranks": {},
    "baked": {"scales": "baked"},
    "product": {"scales": "product"},
    "groups": {"rank": 0},
    "floored groups": {"rank": 0, "scales": "product", "half": True},
    "2 bits with a zero": {"levels": 4, "zero": True},
    "3 levels": {"levels": 3},
    "absolute": {"positive": "abs"},
    "softplus": {"positive": "softplus"},
    "fp16": {"half": True},
    "codebook": {"codebook": 8},
    "straight-through": {"indices": "straight_through"},
    "more ranks than groups": {"rank": 9, "scales": "baked"},
}


def linear(seed: int = 0) -> Linear:
    """A map from an axis to two, with a bias."""
    sizes = dict(embed=36, heads=4, head_dim=5)
    made = Linear("embed", "heads head_dim", sizes, bias=True, key=key(1))
    rng = np.random.default_rng(seed)
    columns, rows = np.exp(rng.normal(size=(4, 5)) / 2), np.exp(rng.normal(size=(36, 1, 1)) / 2)
    weight = jnp.asarray(rng.normal(size=(36, 4, 5)) * rows * columns, jnp.float32)
    bias = jnp.asarray(rng.normal(size=(4, 5)), jnp.float32)
    return eqx.tree_at(lambda one: (one.weight, one.bias), made, (weight, bias))


key = jax.random.key
call = eqx.filter_jit(lambda node, x: node(x))
matrix = eqx.filter_jit(lambda node: node.weight)


def written_out(node) -> np.ndarray:
    """Q ∘ S in NumPy, [inputs, outputs], by the equations of the adapter."""
    config = node.config
    positive = {"none": lambda x: x, "abs": np.abs, "softplus": lambda x: np.log1p(np.exp(x))}
    value = {
        name: positive[config.positive](np.asarray(getattr(node, name), np.float64))
        for name in ("in_scales", "out_scales", "gains")
        if getattr(node, name) is not None
    }
    a = value["out_scales"].reshape(len(value["out_scales"]), -1)
    if "in_scales" in value:
        b = value["in_scales"].reshape(-1, len(a))
    else:
        b = (np.arange(36)[:, None] // config.group == np.arange(len(a))).astype(float)
    if "gains" in value:
        if config.codebook is None:
            a = a / np.linalg.norm(a, axis=1, keepdims=True)
            b = b / np.linalg.norm(b, axis=0)
        a = a * value["gains"][:, None]
    half = (lambda x: x.astype(np.float16).astype(float)) if config.half else (lambda x: x)
    scale = half(b) @ half(a)
    scale = np.maximum(scale, 1e-8) if config.scales == "product" else scale
    table = np.asarray(node.table)
    if node.indices is None:
        ratio = np.asarray(node.latent).reshape(scale.shape) / scale
        return half(table[np.abs(ratio[..., None] - table).argmin(-1)] * scale)
    return half(table[np.asarray(node.indices).reshape(scale.shape)] * scale)


@pytest.mark.parametrize("form", FORMS)
def test_a_map_computes_the_product_of_its_table_and_its_scales(form):
    base = linear()
    node = tiny.adapted(base, Adapter(**SMALL | FORMS[form]))
    x = np.random.default_rng(1).normal(size=(2, 36)).astype(np.float32)
    weight = written_out(node)
    expected = x @ weight + np.asarray(base.bias).ravel()
    found = np.asarray(call(node, x)).reshape(2, 20)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    errors = {"2 bits with a zero": 0.8, "3 levels": 0.9, "absolute": 0.5, "softplus": 0.5}
    assert scales.relative_error(weight, np.asarray(base.weight).reshape(36, 20)) < errors.get(
        form, 0.2
    )


def test_a_sum_over_ranks_is_what_a_map_computes():
    node = tiny.adapted(linear(), Adapter(rank=4, group=8))
    x = np.random.default_rng(1).normal(size=(3, 36)).astype(np.float32)
    values = np.asarray(node.table)[np.asarray(node.indices)].reshape(36, 20)
    found = scales.rank_sum(x, values, node.factors())
    expected = np.asarray(call(node, x) - node.bias).reshape(3, 20)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_selects_on_bits_are_a_look_up_and_the_nearest_is_found_as_on_the_host():
    rng = np.random.default_rng(0)
    for levels in (2, 3, 4, 7, 16):
        table = np.sort(rng.normal(size=levels)).astype(np.float32)
        indices = rng.integers(levels, size=(5, 6)).astype(np.uint8)
        found = np.asarray(jax.jit(looked_up)(table, indices))
        assert (found == table[indices]).all()
        values = rng.normal(size=(5, 6)).astype(np.float32)
        found = np.asarray(jax.jit(_nearest)(values, table))
        assert (found == tables.nearest(values, table)).all()


def test_numbers_are_rounded_as_fp16_rounds_them_and_their_gradient_is_that_of_no_rounding():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=4000) * 10.0 ** rng.integers(-9, 4, size=4000)).astype(np.float32)
    assert (np.asarray(jax.jit(_as_half)(x)) == x.astype(np.float16).astype(np.float32)).all()
    assert (np.asarray(jax.jit(jax.grad(lambda x: _as_half(x).sum()))(x)) == 1).all()


def test_only_what_the_keys_say_is_trained_and_a_straight_through_gradient_is_that_of_the_matrix():
    def trained(**keys) -> set[str]:
        node = eqx.filter_eval_shape(Adapter(**SMALL | keys).adapt, linear(), names={}, key=key(0))
        return set(named(eqx.filter(node, choose(node, None).mask)))

    factors = {"in_scales", "out_scales"}
    assert trained() == factors | {"gains"}
    assert trained(scales="product") == factors
    assert trained(rank=0) == {"out_scales"}
    assert trained(trains="gains") == trained(codebook=8) == {"gains"}
    assert trained(trains="none", table="learned") == {"table"}
    assert trained(indices="straight_through") == {"latent"}

    node = tiny.adapted(linear(), Adapter(**SMALL, indices="straight_through"))
    x = jnp.ones((1, 36))
    y, gradient = eqx.filter_jit(eqx.filter_value_and_grad(_squared, has_aux=True))(node, x)[0:2]
    expected = jnp.broadcast_to(2 * y[1][0], (36, 4, 5))
    assert tiny.apart(gradient.latent, expected) < 1e-6
    assert not np.any(gradient.in_scales) and not np.any(gradient.gains)


def test_a_conversion_keeps_the_scales_and_merges_the_rest_into_the_indices():
    base = linear()
    table = tiny.adapted(base, Adapter(rank=4, group=8, scales="product"))
    there, weight = jax.tree.map(np.asarray, table), np.asarray(matrix(table))
    ranks = Adapter(rank=4, levels=16, group=8)
    found = ranks.convert(there, weight)
    assert (
        found is not None and (found["indices"] == there.indices).mean() > 0.99
    )  # but the floored
    gains = np.linalg.norm(there.in_scales, axis=0) * np.linalg.norm(
        there.out_scales.reshape(4, -1), axis=1
    )
    assert found["gains"] == pytest.approx(np.sort(gains)[::-1], rel=1e-5)

    small = Adapter(rank=6, levels=4, group=8).convert(there, weight)
    assert small is not None and small["table"].shape == (4,) and small["gains"].shape == (6,)
    assert small["gains"][4:] == pytest.approx(0.01 * gains.min(), rel=1e-5)
    assert small["indices"].max() == 3

    errors = {}
    for fields, levels in ((found, 16), (small, 4)):
        made = Adapter(rank=len(fields["gains"]), levels=levels).adapt(base, names={}, key=key(0))
        for name, value in fields.items():
            made = eqx.tree_at(lambda one: getattr(one, name), made, jnp.asarray(value))  # noqa: B023
        errors[levels] = scales.relative_error(np.asarray(matrix(made)), weight)
    assert errors[16] < 1e-4 and errors[4] < 0.5
    assert Adapter(rank=0, levels=16).convert(there, weight) is None  # which is fitted anew


def _squared(node, x):
    y = node(x)
    return (y**2).sum(), y


@pytest.mark.parametrize("form", ["ranks", "groups", "straight-through"])
def test_a_map_and_its_gradient_are_the_same_on_a_mesh_of_all_three_axes(form):
    node = tiny.adapted(linear(), Adapter(**SMALL | FORMS[form]))
    x = jax.random.normal(key(2), (4, 3, 36))
    found = []
    for sizes in ((1, 1, 1), (2, 2, 2)):
        with tiny.on(sizes) as mesh:
            placed, rows = tiny.placed(node, x, mesh)
            found.append(jax.device_get(_losses(placed, rows)))
    assert tiny.apart(found[1], found[0]) < 1e-5


@eqx.filter_jit
def _losses(node, x):
    def loss(node):
        return jnp.mean(node(x) ** 2)

    return eqx.filter_value_and_grad(loss)(node)


PRESETS = {"q2a2": 2.73, "q2a4": 3.28, "q4a4": 4.09, "q4a4_r32": 4.73, "q4_r32": 4.73}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_bits_and_the_factors_of_their_names_on_qwen3_0_6b(preset):
    model = abstract_model(Architecture(QWEN3), (Adapter(preset=preset),))
    assert adapters.bits_per_weight(model) == pytest.approx(PRESETS[preset], abs=0.005)
    arrays = named(eqx.filter(model, is_shape))
    indices = sum(x.size for path, x in arrays.items() if path.endswith(".indices"))
    assert indices == 440_401_920
    factors = [x.size for path, x in arrays.items() if path.endswith(("_scales", ".gains"))]
    if preset == "q4_r32":
        assert sum(factors) == 20_191_360
    mlp, attention = model.blocks.kinds[0].mlp.up, model.blocks.kinds[0].attention.output
    tables_of = {"q2a2": (4, 4), "q2a4": (4, 16)}.get(preset, (16, 16))
    ranks = {"q2a4": (32, 8), "q4a4": (4, 4)}.get(preset, (32, 32))
    assert (mlp.table.shape[-1], attention.table.shape[-1]) == tables_of
    assert (mlp.out_scales.shape[1], attention.out_scales.shape[1]) == ranks


class Detached(adapters.Adapted):
    """The wrong rule: a frozen map whose output is cut from the gradient, not its parameters."""

    base: adapters.Adapted
    trains: ClassVar[tuple[str, ...]] = ()
    matrices: ClassVar[tuple[str, ...]] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        return self.base.reads

    @property
    def writes(self) -> tuple[str, ...]:
        return self.base.writes

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {}

    def merged(self) -> Linear:
        return self.base.merged()

    def product(self, x):
        return jax.lax.stop_gradient(self.base.product(x))

    def __call__(self, x):
        return jax.lax.stop_gradient(self.base(x))


@pytest.mark.long
def test_the_gradient_of_lora_in_layer_0_on_frozen_tables_is_that_of_finite_differences():
    targets = ("blocks.attention.*",)
    table = Adapter(rank=2, group=8, levels=4, trains="none", targets=targets)
    model = tiny.adapted(tiny.model("qwen3"), table, Lora(rank=2, targets=targets))
    batch = tiny.rows(tiny.config("qwen3").vocab)
    up = lambda model: model.blocks.kinds[0].attention.query.up.weight  # noqa: E731
    is_adapted = lambda node: isinstance(node, adapters.Adapted)  # noqa: E731
    detached: Any = Detached
    cut = lambda node: eqx.tree_at(lambda one: one.base, node, detached(node.base))  # noqa: E731
    wrong = jax.tree.map(lambda x: cut(x) if is_adapted(x) else x, model, is_leaf=is_adapted)

    @eqx.filter_jit
    def loss(model, at):
        return jax.value_and_grad(lambda at: tiny.loss(eqx.tree_at(up, model, at), batch))(at)

    at = 0.3 * jax.random.normal(key(3), up(model).shape)
    (value, right), (same, detached) = loss(model, at), loss(wrong, at)
    assert float(same) == pytest.approx(float(value), rel=1e-6)
    direction = jnp.zeros_like(at).at[0].set(right[0])  # of the first layer alone
    direction, step = direction / jnp.linalg.norm(direction), 3e-2
    ahead, behind = (float(loss(model, at + sign * step * direction)[0]) for sign in (1, -1))
    slope = (ahead - behind) / (2 * step)
    assert float((right * direction).sum()) == pytest.approx(slope, rel=5e-3)
    assert abs(float((detached * direction).sum()) - slope) > 0.5 * abs(slope)


def test_keys_that_cannot_be_are_refused_with_what_can():
    keys = {"preset": "q2a4", "rank": 4, "group": 0, "codebook": 300, "targets": []}
    with pytest.raises(UserError) as refusal:
        read(Adapter, keys)
    assert str(refusal.value) == (
        "4 problems in the recipe:\n"
        "  rank      is 4, and preset q2a4 sets it; leave one of them out\n"
        "  group     is 0; it must be 1 or more\n"
        "  codebook  is 300; it can be 2 to 256, or null\n"
        "  targets   is empty; it must choose a linear map"
    )
    keys = {"levels": 32, "rank": -1, "scales": "baked", "trains": "gains", "codebook": 64}
    with pytest.raises(UserError) as refusal:
        read(Adapter, keys | {"positive": "abs"})
    assert str(refusal.value) == (
        "5 problems in the recipe:\n"
        "  levels    is 32; a table has 2 to 16 values\n"
        "  rank      is -1; it must be 0 or more\n"
        "  codebook  is of unit vectors, which scales ranks of rank 1 or more has\n"
        "  codebook  is of factors as they are, and positive is abs\n"
        "  trains    is gains, which only scales ranks of rank 1 or more has"
    )


def test_every_linear_map_of_every_family_has_a_table():
    for family in ("gemma", "llama", "mistral", "qwen2", "qwen3"):
        model = tiny.abstract(tiny.config(family))
        made = eqx.filter_eval_shape(Adapter(preset="q2a4").adapt, model, names={}, key=key(0))
        maps = [path.rpartition(".")[0] for path in named(made) if path.endswith(".indices")]
        expected = [
            jax.tree_util.keystr(path, simple=True, separator=".")
            for path, node in jax.tree_util.tree_leaves_with_path(
                model, is_leaf=lambda node: isinstance(node, LinearMap)
            )
            if isinstance(node, LinearMap)
        ]
        assert maps == expected and len(maps) >= 7
