"""Kernels for products of low rank, for norms and for queries compute what plain XLA does."""

import functools
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from tests import tiny
from windlass.adapters.lora import Adapter
from windlass.devices import mesh, triton
from windlass.devices.axes import cast
from windlass.layers import attention, low_rank, mlp, norm
from windlass.layers.attention import Attention
from windlass.layers.context import enter
from windlass.layers.mlp import Gated, NormGated
from windlass.layers.norm import OffsetRMSNorm, RMSNorm
from windlass.layers.rotary import Rotary
from windlass.layers.stack import Stack, arrange, stacked
from windlass.networks.decoder import Block

SIZES = {"embed": 128, "mlp": 256, "heads": 4, "kv_heads": 2, "head_dim": 64}
ROWS, LENGTH = 2, 96


def _normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype=jnp.float32):
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def _rms_norm(over: str) -> RMSNorm:
    return RMSNorm(over, SIZES, eps=1e-6)


def _both(plain, kernel, arguments, d):
    """Distance of a kernel's values and gradients from those of the formula."""
    (want, back), (got, kernel_back) = jax.vjp(plain, *arguments), jax.vjp(kernel, *arguments)
    return tiny.apart(jax.tree.leaves((got, kernel_back(d))), jax.tree.leaves((want, back(d))))


@pytest.mark.parametrize("tokens", [(1, 64), (2, 96), (4, 1024)])
def test_swiglu_with_factors_equals_the_formula(tokens):
    rank, width = 16, 256
    low = mlp.LowRankFactors(
        _normal(*tokens, rank, seed=1, scale=0.3),
        _normal(*tokens, rank, seed=2, scale=0.3),
        _normal(rank, width, seed=3, scale=0.3),
        _normal(rank, width, seed=4, scale=0.3),
        _normal(width, rank, seed=5, scale=0.1),
    )
    arguments = _normal(*tokens, width, seed=6, scale=3), _normal(*tokens, width, seed=7), low
    d = _normal(*tokens, width, seed=8), _normal(*tokens, rank, seed=9)
    kernel = functools.partial(mlp._in_kernels, interpret=True)
    assert _both(mlp.swiglu_formula, lambda *x: kernel(*x), arguments, d) < 1e-5


@pytest.mark.parametrize("rank", [8, 16, 48])
@pytest.mark.parametrize("features", [(128,), (4, 64)])
def test_a_product_is_added_and_read_as_by_the_formula(rank, features):
    x, up = _normal(ROWS, LENGTH, *features), _normal(rank, 256 if features[1:] else 128, seed=1)
    inner, d = _normal(ROWS, LENGTH, rank, seed=2), _normal(ROWS, LENGTH, *features, seed=3)

    def plain(bases, inner, up):
        return sum(bases) + (inner @ up).reshape(x.shape)

    added = lambda *x: low_rank._added(*x, True)  # noqa: E731
    for bases in ((x,), (x, _normal(*x.shape, seed=4))):
        assert _both(plain, added, (bases, inner, up), d) < 1e-5
    copies = 3

    def read_plain(x, down):
        return *[x] * copies, x.reshape(ROWS, LENGTH, -1) @ down

    read = lambda *x: low_rank._read(*x, copies, True)  # noqa: E731
    several = *(_normal(*x.shape, seed=5 + i) for i in range(copies)), inner
    assert _both(read_plain, read, (x, up.T), several) < 1e-5


@pytest.mark.parametrize("make", [None, RMSNorm, OffsetRMSNorm])
@pytest.mark.parametrize("counts", [(3,), (3, 2, 2), (4, 1, 1)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_heads_that_are_split_normed_and_rotated_equal_the_formula(counts, make, has_bias):
    dim, width, rotary = 32, 32 * sum(counts), Rotary(1e4)
    x = _normal(ROWS, 64, width)
    position = jnp.broadcast_to(jnp.arange(64) % 37, (ROWS, 64))
    cos, sin = rotary.turns(position, dim, jnp.float32)
    bias = _normal(width, seed=1, scale=float(has_bias))
    factors = 1 + _normal(len(counts), dim, seed=2, scale=0.1)
    is_normed = [make is not None and number < 2 for number in range(len(counts))]

    def plain(x, factors, bias):
        heads = (x + bias).reshape(ROWS, 64, -1, dim)
        parts = jnp.split(heads, list(itertools.accumulate(counts))[:-1], axis=2)
        for number, own in enumerate(parts):
            if is_normed[number]:
                own = _normed(make, own, factors[number])
            parts[number] = rotary(own, position) if number < 2 else own
        return tuple(parts)

    def kernel(x, factors, bias):
        eps = tuple(1e-6 if one else None for one in is_normed)
        joint = attention.Joint(x, bias=bias if has_bias else None)
        return attention.split_heads(
            attention.HeadSplit(counts, dim, eps), joint, cos, sin, factors, True
        )

    d = tuple(_normal(ROWS, 64, count, dim, seed=3 + i) for i, count in enumerate(counts))
    if has_bias:
        assert _both(plain, kernel, (x, factors, bias), d) < 1e-5
    else:
        plain, kernel = (functools.partial(one, bias=bias) for one in (plain, kernel))
        assert _both(plain, kernel, (x, factors), d) < 1e-5


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("rank", [None, 16])
def test_heads_behind_a_norm_or_with_a_product_of_low_rank_equal_the_formula(rank, has_norm):
    counts, dim, rotary = (3, 2, 2), 32, Rotary(1e4)
    split = attention.HeadSplit(counts, dim, (*[1e-6 if has_norm else None] * 2, None))
    x, factors = _normal(ROWS, 64, 224), 1 + _normal(3, dim, seed=2, scale=0.1)
    position = jnp.broadcast_to(jnp.arange(64), (ROWS, 64))
    cos, sin = rotary.turns(position, dim, jnp.float32)
    scale = None if rank else jnp.abs(_normal(ROWS, 64, 1, seed=1)) + 0.1
    low = (_normal(ROWS, 64, 4 * rank, seed=3), _normal(rank, 224, seed=4)) if rank else (None,) * 2

    def plain(x, factors, inner, up):
        if rank is None:
            x = x * scale
        else:  # each kind has ranks of its own, and the last are of none
            inners = jnp.split(inner, 4, axis=2)[:3]
            ups = jnp.split(up, split.ends, axis=1)
            x = x + jnp.concatenate([a @ b for a, b in zip(inners, ups, strict=True)], axis=2)
        parts = jnp.split(x.reshape(ROWS, 64, -1, dim), [3, 5], axis=2)
        for number in range(2):
            own = parts[number]
            parts[number] = rotary(
                _normed(RMSNorm, own, factors[number]) if has_norm else own, position
            )
        return tuple(parts)

    def kernel(x, factors, inner, up):
        joint = attention.Joint(x, scale=scale, inner=inner, up=up)
        return attention.split_heads(split, joint, cos, sin, factors, True)

    d = tuple(_normal(ROWS, 64, count, dim, seed=5 + i) for i, count in enumerate(counts))
    assert _both(plain, kernel, (x, factors, *low), d) < 1e-5


def _normed(make, x, factor):
    norm = make("head_dim", {"head_dim": x.shape[-1]}, eps=1e-6)
    if make is RMSNorm:
        return eqx.tree_at(lambda one: one.scale, norm, factor)(x)
    return eqx.tree_at(lambda one: one.offset, norm, factor - 1)(x)


@pytest.fixture
def one_gpu(monkeypatch):
    """Layers choose what they compute as on an NVIDIA GPU alone, whose kernels are interpreted."""
    calls: list[str] = []

    def called(kernel, **how: Any):
        calls.append(kernel.__name__)
        return original(kernel, **{**how, "interpret": True})

    original = triton.called
    for module in (low_rank, mlp, attention, norm):
        monkeypatch.setattr(module, "called", called)
    monkeypatch.setattr(mlp, "sigmoid", lambda x, interpret: triton.sigmoid(x, interpret=True))

    def begin():
        for module in (low_rank, attention, norm, mlp):
            monkeypatch.setattr(module, "on_one_gpu", lambda: True)
        return calls

    with jax.set_mesh(mesh.build(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1])):
        yield begin


def _adapted(layer, **settings):
    """A layer with LoRA beside each of its maps, whose second matrix is not zero."""
    adapted = Adapter(rank=8, **settings).adapt(layer, names={}, key=jax.random.key(3))
    return jax.tree.map(lambda x: x + 0.02 * _normal(*x.shape, seed=4), adapted)


def _gradients(layer, x, context, dtype):
    """Values and gradients by the layer's arrays and the input, in a precision."""

    def loss(layer, x):
        y = layer(x, context) if context is not None else layer(x)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    step = eqx.filter_jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    with jax.numpy_dtype_promotion("standard"):
        (_, y), gradients = step(cast(layer, dtype), x.astype(dtype))
    return jax.tree.leaves((y, gradients))


def _is_as_close(make, context, one_gpu, expected):
    """Hold a layer in bfloat16 with kernels against itself in float32: as close as without them."""
    x = jax.sharding.reshard(_normal(ROWS, LENGTH, 128), PartitionSpec(("data", "fsdp")))
    exact = _gradients(make, x, context, jnp.float32)
    plain = tiny.apart(_gradients(make, x, context, jnp.bfloat16), exact)
    calls = one_gpu()
    ours = tiny.apart(_gradients(make, x, context, jnp.bfloat16), exact)
    assert set(calls) == expected
    assert ours < 1.5 * plain < 0.5


def test_a_gated_mlp_with_lora_as_a_gpu_computes_it_equals_itself(one_gpu):
    layer = _adapted(Gated(SIZES, key=jax.random.key(0)))
    kernels = {"swiglu_low_rank", "swiglu_low_rank_gradient", "low_rank"}
    _is_as_close(layer, None, one_gpu, kernels)


@pytest.mark.parametrize(
    "layer",
    [
        Gated(SIZES, activation=jax.nn.gelu, key=jax.random.key(0)),
        NormGated(SIZES, eps=1e-6, key=jax.random.key(0)),
    ],
)
def test_another_gated_mlp_with_lora_has_its_products_added_in_kernels(layer, one_gpu):
    _is_as_close(_adapted(layer), None, one_gpu, {"low_rank"})


def test_attention_with_lora_as_a_gpu_computes_it_equals_itself(one_gpu):
    kernels = {"low_rank", "split_heads", "split_heads_gradient"}
    _is_as_close(_adapted(_attention()), _context(), one_gpu, kernels)


def _attention() -> Attention:
    return Attention(SIZES, rotary=Rotary(1e4), norm=_rms_norm, key=jax.random.key(0))


def _context():
    tokens = jnp.zeros((ROWS, LENGTH), jnp.int32)
    position = jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))
    return enter({"tokens": tokens, "position": position, "document": tokens}, None).layer(None)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_block_as_a_gpu_computes_it_equals_itself(is_adapted, one_gpu):
    block = Block(
        attention_norm=_rms_norm("embed"),
        attention=_attention(),
        mlp_norm=_rms_norm("embed"),
        mlp=Gated(SIZES, key=jax.random.key(1)),
    )
    kernels = {"split_heads", "split_heads_gradient", "norm_gradient"}
    if is_adapted:
        block = _adapted(block)
        kernels |= {"low_rank", "swiglu_low_rank", "swiglu_low_rank_gradient"}
    _is_as_close(block, _context(), one_gpu, kernels)


@pytest.mark.parametrize("maps", [1, 3])
@pytest.mark.parametrize("size", [128, 896, 2048, 8192])
def test_the_gradient_of_a_norm_and_of_what_goes_past_it_equals_the_formula(size, maps):
    x, factor = _normal(ROWS, 64, size, scale=3), 1 + _normal(size, seed=1, scale=0.1)

    def plain(x, factor):
        return x, *[norm.normed(x, 1e-6) * factor] * maps

    def kernel(x, factor):
        return norm._forked(1e-6, maps, x, factor, True)

    d = tuple(_normal(*x.shape, seed=2 + i) for i in range(1 + maps))
    assert _both(plain, kernel, (x, factor), d) < 1e-5


@pytest.mark.parametrize("size", [128, 896])
def test_matrices_with_a_norms_factor_have_the_gradients_of_the_formula(size):
    x = _normal(ROWS, 64, size, scale=3)
    factor = (1 + _normal(size, seed=1, scale=0.1)).at[5].set(0)  # of which the gradient is not
    matrices = [_normal(size, 32, seed=2 + i, scale=0.1) for i in range(2)]

    def plain(x, factor, *matrices):
        return x, *[norm.normed(x, 1e-6) * factor @ one for one in matrices]

    def kernel(x, factor, *matrices):
        found: Any = norm._unscaled(1e-6, 2, x, factor, True)
        past, scale, *read = found
        scale, own = jax.lax.stop_gradient((scale, norm.divisor(factor)))
        folded = [own[:, None] * one for one in matrices]
        return past, *[scale * (one @ w) for one, w in zip(read, folded, strict=True)]

    d = _normal(*x.shape, seed=4), *(_normal(ROWS, 64, 32, seed=5 + i) for i in range(2))
    assert _both(plain, kernel, (x, factor, *matrices), d) < 1e-5


@pytest.mark.parametrize("copies", [1, 2])
def test_a_fork_that_is_read_with_low_rank_equals_the_formula(copies):
    x, factor = _normal(ROWS, 64, 128, scale=3), 1 + _normal(128, seed=1, scale=0.1)
    down = _normal(128, 16, seed=2)

    def plain(x, factor, down):
        n = norm.normed(x, 1e-6) * factor
        return x, *[n] * copies, n @ down

    def kernel(x, factor, down):
        return low_rank._read_fork(1e-6, copies, x, factor, down, True)

    d = *(_normal(*x.shape, seed=3 + i) for i in range(1 + copies)), _normal(ROWS, 64, 16, seed=9)
    assert _both(plain, kernel, (x, factor, down), d) < 1e-5


class _Unrolled(eqx.Module):
    """Two blocks of a stack whose layers are part of the program."""

    stack: Stack

    def __init__(self, **settings):
        def make(key, layer):
            block = Block(
                attention_norm=_rms_norm("embed"),
                attention=Attention(SIZES, rotary=Rotary(1e4), key=key, **settings),
                mlp_norm=_rms_norm("embed"),
                mlp=Gated(SIZES, key=key),
            )
            return jax.tree.map(lambda x: x + 0.1 * _normal(*x.shape, seed=7), block)

        stack = stacked([make], 2, key=jax.random.key(0))
        self.stack = arrange(stack, remat="saved", unroll=2)

    def __call__(self, x, context):
        return self.stack(x, context)[0]


@pytest.mark.parametrize("settings", [{"norm": _rms_norm}, {"bias": True}])
def test_matrices_of_a_stack_that_have_their_norms_factors_compute_the_same(settings, one_gpu):
    kernels = {"split_heads", "split_heads_gradient", "norm_gradient"}
    _is_as_close(_Unrolled(**settings), _context(), one_gpu, kernels)


@pytest.mark.parametrize("settings", [{"dora": True}, {"rank": 128}])
def test_maps_that_kernels_do_not_compute_stay_as_they_are(settings, one_gpu):
    layer = Adapter(**settings).adapt(
        Gated(SIZES, key=jax.random.key(0)), names={}, key=jax.random.key(3)
    )
    x = jnp.zeros((ROWS, LENGTH, 128), jnp.bfloat16)
    calls = one_gpu()
    layer(x)
    assert calls == []


def test_few_tokens_and_other_precisions_have_no_kernels(one_gpu):
    layer = _adapted(Gated(SIZES, key=jax.random.key(0)))
    calls = one_gpu()
    for shape, dtype in (((1, 1, 128), jnp.bfloat16), ((ROWS, LENGTH, 128), jnp.float32)):
        layer(jnp.zeros(shape, dtype))
    assert calls == []
