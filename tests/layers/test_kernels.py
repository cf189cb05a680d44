"""Every kernel computes what plain XLA does, and each device gets the one it has."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from windlass.columns import DocumentsPerRow
from windlass.layers import kernels
from windlass.layers.kernels import choose
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


def calls(*places: tuple[int, int], rounds: int = 1) -> kernels.Calls:
    return kernels.Calls(tuple(kernels.DocumentPlaces(*each) for each in places), rounds, 0.25)


def test_segments_are_documents_of_all_rows_with_the_padding_behind_them():
    document = jnp.array([[0, 0, 0, 1, 1, -1], [0] * 6, [0, 1, 2, 3, 3, 3], [-1] * 6])
    begin, size, number = kernels.segmented(document, calls((12, 6)))
    assert begin.tolist() == [0, 3, 6, 12, 13, 14, 15, 18, 24, 24, 24, 24]
    assert size.tolist() == [3, 3, 6, 1, 1, 1, 3, 6, 0, 0, 0, 0]
    assert number.tolist() == [[0, 0, 0, 1, 1, 1], [2] * 6, [3, 4, 5, 6, 6, 6], [7] * 6]


def test_segments_of_the_longest_documents_come_first_each_call_in_the_order_of_rows():
    document = jnp.array([[0, 0, 0, 1, 1, -1], [0] * 6, [0, 1, 2, 3, 3, 3], [-1] * 6])
    begin, size, number = kernels.segmented(document, calls((3, 6), (8, 3)))
    assert begin.tolist() == [0, 6, 18, 3, 12, 13, 14, 15, 24, 24, 24]
    assert size.tolist() == [3, 6, 6, 3, 1, 1, 1, 3, 0, 0, 0]
    assert number.tolist() == [[0, 0, 0, 3, 3, 3], [1] * 6, [4, 5, 6, 7, 7, 7], [2] * 6]


@pytest.mark.parametrize(
    ("documents", "rows", "length", "expected"),
    [
        # All that there can be, of rows too short for shorter places.
        (DocumentsPerRow(2, 1.9), 16, 256, [(32, 256), 1]),
        # No more than a batch of the run has, in one call and in two.
        (DocumentsPerRow(52, 5.5, (16, 94)), 16, 2048, [(96, 2048), 1]),
        (DocumentsPerRow(52, 5.5, (16, 157)), 16, 2048, [(32, 2048), (128, 1024), 1]),
        (DocumentsPerRow(52, 5.5, (16, 230)), 16, 2048, [(64, 2048), (192, 512), 1]),
        # Known of other rows: as many as are likely, and again.
        (DocumentsPerRow(52, 5.5, (8, 47)), 16, 2048, [(32, 2048), (96, 1024), 9]),
        (DocumentsPerRow(9, 1.0), 64, 2048, [(128, 2048), 5]),  # at least two of a row
        (DocumentsPerRow(90, 40.0, (16, 900)), 16, 2048, None),  # a mask is faster
    ],
)
def test_calls_have_places_for_the_documents_of_most_batches(documents, rows, length, expected):
    found = kernels.Calls.of(documents, rows, length, 1.0)
    assert (found and [*found.places, found.rounds]) == expected
    if found:
        assert found.documents >= documents.at_most(rows)
        assert all(places.count % (rows * length // places.span) == 0 for places in found.places)


def test_no_document_is_longer_than_its_place_whatever_the_data():
    random, rows, length = np.random.default_rng(0), 4, 64
    for _ in range(50):
        cuts = [np.sort(random.choice(length, random.integers(1, 30))) for _ in range(rows)]
        document = np.stack([np.searchsorted(cut, np.arange(length), "right") for cut in cuts])
        document = jnp.asarray(np.where(random.random((rows, 1)) < 0.2, 0, document))
        for span in (8, 16, 32):
            each = rows * length // span
            made = calls((each, length), (4 * each, span), rounds=8)
            begin, size, number = kernels.segmented(document, made)
            assert int(size[each:].max()) <= span
            at = np.arange(rows * length).reshape(rows, length)
            assert (begin[number] <= at).all() and (at < (begin + size)[number]).all()
            assert int(size.sum()) == rows * length


@pytest.mark.parametrize(
    "made",
    [
        calls((4, 8), rounds=6),
        calls((6, 8), rounds=4),
        calls((8, 8), rounds=3),
        calls((24, 8)),
        calls((6, 8), (12, 4)),
        calls((6, 8), (2, 4), rounds=9),
        calls((2, 8), (4, 8), (3, 8), rounds=6),
    ],
)
def test_attention_by_lengths_takes_as_many_calls_as_a_batch_has_documents(monkeypatch, made):
    """Calls of stand-ins for cuDNN's kernels, which as these leave out what is of other calls."""

    def mixed(q, k, v, held, scale):
        at = jnp.arange(q.shape[0] * q.shape[1]).reshape(q.shape[:2])[..., None]
        is_in = (at >= held.begin) & (at < held.begin + jnp.minimum(held.size, held.span))
        is_own = jnp.any(is_in, axis=-1)
        document = jnp.where(is_own, jnp.argmax(is_in, axis=-1), -1)
        out = kernels.xla(q, k, v, document, document, 0, pattern=CAUSAL, scale=scale)
        return jnp.where(is_own[..., None, None], out, 0), is_own[..., None, None]

    def flash(q, k, v, held, scale):
        out, is_own = mixed(q, k, v, held, scale)
        return jnp.where(is_own, out, jnp.nan), held.begin

    def flash_gradient(q, k, v, held, scale, *, mixed: jax.Array, sums: jax.Array, d: jax.Array):
        _, back, is_own = jax.vjp(
            lambda q, k, v: stand_in(q, k, v, held, scale), q, k, v, has_aux=True
        )
        bad = jnp.where((sums == held.begin).all() & jnp.isfinite(mixed).all(), 0, jnp.nan)
        return tuple(jnp.where(is_own, one + bad, jnp.nan) for one in back(d))

    stand_in = mixed
    monkeypatch.setattr(kernels, "flash", flash)
    monkeypatch.setattr(kernels, "flash_gradient", flash_gradient)
    # Nine documents, of a batch in which a row could have eight; three rows have padding.
    document = jnp.array([[0, 0, 1, 2, 2, 3, -1, -1], [0] * 8, [0, 0, 0, 1, 1, 2, 3, -1]])
    q, k, v, d = (
        jax.random.normal(jax.random.key(i), (3, 8, heads, 16))
        for i, heads in enumerate((4, 2, 2, 4))
    )
    counts = (document >= 0)[..., None, None]
    d = jnp.where(counts, d, 0)  # padding has no gradient

    def by_lengths(q, k, v) -> Any:
        return kernels._by_lengths(made, q, k, v, document)

    found, back = jax.vjp(by_lengths, q, k, v)
    masked = functools.partial(kernels.xla, pattern=CAUSAL, scale=0.25)
    expected, expected_back = jax.vjp(
        lambda q, k, v: masked(q, k, v, document, document, 0), q, k, v
    )
    assert jnp.isfinite(found).all()
    own, masked_own = (jnp.where(counts, x, 0) for x in (found, expected))
    np.testing.assert_allclose(own, masked_own, atol=1e-6)
    for one, other in zip(back(d), expected_back(d), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
