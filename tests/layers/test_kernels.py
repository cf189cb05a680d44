"""Every kernel computes what plain XLA does, and each device gets the one it has."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from windlass.layers import kernels
from windlass.layers.kernels import choose
from windlass.models import qwen3

LENGTH = 200  # no multiple of what a TPU kernel takes at a time


def packed(rng: np.random.Generator) -> jax.Array:
    """Two rows of documents: three and some padding, and a single one."""
    first = np.repeat([0, 1, 2, -1], [90, 1, 99, 10])
    return jnp.array(np.stack([first, np.zeros(LENGTH)]), jnp.int32)


def mixed(kernel, window: int | None):
    """What a kernel gives, and the gradients of a sum of it."""
    rng = np.random.default_rng(0)
    q, k, v, weights = (
        jnp.array(rng.normal(size=(2, LENGTH, heads, 16)), jnp.float32) for heads in (4, 2, 2, 4)
    )
    document = packed(rng)

    def total(q, k, v):
        given = kernel(q, k, v, document, document, 0, window=window, scale=0.3)
        return jnp.sum(given * weights), given

    return jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)


@pytest.mark.parametrize("window", [None, 37])
def test_splash_attention_is_what_plain_xla_computes_on_packed_rows(window):
    found = mixed(functools.partial(kernels.splash, interpret=True), window)
    expected = mixed(kernels.xla, window)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_plain_xla_sees_the_own_document_up_to_the_own_position_within_the_window():
    (_, given) = mixed(kernels.xla, 37)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, LENGTH, heads, 16)) for heads in (4, 2, 2))
    document = np.asarray(packed(rng))
    for row, at, head in [(0, 0, 0), (0, 90, 3), (0, 120, 1), (0, 195, 2), (1, 199, 3)]:
        seen = [j for j in range(max(0, at - 36), at + 1) if document[row, j] == document[row, at]]
        scores = np.array([0.3 * q[row, at, head] @ k[row, j, head // 2] for j in seen])
        shares = np.exp(scores - scores.max())
        expected = (shares / shares.sum()) @ v[row, seen, head // 2]
        np.testing.assert_allclose(given[row, at, head], expected, atol=1e-5)


def test_a_model_computes_the_same_with_splash_on_a_mesh(monkeypatch):
    config = qwen3.Config.tiny()
    texts = tiny.documents(config.vocab, [9, 4, 14, 6])
    batch = tiny.packed([[texts[0], texts[1]], [texts[2]], [texts[3]], [texts[0]]], length=14)

    def gradient(model):
        return eqx.filter_jit(eqx.filter_grad(tiny.loss))(model, batch)

    expected = gradient(config.init(jax.random.key(0)))
    monkeypatch.setattr(kernels, "_kernel", lambda *_: "splash")
    interpreted = functools.partial(kernels.splash, interpret=True)
    monkeypatch.setitem(kernels.KERNELS, "splash", interpreted)
    kernels._program.cache_clear()
    with jax.set_mesh(jax.make_mesh((1, 2, 2), ("data", "fsdp", "tensor"))):
        found = gradient(config.init(jax.random.key(0)))
    kernels._program.cache_clear()
    assert tiny.apart(found, expected) < 1e-5


@pytest.mark.parametrize(
    ("platform", "device_kind", "dtype", "head_dim", "length", "name"),
    [
        ("tpu", "TPU v5 lite", "bfloat16", 64, 1000, "splash"),
        ("tpu", "TPU v6 lite", "float32", 256, 1024, "splash"),
        ("cpu", "cpu", "bfloat16", 64, 1024, "xla"),
        ("gpu", "NVIDIA H200", "bfloat16", 64, 1024, "cudnn"),
        ("gpu", "NVIDIA H200", "bfloat16", 256, 1024, "cudnn"),
        ("gpu", "NVIDIA A100-SXM4-40GB", "bfloat16", 128, 1024, "cudnn"),
        ("gpu", "a GPU of tomorrow", "float16", 128, 1024, "cudnn"),
    ],
)
def test_a_device_gets_the_kernel_it_has(platform, device_kind, dtype, head_dim, length, name):
    assert choose(platform, device_kind, dtype, head_dim, length).name == name


@pytest.mark.parametrize(
    ("device_kind", "dtype", "head_dim", "length", "why"),
    [
        ("NVIDIA H200", "float32", 64, 1024, "cuDNN has no flash kernel for float32 matrices"),
        ("Tesla T4", "float16", 64, 1024, "cuDNN has no flash kernel for Tesla T4"),
        (
            "NVIDIA A100-SXM4-40GB",
            "bfloat16",
            256,
            1024,
            "cuDNN has no flash kernel for heads of 256, only of multiples of 8 up to 128",
        ),
        (
            "NVIDIA H200",
            "bfloat16",
            64,
            1023,
            "cuDNN has no flash kernel for rows of an odd length, 1023",
        ),
        ("AMD Instinct MI300X", "bfloat16", 64, 1024, "there is no flash kernel for gpu devices"),
    ],
)
def test_where_a_gpu_has_no_flash_kernel_it_is_said_why(device_kind, dtype, head_dim, length, why):
    kernel = choose("gpu", device_kind, dtype, head_dim, length)
    assert not kernel.is_flash
    assert kernel.why == f"plain XLA: {why}"
