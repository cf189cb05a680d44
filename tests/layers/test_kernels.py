"""Every kernel computes what plain XLA does, and each device gets the one it has."""

import functools
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from windlass.layers import kernels
from windlass.layers.kernels import RowsOfStep, choose
from windlass.layers.pattern import CAUSAL, Pattern
from windlass.models import qwen3

LENGTH = 200  # no multiple of what a TPU kernel takes at a time, nor of a stride of 3
DOCUMENT = np.stack([np.repeat([0, 1, 2, -1], [89, 2, 99, 10]), np.zeros(LENGTH, int)])
KERNELS = {"xla": kernels.xla, "splash": functools.partial(kernels.splash, interpret=True)}


def cells(stride: int) -> list[list[tuple[int, int, int]]]:
    """The cells of each row, counted from the beginning of documents: (slot, newest, document)."""
    found = []
    for row in DOCUMENT:
        own = []
        for document in dict.fromkeys(row):
            (here,) = np.nonzero(row == document)
            newest = here[stride - 1 :: stride]
            own += [(int(at) // stride, int(at), int(document)) for at in newest]
        found.append(own)
    return found


def mask(causal: bool, window: int | None, stride: int) -> np.ndarray:
    """Which slots a query sees, by what is written of attention and not how it is computed."""
    seen = np.zeros((2, LENGTH, -(-LENGTH // stride)), bool)
    for row, own in enumerate(cells(stride)):
        for slot, newest, document in own:
            for at in range(LENGTH):
                near = window is None or abs(at - newest) < window
                past = newest <= at or not causal
                seen[row, at, slot] = DOCUMENT[row, at] == document and near and past
    return seen


def given(stride: int) -> dict[str, jax.Array]:
    """The document of every slot, -2 where there is no cell, and where cells end: what we say."""
    slots, phase = np.full((2, -(-LENGTH // stride)), -2), np.zeros((2, LENGTH), int)
    for row, own in enumerate(cells(stride)):
        for slot, newest, document in own:
            slots[row, slot] = document
            phase[row, DOCUMENT[row] == document] = newest % stride
    return {name: jnp.array(x, jnp.int32) for name, x in dict(slots=slots, phase=phase).items()}


def mixed(kernel, stride: int):
    """What a kernel gives, and the gradients of a sum of it."""
    rng = np.random.default_rng(0)
    lengths = (LENGTH, -(-LENGTH // stride), -(-LENGTH // stride), LENGTH)
    q, k, v, weights = (
        jnp.array(rng.normal(size=(2, length, heads, 16)), jnp.float32)
        for length, heads in zip(lengths, (4, 2, 2, 4), strict=True)
    )

    def total(q, k, v):
        given = kernel(q, k, v)
        return jnp.sum(given * weights), given

    return jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)


def by_hand(seen: np.ndarray):
    def attention(q, k, v):
        scores = 0.3 * jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, 2, axis=2))
        shares = jnp.where(seen[:, None], jnp.exp(scores), 0)
        shares = shares / jnp.maximum(shares.sum(axis=-1, keepdims=True), 1e-30)
        return jnp.einsum("bhqk,bkhd->bqhd", shares, jnp.repeat(v, 2, axis=2))

    return attention


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("stride", [1, 3, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("window", [None, 37, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("both_ways", [False, True])
def test_a_kernel_mixes_the_values_that_are_seen_and_no_others(
    kernel, stride, window, both_ways, monkeypatch
):
    causal = not both_ways
    monkeypatch.setattr(kernels, "_kernel", lambda *_: kernel)
    monkeypatch.setitem(kernels.KERNELS, kernel, KERNELS[kernel])
    kernels._program.cache_clear()
    where = given(stride) if stride > 1 else {"slots": jnp.array(DOCUMENT, jnp.int32)}
    how = dict(causal=causal, window=window, stride=stride, scale=0.3, first=0) | where
    document = jnp.array(DOCUMENT, jnp.int32)
    found = mixed(functools.partial(kernels.attend, document=document, **how), stride)
    kernels._program.cache_clear()
    expected = mixed(by_hand(mask(causal, window, stride)), stride)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)


def test_cells_are_counted_from_the_beginning_of_a_row_where_nothing_else_is_given():
    one = jnp.zeros((1, 9), jnp.int32)
    q, k, v = (jnp.ones((1, length, 1, 8)) for length in (9, 3, 3))
    v = v * jnp.arange(1.0, 4.0).reshape(1, 3, 1, 1)
    found = kernels.attend(q, k, v, document=one, slots=one[:, :3], first=0, stride=3)
    assert found[0, :, 0, 0].tolist() == [0, 0, 1, 1, 1, 1.5, 1.5, 1.5, 2]


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("documents", "deterministic", "dim", "expected"),
    [
        ("one", False, 64, "cudnn"),
        ("one", True, 64, "cudnn"),  # which calls our kernels
        ("several", True, 128, "cudnn"),
        ("several", False, 256, "cudnn"),
        ("several", True, 256, "xla"),
        (None, False, 64, "cudnn"),
        (None, True, 64, "xla"),
    ],
)
def test_a_deterministic_step_has_our_kernels_or_plain_xla(
    documents, deterministic, dim, expected, monkeypatch
):
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setattr(kernels, "device", lambda: gpu)
    q = jnp.zeros((2, 64, 4, dim), jnp.bfloat16)
    slots, rows = jnp.zeros((2, 64)), RowsOfStep(documents, deterministic)
    assert kernels._kernel(q, slots, 0, CAUSAL, rows) == expected
    is_cudnn = expected == "cudnn" and not kernels._is_ours(q, CAUSAL, rows)
    assert is_cudnn == (not deterministic)


def test_cudnn_has_no_stride_and_no_window_in_both_directions():
    def why(*, platform="gpu", **pattern) -> str:
        return choose(platform, "NVIDIA H200", "bfloat16", 64, 1024, Pattern(**pattern)).why

    assert why(causal=False) == "cuDNN flash attention, by documents"
    assert why(stride=4) == "plain XLA: cuDNN has no flash kernel for a stride of 4"
    both = "plain XLA: cuDNN has no flash kernel for a window in both directions"
    assert why(causal=False, window=8) == both
    assert why(platform="tpu", causal=False, window=8, stride=4).startswith("Pallas splash")


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("window", [None, 16, 100])
@pytest.mark.parametrize("both_ways", [False, True])
def test_the_name_of_a_kernel_in_a_program_says_its_pattern_and_its_cost(both_ways, window, stride):
    pattern = Pattern(not both_ways, window, stride)
    assert Pattern.of(pattern.name) == pattern
    backward = pattern._replace(is_backward=True)
    assert Pattern.of(backward.name) == backward != pattern
    at, newest = np.arange(512)[:, None], np.arange(128 if stride == 4 else 512) * stride + stride
    back = at - newest + 1
    seen = (back >= 0) | both_ways
    if window is not None:
        seen &= abs(back) < window
    assert pattern.pairs(512, seen.shape[1]) == pytest.approx(seen.sum(), rel=0.06)


def test_other_functions_of_a_program_are_no_attention():
    assert Pattern.of("attention") is None
    assert Pattern.of("causal_attention_of_mine") is None
