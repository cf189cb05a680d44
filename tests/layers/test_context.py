"""What a context gives is what each document alone has, in training and in generation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from windlass.layers import recurrence
from windlass.layers.context import Packed
from windlass.layers.kv_cache import DecodeContext, KVCache

LENGTHS = [[14, 3, 6], [23, 2], [1, 1, 17], [5, 9, 5]]  # of the documents of each row, with padding
SEQ = 27
PROMPTS = [5, 8, 3, 8]  # lengths
SIZE = (4, 8)  # of an input


@functools.cache
def packed() -> tuple[dict[str, jax.Array], jax.Array]:
    texts = [tiny.documents(9, [length + 1 for length in row]) for row in LENGTHS]
    x = np.random.default_rng(0).normal(size=(4, SEQ, *SIZE)).astype(np.float32)
    return tiny.packed(texts, SEQ), jnp.asarray(x)


def alone(function, x: np.ndarray) -> np.ndarray:
    """A function of single documents, of all documents of the packed rows; padding is left 0."""
    found = np.zeros((4, SEQ, *np.shape(function(x[0, :1]))[1:]))
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            found[row, at : at + length] = function(x[row, at : at + length])
            at += length
    return found


def is_real() -> np.ndarray:
    return np.asarray(packed()[0]["document"]) >= 0


# What is to be computed of a document, by numpy, and how a block does it by its context.


def delays(x):
    return np.stack([[x[t - i] if t >= i else 0 * x[0] for i in (2, 1, 0)] for t in range(len(x))])


def diagonal(x):
    state, found = np.zeros(SIZE), []
    for now in x:
        state = 1 / (1 + np.exp(-now)) * state + now
        found.append(state)
    return np.stack(found)


def multiscale(x):
    """Attention to cells of two cells of two inputs, from the newest of them on, by what it is.

    A cell is the sum of its two inputs and of the one before them.
    """

    def coarser(x):
        return [x[max(0, 2 * j - 1) : 2 * j + 2].sum(axis=0) for j in range(len(x) // 2)]

    found = []
    for t in range(len(x)):
        pairs = coarser(x[: t + 1])
        cells = coarser(np.stack(pairs)) if pairs else []
        mixed = np.zeros(SIZE)
        for head in range(SIZE[0]) if cells else ():
            keys = np.stack(cells)[:, head]
            scores = keys @ x[t, head] / np.sqrt(SIZE[1])
            shares = np.exp(scores - scores.max())
            mixed[head] = shares / shares.sum() @ keys
        found.append(mixed)
    return np.stack(found)


def by_delays(context, x):
    return context.before(x, 3)


def by_scan(context, x):
    return context.scan(recurrence.linear, (jax.nn.sigmoid(x), x))[1]


def by_cells(context, x):
    cells, here = x, context
    for _ in range(2):
        cells = sum(here.cells(one, 2) for one in here.last(cells, 3))
        here = here.coarser(2)
    return context.attend(x, cells, cells, stride=4)


FORMS = [(delays, by_delays), (diagonal, by_scan), (multiscale, by_cells)]


@pytest.mark.parametrize(("expected", "block"), FORMS)
def test_documents_of_a_packed_row_are_as_if_each_was_alone(expected, block):
    batch, x = packed()
    found = np.asarray(jax.jit(lambda x: block(Packed(batch), x))(x))
    np.testing.assert_allclose(
        found[is_real()], alone(expected, np.asarray(x))[is_real()], atol=1e-5
    )


@pytest.mark.long
@pytest.mark.parametrize(("expected", "block"), FORMS)
def test_on_a_mesh_and_rematerialised_there_are_the_same_gradients(expected, block):
    batch, x = packed()
    weights = np.random.default_rng(1).normal(size=block(Packed(batch), x).shape)
    weights = jnp.asarray(weights * is_real().reshape(4, SEQ, *[1] * (weights.ndim - 2)), x.dtype)

    def gradient(batch, x, weights):
        total = jax.checkpoint(lambda x: jnp.sum(weights * block(Packed(batch), x)))
        return jax.jit(jax.grad(total))(x)

    whole = gradient(batch, x, weights)
    with tiny.on((2, 2, 2)) as mesh:
        split = jax.NamedSharding(mesh, jax.P(("data", "fsdp"), None, "tensor"))
        rows = jax.device_put((batch, weights), jax.NamedSharding(mesh, jax.P(("data", "fsdp"))))
        found = gradient(rows[0], jax.device_put(x, split), rows[1])
        assert found.sharding.is_equivalent_to(split, found.ndim)
    np.testing.assert_allclose(found, whole, atol=1e-5)


Turn = tuple[dict[str, np.ndarray], np.ndarray]  # the columns of a call, and its inputs


def turns(x: np.ndarray, chunks: list[int]) -> list[Turn]:
    """Prompts of several lengths, padded on the left; then so many inputs more in each call."""
    frame = max(PROMPTS)
    position, document = np.zeros((2, 4, frame), np.int32)
    first = np.zeros((4, frame, *SIZE), np.float32)
    for row, length in enumerate(PROMPTS):
        first[row, frame - length :] = x[row, :length]
        first[row, : frame - length] = 99  # padding that is seen is seen
        position[row, frame - length :] = np.arange(length)
        document[row, : frame - length] = -1
    found: list[Turn] = [({"position": position, "document": document}, first)]
    at = np.array(PROMPTS)[:, None]
    for chunk in chunks:
        here = at + np.arange(chunk)
        columns = {"position": here.astype(np.int32), "document": np.zeros_like(here, np.int32)}
        found.append((columns, x[np.arange(4)[:, None], here]))
        at = at + chunk
    return found


def generated(block, calls, place=lambda tree: tree) -> list[np.ndarray]:
    @jax.jit
    def step(batch, x, cache):
        context = DecodeContext(batch, cache)
        layer = context.layer(cache.layers)
        y = block(layer, x)
        return y, context.finish(layer.leave())

    rows, capacity = len(calls[0][1]), sum(x.shape[1] for _, x in calls)
    cache, found = KVCache.empty(rows, capacity), []
    for batch, x in calls:
        y, cache = step(*place((batch, x)), cache)
        found.append(np.asarray(y))
    whole = np.concatenate(found, axis=1)
    return [row[max(PROMPTS) - length :] for row, length in zip(whole, PROMPTS, strict=False)]


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 2, 2]])
@pytest.mark.parametrize(("expected", "block"), FORMS)
def test_prefill_and_decode_are_a_whole_pass(expected, block, chunks):
    x = np.random.default_rng(0).normal(size=(4, SEQ, *SIZE)).astype(np.float32)
    found = generated(block, turns(x, chunks))
    for row, length in enumerate(PROMPTS):
        np.testing.assert_allclose(found[row], expected(x[row, : length + 9]), atol=1e-5)


@pytest.mark.parametrize(("sizes", "rows"), [((2, 2, 2), 4), ((1, 1, 1), 1), ((1, 1, 2), 1)])
@pytest.mark.parametrize(("expected", "block"), FORMS)
def test_prefill_and_decode_on_a_mesh_are_a_whole_pass_without(expected, block, sizes, rows):
    x = np.random.default_rng(0).normal(size=(4, SEQ, *SIZE)).astype(np.float32)
    calls = [jax.tree.map(lambda column: column[:rows], call) for call in turns(x, [1] * 9)]
    with tiny.on(sizes) as mesh:

        def place(call):
            batch, x = call
            split = jax.NamedSharding(mesh, jax.P(("data", "fsdp"), None, "tensor"))
            columns = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
            return jax.device_put(batch, columns), jax.device_put(x, split)

        found = generated(block, calls, place)
    for row, length in enumerate(PROMPTS[:rows]):
        np.testing.assert_allclose(found[row], expected(x[row, : length + 9]), atol=1e-5)


@pytest.mark.parametrize(("expected", "block"), FORMS)
def test_a_later_call_of_padding_leaves_the_state_alone(expected, block):
    x = np.random.default_rng(0).normal(size=(4, SEQ, *SIZE)).astype(np.float32)
    calls = turns(x, [1] * 4)
    idle = {name: np.full((4, 2), blank, np.int32) for name, blank in PADDING.items()}
    calls.insert(3, (idle, np.full((4, 2, *SIZE), 99, np.float32)))
    found = generated(block, calls)
    for row, length in enumerate(PROMPTS):
        own = np.delete(found[row], [length + 2, length + 3], axis=0)
        np.testing.assert_allclose(own, expected(x[row, : length + 4]), atol=1e-5)


PADDING = {"position": 0, "document": -1}
