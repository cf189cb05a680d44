"""Attention by documents on a GPU computes what plain XLA does with a mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from windlass.layers import document_attention, kernels
from windlass.layers.pattern import CAUSAL

LENGTH, HEADS, KV_HEADS, DIM = 512, 4, 2, 32
ROWS = {
    "of many lengths": np.repeat([0, 1, 2, 3, 4], [1, 130, 256, 64, 61]),
    "one document": np.zeros(LENGTH, int),
    "padded": np.repeat([0, 1, -1], [40, 300, 172]),
    "short": np.repeat(np.arange(64), 8),
}


def example(rows: list[str]):
    random = np.random.default_rng(3)
    shapes = [(len(rows), LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    arrays = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]
    return arrays, jnp.asarray(np.stack([ROWS[name] for name in rows]), jnp.int32)


def found(attend, arrays, document):
    """Output and gradients where there are documents: padding is nobody's."""
    q, k, v, weight = arrays
    own = (document >= 0).astype(jnp.float32)[..., None, None]

    def value(q, k, v):
        return jnp.sum(weight * own * attend(q, k, v))

    return attend(q, k, v) * own, *jax.grad(value, (0, 1, 2))(q, k, v)


@pytest.mark.parametrize("rows", [["of many lengths", "one document"], ["padded", "short"]])
def test_attention_by_documents_is_that_with_a_mask(rows):
    arrays, document = example(rows)
    scale = 0.3

    def plain(q, k, v):
        return kernels.xla(q, k, v, document, document, 0, pattern=CAUSAL, scale=scale)

    def by_documents(q, k, v):
        return document_attention.attended(q, k, v, document, scale, interpret=True)

    expected, got = (found(attend, arrays, document) for attend in (plain, by_documents))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_bounds_are_those_of_documents_with_the_padding_behind_them():
    document = jnp.array([[0, 0, 1, -1, -1, -1], [3, 4, 4, 4, 5, 5]])
    begin, end = document_attention.bounds(document)
    assert begin.tolist() == [[0, 0, 2, 2, 2, 2], [0, 1, 1, 1, 4, 4]]
    assert end.tolist() == [[1, 1, 5, 5, 5, 5], [0, 3, 3, 3, 5, 5]]
