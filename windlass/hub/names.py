"""A model's arrays under the names, and in the layout, of a Hugging Face checkpoint.

A family's table has names only: which way round a matrix lies follows from the axes it names,
which layer an array belongs to from its place in the stack, and the order of a head's entries from
the pairing of its rotary positions, which is half-split in every checkpoint elsewhere.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import numpy as np

from windlass.config.reading import report
from windlass.errors import UserError
from windlass.layers.attention import Attention
from windlass.layers.linear import Linear
from windlass.layers.rotary import halves, interleaved
from windlass.layers.stack import Stack

Model = TypeVar("Model")

TURNED = ("query", "key", "query_norm", "key_norm")  # parts of attention that rotary pairs order


def to_tensors(model: Any, names: Mapping[str, str] | None) -> dict[str, np.ndarray]:
    """Every array of a model, or of a tree like it (its gradient), by its name elsewhere.

    Without a table of names each has its own path, with the number of its layer.
    """
    tensors = {}
    for array in _arrays(model, names):
        value = np.asarray(array.value)
        for index, name in array.tensors():
            # In one piece: safetensors writes memory as it lies.
            tensors[name] = np.ascontiguousarray(array.outward(value[index]))
    return tensors


def from_tensors(
    model: Model, names: Mapping[str, str] | None, tensors: Mapping[str, np.ndarray]
) -> Model:
    """The model with values from `tensors`, each of the type and placement of the array it fills.

    The model may be abstract, so that no first set of weights is ever made.
    """
    leaves, problems, used = [], {}, set()
    for array in _arrays(model, names):
        value = np.empty(array.value.shape, array.value.dtype)
        for index, name in array.tensors():
            used.add(name)
            tensor, shape = tensors.get(name), array.outward(value[index]).shape
            if tensor is None:
                problems[name] = "is missing"
            elif tensor.shape != shape:
                problems[name] = f"is {list(tensor.shape)}; this model's is {list(shape)}"
            else:
                value[index] = array.inward(tensor, value[index].shape)
        leaves.append(jax.device_put(value, array.value.sharding))
    problems |= {name: "is nothing of this model's" for name in tensors if name not in used}
    if problems:
        raise UserError(report(list(problems.items()), "the tensors"))
    arrays, rest = eqx.partition(model, _is_array)
    return eqx.combine(jax.tree.structure(arrays).unflatten(leaves), rest)


class _Array(NamedTuple):
    """An array of a model, and how it is written elsewhere."""

    name: str  # with `{layer}` where it is stacked
    value: Any
    flat: tuple[int, ...] | None  # of a linear map: what it reads, what it writes; else None
    paired: bool  # interleaved pairs along the last axis, which are half-split elsewhere
    layers: range | None  # along the first axis; None: it is not stacked

    def tensors(self) -> Iterator[tuple[Any, str]]:
        if self.layers is None:
            yield ..., self.name
        else:
            yield from ((i, self.name.format(layer=layer)) for i, layer in enumerate(self.layers))

    def outward(self, x: np.ndarray) -> np.ndarray:
        x = halves(x) if self.paired else x
        return x if self.flat is None else x.reshape(self.flat).T

    def inward(self, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        x = x if self.flat is None else x.T.reshape(shape)
        return interleaved(x) if self.paired else x


def _arrays(model: Any, names: Mapping[str, str] | None) -> Iterator[_Array]:
    for path, value in jax.tree_util.tree_leaves_with_path(eqx.filter(model, _is_array)):
        node, owner, layers, paired, words = model, None, None, False, []
        steps = iter(path)
        for step in steps:
            if isinstance(node, Stack):  # the step is to `kinds`, the next one to one of them
                kind = next(steps).idx
                layers = range(kind, node.layers, len(node.kinds))
                words.append("{layer}")
                node = node.kinds[kind]
            else:
                words.append(jax.tree_util.keystr((step,), simple=True))
                if isinstance(node, Attention) and words[-1] in TURNED:
                    paired = names is not None and node.rotary.pairing == "interleaved"
                owner, node = node, _child(node, step)
        shape = value.shape if layers is None else value.shape[1:]
        flat = _flat(owner, words[-1], shape)
        yield _Array(_name(words, names), value, flat, paired, layers)


def _name(path: list[str], names: Mapping[str, str] | None) -> str:
    if names is None:
        return ".".join(path)
    *owner, field = (word for word in path if word != "{layer}")
    whole, module = ".".join([*owner, field]), ".".join(owner)
    if whole in names:
        return names[whole]
    if module in names:
        return f"{names[module]}.{field}"
    raise ValueError(f"the family's table has no name for {whole}")


def _child(node: Any, step: Any) -> Any:
    if isinstance(step, jax.tree_util.GetAttrKey):
        return getattr(node, step.name)
    return node[step.key if isinstance(step, jax.tree_util.DictKey) else step.idx]


def _flat(owner: Any, field: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    if not isinstance(owner, Linear):
        return None
    reads = len(owner.reads) if field == "weight" else 0
    parts = (shape[:reads], shape[reads:]) if reads else (shape,)
    return tuple(math.prod(part) for part in parts)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)
