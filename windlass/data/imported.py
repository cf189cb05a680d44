"""Import of teacher caches that other programs wrote, from .npz and safetensors files.

A file has rows of tokens with what a teacher gave the next one: `input_ids` [N, L],
`topk_idx` and `topk_logits` [N, L-1, K]; it may have `attention_mask` [N, L], and `rand_idx` and
`rand_logits` [N, L-1, R]. Position i predicts `input_ids[:, i + 1]`, so that a row has L-1 of them.
"""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from windlass import files, teacher_cache
from windlass.columns import sized
from windlass.config import listing
from windlass.data.pack import COLUMNS
from windlass.errors import UserError
from windlass.teacher_cache import IDS, LOG_Z, LOGITS, TeacherCache
from windlass.version import __version__

SUFFIXES = (".npz", ".safetensors")
PICKLED = (".pt", ".pth", ".bin", ".pkl")
REQUIRED = ("input_ids", "topk_idx", "topk_logits")
OPTIONAL = ("attention_mask", "rand_idx", "rand_logits")


class _File(NamedTuple):
    """A file of a foreign cache: its rows, and what all files must have in common."""

    path: Path
    rows: int
    sizes: tuple[int, int, int]  # length, top k, negatives
    vocab: int  # one above the largest id
    hash: str

    @property
    def described(self) -> str:
        length, top_k, negatives = self.sizes
        return f"of {length} tokens with {top_k} candidates and {negatives} negatives"


def write(folder: Path, out: Path) -> TeacherCache:
    """Import the files of a folder into a cache; what an earlier call wrote stays."""
    found = [_looked_at(path) for path in _paths(folder)]
    for one in found:
        if one.sizes != found[0].sizes:
            raise UserError(
                f"{one.path} has rows {one.described}, and {found[0].path} {found[0].described}; "
                "all files of a cache have the same"
            )
    cache = TeacherCache(out, _about(found))
    there = teacher_cache.find(out)
    if there is not None and there.about["teacher"] != cache.about["teacher"]:
        raise UserError(
            f"--out is {out}, a cache of other files: {there.about['teacher']} there, "
            f"{cache.about['teacher']} here; name another folder"
        )
    read = lru_cache(1)(_columns)
    with files.writable(out):
        cache.begin()
        for shard in cache.missing:
            cache.write(shard, _rows(found, shard.first, shard.stop, read))
        cache.finish()
    return cache


def _about(found: list[_File]) -> dict[str, Any]:
    length, top_k, negatives = found[0].sizes
    settings = teacher_cache.USUAL | {"top_k": top_k, "negatives": negatives}
    columns = COLUMNS | teacher_cache.columns_of(top_k, negatives, teacher_cache.USUAL["dtype"])
    content = hashlib.sha256("".join(one.hash for one in found).encode()).hexdigest()
    rows = sum(one.rows for one in found)
    return {
        "windlass": __version__,
        "format": teacher_cache.FORMAT,
        "teacher": f"of imported files with hash {content[:12]}",
        "vocab": max(one.vocab for one in found),
        **settings,
        "tokenizer": None,  # nothing says which
        "documents": None,
        "data.length": length,
        "rows": {"train-0": {"rows": rows, "fingerprint": content}},
        "columns": teacher_cache.written(sized(columns, length)),
    }


def _paths(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"--import is {folder}; there is no such folder")
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES]
    if not paths:
        pickled = [path.name for path in sorted(folder.iterdir()) if path.suffix in PICKLED]
        what = f"--import is {folder}; it takes {listing(SUFFIXES, 'and')} files, and has "
        if not pickled:
            raise UserError(f"{what}none")
        raise UserError(
            f"{what}{listing(pickled[:3], 'and')}. Pickled files are not read, since that can run "
            "any program: docs/distillation.md says how they are converted"
        )
    return paths


def _looked_at(path: Path) -> _File:
    """Check the arrays of a file, and count."""
    arrays = _arrays(path)
    if missing := [name for name in REQUIRED if name not in arrays]:
        raise UserError(f"{path} has {listing(arrays, 'and')}; it lacks {listing(missing, 'and')}")
    tokens, ids = arrays["input_ids"], arrays["topk_idx"]
    random = arrays.get("rand_idx", np.zeros((*ids.shape[:2], 0), np.int32))
    rows, length = tokens.shape if tokens.ndim == 2 else (0, 0)
    expected = {
        "input_ids": (rows, length),
        "attention_mask": (rows, length),
        **{name: (rows, length - 1, ids.shape[-1]) for name in ("topk_idx", "topk_logits")},
        **{name: (rows, length - 1, random.shape[-1]) for name in ("rand_idx", "rand_logits")},
    }
    for name, values in arrays.items():
        if name in expected and (values.shape != expected[name] or not rows or length < 2):
            raise UserError(
                f"{path} has {name} of shape {list(values.shape)}, beside input_ids of "
                f"{list(tokens.shape)}; input_ids are [N, L], and candidates [N, L-1, K]"
            )
    lowest = min(int(x.min(initial=0)) for x in (tokens, ids, random))
    if lowest < 0:
        raise UserError(f"{path} has the id {lowest}; ids are 0 or more")
    highest = max(int(x.max(initial=0)) for x in (tokens, ids, random))
    sizes = (length - 1, ids.shape[-1], random.shape[-1])
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return _File(path, rows, sizes, highest + 1, digest)


def _rows(found: list[_File], first: int, stop: int, read: Any) -> dict[str, np.ndarray]:
    """Rows of all files, one behind the other."""
    parts, begin = [], 0
    for one in found:
        low, high = max(first - begin, 0), min(stop - begin, one.rows)
        if low < high:
            parts.append({name: x[low:high] for name, x in read(one.path).items()})
        begin += one.rows
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _columns(path: Path) -> dict[str, np.ndarray]:
    """The rows of a file in the columns of a cache."""
    arrays = _arrays(path)
    tokens = arrays["input_ids"].astype(np.int32)
    mask = arrays.get("attention_mask", np.ones_like(tokens)) != 0
    ids, logits = _candidates(arrays)
    is_read = mask[:, :-1]
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weight": (is_read & mask[:, 1:]).astype(np.float32),
        "position": np.where(is_read, np.cumsum(is_read, axis=1) - 1, 0).astype(np.int32),
        "document": np.where(is_read, 0, -1).astype(np.int32),
        IDS: ids,
        LOGITS: logits.astype(teacher_cache.USUAL["dtype"]),
        # All that is known of the partition function: as if no other token had any mass.
        LOG_Z: np.logaddexp.reduce(logits, axis=-1).astype(np.float32),
    }


def _candidates(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and logits, the highest first and negatives behind; one that is there before is none."""
    ids, logits = arrays["topk_idx"].astype(np.int32), arrays["topk_logits"].astype(np.float32)
    order = np.argsort(-logits, axis=-1, kind="stable")
    ids, logits = (np.take_along_axis(x, order, axis=-1) for x in (ids, logits))
    if "rand_idx" not in arrays:
        return ids, logits
    ids = np.concatenate([ids, arrays["rand_idx"].astype(np.int32)], axis=-1)
    logits = np.concatenate([logits, arrays["rand_logits"].astype(np.float32)], axis=-1)
    by_id = np.argsort(ids, axis=-1, kind="stable")
    ordered = np.take_along_axis(ids, by_id, axis=-1)
    is_again = np.zeros(ids.shape, bool)
    again = np.concatenate([np.zeros_like(ordered[..., :1]), np.diff(ordered) == 0], axis=-1)
    np.put_along_axis(is_again, by_id, again.astype(bool), axis=-1)
    return ids, np.where(is_again, -np.inf, logits)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file that are known; nothing in it is run."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
        else:
            arrays = load_file(path)
    except (OSError, ValueError, BadZipFile, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return {name: x for name, x in arrays.items() if name in (*REQUIRED, *OPTIONAL)}
