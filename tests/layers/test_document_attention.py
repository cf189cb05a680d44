"""Attention by documents on a GPU computes what plain XLA does with a mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from windlass.layers import document_attention, kernels
from windlass.layers.pattern import Pattern

LENGTH, HEADS, KV_HEADS = 192, 4, 2
ROWS = {
    "of many lengths": np.repeat([0, 1, 2, 3, 4], [1, 70, 64, 20, 37]),
    "one document": np.zeros(LENGTH, int),
    "padded": np.repeat([0, 1, -1], [10, 80, 102]),
    "short": np.repeat(np.arange(24), 8),
}


def example(rows: list[str], length: int, dim: int):
    random = np.random.default_rng(3)
    shapes = [(len(rows), length, heads, dim) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    arrays = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]
    return arrays, jnp.asarray(np.stack([ROWS[name][:length] for name in rows]), jnp.int32)


def found(attend, arrays, document):
    """Output and gradients where there are documents: padding is nobody's."""
    q, k, v, weight = arrays
    own = (document >= 0).astype(jnp.float32)[..., None, None]

    def value(q, k, v):
        return jnp.sum(weight * own * attend(q, k, v))

    return attend(q, k, v) * own, *jax.grad(value, (0, 1, 2))(q, k, v)


@pytest.mark.parametrize(
    ("rows", "length", "dim", "window"),
    [
        (["of many lengths", "one document"], LENGTH, 32, None),
        (["padded", "short"], LENGTH, 32, None),
        (["of many lengths", "one document"], LENGTH, 32, 50),
        # Rows that are no whole blocks, and heads between powers of 2.
        (["of many lengths", "padded"], 150, 24, None),
        (["of many lengths", "padded"], 40, 8, 7),
    ],
)
def test_attention_by_documents_is_that_with_a_mask(rows, length, dim, window):
    arrays, document = example(rows, length, dim)
    scale, pattern = 0.3, Pattern(window=window)

    def plain(q, k, v):
        return kernels.xla(q, k, v, document, document, 0, pattern=pattern, scale=scale)

    def by_documents(q, k, v):
        return document_attention.attend(
            q, k, v, document, scale=scale, window=window, saved_as=kernels.MIXED, interpret=True
        )

    expected, got = (found(attend, arrays, document) for attend in (plain, by_documents))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_a_query_sees_from_the_beginning_of_its_document_on_and_padding_that_before_it():
    document = jnp.array([[0, 0, 1, -1, -1, -1], [3, 4, 4, 4, 5, 5]])
    first, last = document_attention.seen(document)
    assert first.tolist() == [[0, 0, 2, 2, 2, 2], [0, 1, 1, 1, 4, 4]]
    assert last.tolist() == [[1, 1, 5, 5, 5, 5], [0, 3, 3, 3, 5, 5]]


def test_a_query_sees_no_more_than_its_window():
    first, last = document_attention.seen(jnp.array([[3, 4, 4, 4, 4, 5]]), 2)
    assert first.tolist() == [[0, 1, 1, 2, 3, 5]]
    assert last.tolist() == [[0, 2, 3, 4, 4, 5]]
