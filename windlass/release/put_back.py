"""A trained language model put back into the checkpoint that it came from.

What was left alone there, such as a vision tower, is in the export as it was.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from windlass.config.start import Start
from windlass.errors import UserError
from windlass.evaluation.finished_run import FinishedRun
from windlass.hub import config as configs
from windlass.hub import multimodal
from windlass.hub.fused_experts import is_fused, joined
from windlass.hub.shards import WORDS, ShardTensor
from windlass.hub.weights import files, in_order
from windlass.starting import hugging_face


def put_back(source: FinishedRun, tensors: Iterable[ShardTensor]) -> list[ShardTensor]:
    """Tensors of a run's model under the names that they came with, and those beside them."""
    like = source.came_with(configs.FILE) or {}
    aside = multimodal.beside(like)
    if not aside:
        return list(tensors)
    own = [one._replace(name=multimodal.name_there(one.name, like)) for one in tensors]
    folder, prefixes = _folder(source), tuple(aside)
    if is_fused(name for name in _names(folder) if not name.startswith(prefixes)):
        own = joined(own)
    return sorted([*own, *_beside(folder, prefixes)], key=lambda one: in_order(one.name))


def _folder(source: FinishedRun) -> Path:
    fields = {key: source.start.get(key) for key in ("hub", "path", "revision")}
    start = Start(**{key: value for key, value in fields.items() if value is not None})
    try:
        return hugging_face.weights(start)
    except UserError as error:
        raise UserError(
            f"{source.folder} trained a part of a model, and the rest of it is where it came "
            f"from: {error}; put it back there to export the whole, or export with --as adapter "
            "where an adapter was trained"
        ) from None


def _names(folder: Path) -> Iterator[str]:
    from safetensors import safe_open

    for file in files(folder):
        with safe_open(file, framework="numpy") as opened:
            yield from opened.keys()


def _beside(folder: Path, prefixes: tuple[str, ...]) -> Iterator[ShardTensor]:
    """Tensors of a folder that are not read for training, each read when its turn comes."""
    from safetensors import safe_open

    for file in files(folder):
        with safe_open(file, framework="numpy") as opened:
            for name in (name for name in opened.keys() if name.startswith(prefixes)):
                part = opened.get_slice(name)
                dtype = _dtype(part.get_dtype(), name, file)
                shape, read = tuple(part.get_shape()), partial(_read, file, name)
                yield ShardTensor(name, shape, dtype, read, is_fixed=True)


def _dtype(word: str, name: str, file: Path) -> np.dtype:
    known = {theirs: ours for ours, theirs in WORDS.items()}
    if word not in known:
        raise UserError(f"{file} has {name} as {word}, which cannot be written again")
    return np.dtype(getattr(ml_dtypes, known[word], known[word]))


def _read(file: Path, name: str) -> np.ndarray:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as opened:
        return opened.get_tensor(name)
