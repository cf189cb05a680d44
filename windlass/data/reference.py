"""The column of what a run's first weights gave every target, in files of its own.

In a run it is `reference/SPLIT-PART.npy`, a line for each row, beside what says of which rows and
weights it is, and what the files hold.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from windlass.data import Prepared
from windlass.data.mix import Mixture
from windlass.data.pack import Rows
from windlass.errors import UserError

COLUMN = FOLDER = "reference"
ABOUT = "about.json"


def joined(prepared: Prepared, run: Path) -> Prepared:
    """The data of a run with the column, where it has one; its files need not be there yet."""
    if COLUMN not in prepared.data.columns:
        return prepared
    splits: dict[str, Rows | Mixture] = {}
    for split, rows in prepared.splits.items():
        parts = [part.with_beside({COLUMN: _file(run, name)}) for name, part in _of(split, rows)]
        splits[split] = Mixture(parts, rows.shares) if isinstance(rows, Mixture) else parts[0]
    return replace(prepared, splits=splits)


def files(prepared: Prepared, splits: Sequence[str] | None = None) -> dict[str, Rows]:
    """The rows of some splits, or of all, by the names of their files."""
    return {
        name: part
        for split, rows in prepared.splits.items()
        if splits is None or split in splits
        for name, part in _of(split, rows)
    }


def check(prepared: Prepared, run: Path, splits: Sequence[str] | None = None) -> None:
    """Refuses rows of which a run has no column, or a damaged one."""
    if COLUMN not in prepared.data.columns:
        return
    place, written = run / FOLDER, read(run)
    if written is None:
        raise UserError(
            f"{place} is gone, where the run has what its first weights gave every target; they "
            "have been trained since. Put it back from a copy, or start another run with run.dir"
        )
    for name, part in files(prepared, splits).items():
        if written["rows"].get(name, {}).get("rows") != part.fingerprint:
            raise UserError(
                f"{place} has what the run's first weights gave every target of its own rows, and "
                f"these {name.rpartition('-')[0]} rows are others. Take the change back, or start "
                "another run with run.dir"
            )
        if not is_whole(run, name, written):
            raise UserError(
                f"{_file(run, name)} is not as it was written; put it back from a copy, or start "
                "another run with run.dir"
            )


def is_whole(run: Path, name: str, written: dict[str, Any]) -> bool:
    """Whether a file is there, and as it was written."""
    file = _file(run, name)
    if name not in written["rows"] or not file.is_file():
        return False
    with file.open("rb") as held:
        content = hashlib.file_digest(held, "sha256").hexdigest()
    return content == written["rows"][name]["content"]


def write(file: Path, rows: int, length: int, batches: Iterator[np.ndarray]) -> str:
    """Writes a file from arrays of some rows each, and gives its hash."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (rows, length)}
    with file.open("w+b") as out:
        np.lib.format.write_array_header_1_0(out, header)
        for some in batches:
            out.write(some.astype("<f4").tobytes())
        out.seek(0)
        return hashlib.file_digest(out, "sha256").hexdigest()


def read(run: Path) -> dict[str, Any] | None:
    """What the files are of; None where there are none."""
    about = run / FOLDER / ABOUT
    return json.loads(about.read_bytes()) if about.is_file() else None


def _of(split: str, rows: Rows | Mixture) -> Iterator[tuple[str, Rows]]:
    parts = rows.parts if isinstance(rows, Mixture) else (rows,)
    for number, part in enumerate(parts):
        yield f"{split}-{number}", part


def _file(run: Path, name: str) -> Path:
    return run / FOLDER / f"{name}.npy"
