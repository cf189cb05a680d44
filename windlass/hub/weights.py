"""Weights in safetensors files: read straight into place on the mesh, and written in shards."""

import json
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np

from windlass.config.reading import report
from windlass.errors import UserError
from windlass.hub.names import EMBEDDING, HEAD, arrays, placed
from windlass.hub.shards import FLOATS, INDEX, SINGLE, WORDS, Tensor, divided, index

TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SHARD_BYTES = 5_000_000_000
ROWS = 4096  # of two heads that are compared, at a time
# What old checkpoints hold beside weights: numbers that follow from config.json.
DERIVED = ".rotary_emb.inv_freq"


def load(folder: Path, model: Any, names: Mapping[str, str]) -> dict[str, jax.Array]:
    """Every array of an abstract model, by its path in it, from the files of a folder.

    Each is made where it lives: a device reads its own part of each tensor, one layer after the
    other. What is missing, too much or of another shape is named in one error.
    """
    with _opened(folder) as held:
        origin = f"the weights in {folder}"
        wanted = {
            name: np.dtype(array.value.dtype).name
            for array in arrays(model, names)
            for name in array.names()
        }
        odd = [
            (name, f"is of {one.type}; {_of(wanted.get(name))} here")
            for name, one in held.items()
            if not name.endswith(DERIVED) and not _is_read_as(one.type, wanted.get(name))
        ]
        if odd:
            raise UserError(report(odd, origin))
        kept = {
            name: one
            for name, one in held.items()
            if not name.endswith(DERIVED) and not _is_tied(name, wanted, names)
        }
        for name in held.keys() - kept.keys():
            if not name.endswith(DERIVED):
                _check_tied(name, names[EMBEDDING], held, origin)
        return placed(model, names, kept, origin)


def files(folder: Path) -> list[Path]:
    """The files that hold the weights of a folder."""
    if (folder / INDEX).is_file():
        try:
            mapped = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{folder / INDEX} is not the index of safetensors files") from None
        # Of this folder, whatever an index says.
        found = [folder / Path(name).name for name in dict.fromkeys(mapped.values())]
        if gone := [path.name for path in found if not path.is_file()]:
            raise UserError(f"{folder / INDEX} names files that are not there: {', '.join(gone)}")
        return found
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


class Stored:
    """A tensor of a file, read a part at a time."""

    def __init__(self, part: Any):
        self._part = part
        self.type = str(part.get_dtype())

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._part.get_shape())

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._part[index]


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Stored]]:
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        found = {}
        for file in files(folder):
            try:
                opened = stack.enter_context(safe_open(file, framework="numpy"))
            except SafetensorError as error:
                raise UserError(f"{file} is not a whole safetensors file: {error}") from None
            found |= {name: Stored(opened.get_slice(name)) for name in opened.keys()}
        yield found


def _is_read_as(stored: str, dtype: str | None) -> bool:
    """Any floating-point numbers are read as others; integers are what they are."""
    return stored in TYPES if dtype is None or dtype in FLOATS else WORDS[dtype] == stored


def _of(dtype: str | None) -> str:
    if dtype is None or dtype in FLOATS:
        return f"weights are of {', '.join(TYPES)}"
    return f"it is of {WORDS[dtype]}"


def _is_tied(name: str, wanted: Container[str], names: Mapping[str, str]) -> bool:
    return name == names.get(HEAD) and name not in wanted


def _check_tied(head: str, embedding: str, held: Mapping[str, Stored], origin: str) -> None:
    """A head that shares the embedding's weight may be stored, if it is the same."""
    one, other = held[head], held.get(embedding)
    if other is None:
        return
    bounds = [*range(0, one.shape[0], ROWS), one.shape[0]]  # a file has no part beyond its end
    if one.shape == other.shape and all(
        np.array_equal(one[first:last], other[first:last]) for first, last in pairwise(bounds)
    ):
        return
    what = f"differs from {embedding}, and tie_word_embeddings says that they are one"
    raise UserError(report([(head, f"{what}; model.tied=false takes both as they are")], origin))


def tensors(model: Any, names: Mapping[str, str]) -> list[Tensor]:
    """A model's arrays as tensors to be written, in the order of its layers."""
    found = [
        Tensor(name, array.shape, np.dtype(array.value.dtype), bring, array.is_fixed)
        for array in arrays(model, names)
        for name, bring in array.out()
    ]
    return sorted(found, key=lambda one: in_order(one.name))


def write(
    folder: Path,
    model: Any,
    names: Mapping[str, str],
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write a model as safetensors files that transformers, peft and vLLM read; gives their paths.

    One tensor at a time comes to the host. `dtype` is what floating-point numbers are written in,
    where it is not their own. Several files have an index.
    """
    found = tensors(model, names)
    shards = divided([one.typed(dtype) for one in found] if dtype else found, shard_bytes)
    for shard in shards:
        shard.write(folder)
    written = [folder / shard.file for shard in shards]
    if len(shards) > 1:
        (folder / INDEX).write_text(index(shards), encoding="utf-8")
        written.append(folder / INDEX)
    return written


def in_order(name: str) -> list:
    """Layers by number, as people count."""
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in name.split(".")]
