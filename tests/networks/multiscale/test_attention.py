"""Multiscale attention against its equations in torch, document by document."""

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests import tiny
from windlass.layers.context import Packed
from windlass.networks.multiscale.aggregation import Aggregation, Convex

LENGTHS = [[7, 4, 10], [21], [1, 2, 9]]  # of the documents of each row, with padding
SEQ = 23
NASH = Aggregation(kind="nash", temperature=0.2)
FORMS: list[dict[str, Any]] = [
    dict(aggregation=NASH, scales=4, stride=2, kernel=3),
    dict(aggregation=None, scales=3, stride=2, kernel=None, decomposition="max_pool"),
    dict(aggregation="convex", scales=2, stride=3, kernel=5, decomposition="average_pool"),
    dict(aggregation="adaptive", scales=3, stride=3, kernel=2),
    dict(aggregation="convex", scales=3, stride=2, kernel=4, decomposition="max_pool"),
    dict(aggregation=NASH, scales=2, stride=4, kernel=1),
]


def layer(scales: int = 4, *, aggregation: Any = NASH, **form):
    """The attention of the first layer of a model, with weights and biases of all sizes."""
    if aggregation in ("nash", "convex", "adaptive"):
        aggregation = Aggregation(kind=aggregation)
    config = dataclasses.replace(
        tiny.config("multiscale"),
        layers=1,
        bias=True,
        scales=scales,
        aggregation=aggregation,
        **form,
    )
    block = tiny.made(config).blocks.kinds[0]
    return jax.tree.map(lambda x: x[0], block.attention), config


def frame() -> dict[str, jax.Array]:
    texts = [tiny.documents(9, [length + 1 for length in row]) for row in LENGTHS]
    return tiny.packed(texts, SEQ)


def inputs(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(3, SEQ, 32)).astype(np.float32)


# The same in torch, of one document alone.


def linear(x, one):
    weight, bias = one
    return torch.tensordot(x, weight, dims=1) + bias


def rotated(x, position, theta):
    """Rotary positions of interleaved pairs, [seq, heads, size]."""
    size = x.shape[-1]
    frequency = theta ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
    angle = position.to(x.dtype)[:, None, None] * frequency
    left, right = x[..., ::2], x[..., 1::2]
    turned = (
        left * angle.cos() - right * angle.sin(),
        right * angle.cos() + left * angle.sin(),
    )
    return torch.stack(turned, dim=-1).reshape(x.shape)


def downsampled(x, config, scale, arrays):
    """Cell j from inputs r (j + 1) - kernel .. r (j + 1) - 1, those before the first left out."""
    kernel, r = config.kernel, config.stride
    if kernel is None:
        kernel = r + (config.decomposition == "convolution")
    cells = []
    for j in range(len(x) // r):
        newest = r * (j + 1) - 1
        window = x[max(0, newest - kernel + 1) : newest + 1]
        if config.decomposition == "average_pool":
            cells.append(window.mean(dim=0))
        elif config.decomposition == "max_pool":
            cells.append(window.max(dim=0).values)
        else:
            weight, bias = arrays[f"scales.{scale}.downsampling.map"]
            weight = weight.reshape(kernel, -1, *weight.shape[1:])[kernel - len(window) :]
            y = torch.einsum("ki,kiho->ho", window.reshape(len(window), -1), weight) + bias
            cells.append(y.reshape(x.shape[1:]))
    return torch.stack(cells) if cells else x[:0]


def weights_of(mixed, x, config, arrays):
    """Weights of the scales that are there, each with what attention gave, at one position."""
    about, whole = config.aggregation, torch.stack(mixed)
    if about is None:
        return torch.full((len(mixed),), 1 / len(mixed), dtype=x.dtype)
    if about.kind == "convex":
        return torch.softmax(arrays["aggregation.logits"][: len(mixed)], 0)
    if about.kind == "adaptive":
        return torch.softmax(linear(x, arrays["aggregation.gate"])[: len(mixed)], 0)
    weights = torch.full((len(mixed),), 1 / len(mixed), dtype=x.dtype)
    for _ in range(about.iterations or 3):
        consensus = torch.tensordot(weights, whole.detach(), dims=1)
        errors = ((whole.detach() - consensus) ** 2).mean(dim=(1, 2)).sqrt()
        weights = torch.softmax(-errors / (about.temperature or 1.0), 0)
    return weights


def attended(x, config, arrays):
    """The layer's output for one document."""
    position, hidden, value = torch.arange(len(x)), x, linear(x, arrays["value"])
    keys, queries, values = [], [], []
    for scale in range(config.scales):
        stride = config.stride**scale
        if scale:
            hidden, value = (downsampled(one, config, scale, arrays) for one in (hidden, value))
        newest = stride * torch.arange(len(hidden)) + stride - 1
        key = linear(hidden, arrays[f"scales.{scale}.key"])
        query = linear(x, arrays[f"scales.{scale}.query"])
        queries.append(rotated(query, position, config.theta))
        keys.append(rotated(key, newest, config.theta))
        values.append(value)
    found = []
    for t in range(len(x)):
        mixed = []
        for scale in range(config.scales):
            count = (t + 1) // config.stride**scale  # cells whose newest input is not later
            if not count:
                continue
            q, k = queries[scale][t], keys[scale][:count]
            scores = torch.einsum("hd,khd->hk", q, k) / math.sqrt(q.shape[-1])
            mixed.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[scale][:count]))
        weights = weights_of(mixed, x[t], config, arrays)
        both = torch.tensordot(weights, torch.stack(mixed), dims=1)
        weight, bias = arrays["output"]
        found.append(torch.tensordot(both, weight, dims=2) + bias)
    return torch.stack(found)


def tensors(one) -> dict:
    """Arrays of a layer as torch leaves, those of a linear map together."""
    found = {}

    def walk(node, path):
        if isinstance(node, Convex):
            found[f"{path}.logits"] = leaf(node.logits)
        elif hasattr(node, "weight"):
            found[path] = (leaf(node.weight), leaf(node.bias))
        elif isinstance(node, tuple):
            for number, child in enumerate(node):
                walk(child, f"{path}.{number}")
        elif isinstance(node, eqx.Module):
            for field in dataclasses.fields(node):
                walk(getattr(node, field.name), f"{path}.{field.name}".lstrip("."))

    def leaf(x):
        return torch.tensor(np.asarray(x, np.float64), requires_grad=True)

    walk(one, "")
    return found


def documents() -> list[tuple[int, slice]]:
    found = []
    for row, lengths in enumerate(LENGTHS):
        ends = np.cumsum(lengths)
        found += [(row, slice(end - n, end)) for end, n in zip(ends, lengths, strict=True)]
    return found


QUICK = [FORMS[0], *(pytest.param(one, marks=pytest.mark.long) for one in FORMS[1:])]


@pytest.mark.parametrize("form", QUICK)
def test_a_layer_and_its_gradient_are_their_equations_in_torch(form):
    one, config = layer(**form)
    batch, x, slopes = frame(), inputs(), inputs(1)
    is_real = np.asarray(batch["document"] >= 0)[..., None]

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def total(both):
        one, x = both
        y = one(x, Packed(batch))
        return jnp.sum(jnp.where(is_real, slopes * y, 0)), y

    (_, found), (gradient, to_x) = total((one, jnp.asarray(x)))
    arrays = tensors(one)
    there = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    value = torch.zeros((), dtype=torch.float64)
    for row, span in documents():
        y = attended(there[row, span], config, arrays)
        np.testing.assert_allclose(found[row, span], y.detach(), atol=1e-5)
        value = value + (torch.tensor(slopes[row, span]) * y).sum()
    value.backward()
    close: dict[str, Any] = dict(atol=2e-5, rtol=1e-4)
    assert there.grad is not None
    np.testing.assert_allclose(np.where(is_real, to_x, 0), there.grad, **close)
    ours = tensors(gradient)
    for name, both in arrays.items():
        for theirs, mine in zip(each(both), each(ours[name]), strict=True):
            grad = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            np.testing.assert_allclose(mine.detach(), grad, err_msg=name, **close)


def each(both) -> tuple:
    return both if isinstance(both, tuple) else (both,)
