"""Weights in safetensors files: read straight into place on the mesh, and written in shards."""

from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np

from windlass.config.reading import report, show
from windlass.errors import UserError
from windlass.hub import fused, fused_experts, multimodal, mxfp4, packed, quantized
from windlass.hub.config import mapping
from windlass.hub.names import EMBEDDING, TABLES, Fill, arrays, placed
from windlass.hub.shards import FLOATS, INDEX, SINGLE, WORDS, ShardTensor
from windlass.models import HEAD
from windlass.residuals import SCORE

TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
ROWS = 4096  # of two heads that are compared, at a time
# What old checkpoints hold beside weights: numbers that follow from config.json.
DERIVED = ".rotary_emb.inv_freq"
LM_HEAD = "lm_head.weight"


def load(
    folder: Path, model: Any, names: Mapping[str, str], fill: Fill | None = None
) -> dict[str, jax.Array]:
    """Load every array of an abstract model, by its path in it, from the files of a folder.

    Each is made where it lives: a device reads its own part of each tensor, one layer after the
    other; `fill` may make others of it. What is missing, too much or of another shape is named in
    one error.
    """
    with _opened(folder) as every:
        opened = multimodal.of_language(every, folder)
        origin, described = f"the weights in {folder}", list(arrays(model, names))
        # A billion layers would be named one after the other before the first is missed.
        for what in ("layers", "experts"):
            most = max((len(getattr(array, what) or ()) for array in described), default=0)
            if most > len(opened) and not (what == "experts" and fused_experts.is_fused(opened)):
                raise UserError(
                    f"{origin} are {len(opened):,} tensors, too few for the {most:,} {what} that "
                    "config.json says the model has, each with its own"
                )
        stored = packed.unpacked(mxfp4.unpacked(opened, origin), described, origin)
        stored = fused_experts.separated(quantized.joined(stored, origin), described)
        expected = {
            name: np.dtype(array.value.dtype).name for array in described for name in array.names()
        }
        odd = [
            (name, f"is of {one.type}; {_of(expected.get(name))} here")
            for name, one in stored.items()
            if not name.endswith(DERIVED) and not _is_read_as(one.type, expected.get(name))
        ]
        if odd:
            raise UserError(report(odd, origin))
        matching = {
            name: one
            for name, one in stored.items()
            if not name.endswith(DERIVED) and not _is_tied(name, expected, names)
        }
        if names.get(HEAD) == SCORE:  # which takes the place of the other
            matching.pop(LM_HEAD, None)
        for array in described:
            if array.path in (*TABLES, HEAD) and array.name in matching:
                matching[array.name] = grown(matching[array.name], array.shape)
        for name in stored.keys() - matching.keys():
            if name == names.get(HEAD):
                _check_tied(name, names[EMBEDDING], stored, origin)
        return placed(model, names, matching, origin, fill)


def left_alone(folder: Path) -> str | None:
    """The tensors in a folder that are of no language model, in words; None: there are none."""
    with _opened(folder) as every:
        return multimodal.left_alone(every, folder)


def files(folder: Path) -> list[Path]:
    """Safetensors files of a folder."""
    if (folder / INDEX).is_file():
        shards = mapping(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(x, str) for x in shards.values()):
            raise UserError(
                f"{folder / INDEX} is not the index of safetensors files: its weight_map is "
                f"{show(shards)}, and must be a mapping of the name of each tensor to its file"
            )
        # Of this folder, whatever an index says.
        paths = [folder / Path(name).name for name in dict.fromkeys(shards.values())]
        if absent := [path.name for path in paths if not path.is_file()]:
            raise UserError(f"{folder / INDEX} names files that are not there: {', '.join(absent)}")
        return paths
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickled = [path.name for path in sorted(folder.glob("*")) if path.suffix in PICKLED]
    has = f"has its weights in {', '.join(pickled)}" if pickled else "has no weights"
    raise UserError(
        f"{folder} {has}; they are read from {SINGLE}, or from several such files with {INDEX}. "
        "Pickled files are not read, since that can run any program. In a place that may run it, "
        "AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER) of transformers writes "
        "the folder that model.path can name"
    )


class GrownTensor:
    """Tensor of a file with further rows, for tokens that a vocabulary has gained.

    They are the mean of all others: a new token is at first as likely as a token is on average.
    """

    def __init__(self, tensor: "TensorSlice", shape: tuple[int, ...]):
        self._tensor, self.shape, self.type = tensor, shape, tensor.type

    def __getitem__(self, index: Any) -> np.ndarray:
        rows, *others = index if isinstance(index, tuple) else (index,)
        first, last, _ = rows.indices(self.shape[0])
        held = self._tensor.shape[0]
        part = self._tensor[(slice(min(first, held), min(last, held)), *others)]
        count = (last - first) - part.shape[0]
        mean = self._mean[(slice(None), *others)].astype(part.dtype)
        return np.concatenate([part, np.repeat(mean, count, axis=0)]) if count else part

    @cached_property
    def _mean(self) -> np.ndarray:
        held, width = self._tensor.shape
        bounds = [*range(0, held, ROWS), held]
        total = np.zeros((1, width), np.float64)
        for first, last in pairwise(bounds):
            total += self._tensor[first:last].astype(np.float64).sum(axis=0, keepdims=True)
        return total / held


def grown(tensor: Any, shape: tuple[int, ...]) -> Any:
    """A tensor, with more rows where a model has more tokens; of another width it stays."""
    has = tuple(tensor.shape)
    is_grown = len(has) == len(shape) == 2 and has[1] == shape[1] and 0 < has[0] < shape[0]
    return GrownTensor(tensor, shape) if is_grown else tensor


class TensorSlice:
    """Tensor of a file, read a part at a time."""

    def __init__(self, part: Any):
        self._part = part
        self.type = str(part.get_dtype())

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._part.get_shape())

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._part[index]


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, TensorSlice]]:
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        stored = {}
        for file in files(folder):
            try:
                tensor_file = stack.enter_context(safe_open(file, framework="numpy"))
            except SafetensorError as error:
                raise UserError(f"{file} is not a whole safetensors file: {error}") from None
            for name in tensor_file.keys():
                if name in stored:
                    raise UserError(
                        f"{file} has the tensor {name}, which another file of {folder} has too; "
                        "which one is meant is not known, so none is read"
                    )
                stored[name] = TensorSlice(tensor_file.get_slice(name))
        yield stored


def _is_read_as(stored: str, dtype: str | None) -> bool:
    """Compatibility of dtypes: any floats are read as others; integers are what they are."""
    return stored in TYPES if dtype is None or dtype in FLOATS else WORDS[dtype] == stored


def _of(dtype: str | None) -> str:
    if dtype is None or dtype in FLOATS:
        return f"weights are of {', '.join(TYPES)}"
    return f"it is of {WORDS[dtype]}"


def _is_tied(name: str, expected: Container[str], names: Mapping[str, str]) -> bool:
    return name == names.get(HEAD) and name not in expected


def _check_tied(head: str, embedding: str, stored: Mapping[str, TensorSlice], origin: str) -> None:
    """Refuse a stored head that differs from the embedding whose weight it is to share."""
    one, other = stored[head], stored.get(embedding)
    if other is None:
        return
    bounds = [*range(0, one.shape[0], ROWS), one.shape[0]]  # a file has no part beyond its end
    if one.shape == other.shape and all(
        np.array_equal(one[first:last], other[first:last]) for first, last in pairwise(bounds)
    ):
        return
    what = f"differs from {embedding}, and tie_word_embeddings says that they are one"
    raise UserError(report([(head, f"{what}; model.tied=false takes both as they are")], origin))


def tensors(model: Any, names: Mapping[str, str]) -> list[ShardTensor]:
    """Tensors of a model to be written, in the order of its layers."""
    unordered = [
        ShardTensor(name, array.shape, np.dtype(array.value.dtype), bring, array.is_fixed)
        for array in arrays(model, names)
        for name, bring in array.out()
    ]
    return sorted(fused.joined(unordered), key=lambda one: in_order(one.name))


def in_order(name: str) -> list:
    """Sort key that orders layers by number."""
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in name.split(".")]
