"""Reference log-probabilities: what a run's first weights gave every target, as a column.

In a run it is `reference/SPLIT-PART.npy`, a line for each row, beside what says of which rows and
weights it is, and what the files hold.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from windlass import seal
from windlass.columns import Column, StoredColumn
from windlass.data import Prepared, beside
from windlass.errors import UserError

COLUMN = FOLDER = "reference"
ABOUT = "about.json"


def is_made(prepared: Prepared) -> bool:
    """Test that a run makes the column itself: blocks may have one of that name already."""
    rows = prepared.splits.values()
    return not prepared.data.has_blocks and any(COLUMN in one.columns for one in rows)


def joined(prepared: Prepared, run: Path, columns: Collection[str]) -> Prepared:
    """The data of a run with the column, where a batch has it; its files need not be there yet."""
    if prepared.data.has_blocks or COLUMN not in columns:
        return prepared
    column = prepared.data.columns[COLUMN]
    return beside.joined(prepared, lambda name: {COLUMN: StoredColumn(column, _file(run, name))})


def check(prepared: Prepared, run: Path, splits: Sequence[str] | None = None) -> None:
    """Refuse rows of which a run has no column, or a damaged one."""
    if not is_made(prepared):
        return
    place, written = run / FOLDER, read(run)
    if written is None:
        raise UserError(
            f"{place} is gone, where the run has what its first weights gave every target; they "
            "have been trained since. Put it back from a copy, or start another run with run.dir"
        )
    for name, part in beside.parts(prepared, splits).items():
        if written["rows"].get(name, {}).get("rows") != part.fingerprint:
            raise UserError(
                f"{place} has what the run's first weights gave every target of its own rows, and "
                f"these {name.rpartition('-')[0]} rows are others. Take the change back, or start "
                "another run with run.dir"
            )
        if not is_whole(run, name, written["rows"]):
            raise UserError(
                f"{_file(run, name)} is not as it was written; put it back from a copy, or start "
                "another run with run.dir"
            )


def is_whole(run: Path, name: str, rows: dict[str, Any]) -> bool:
    """Test that a file is there, and as it was written."""
    file = _file(run, name)
    if name not in rows or not file.is_file():
        return False
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return digest == rows[name]["content"]


def write(file: Path, rows: int, column: Column, batches: Iterator[np.ndarray]) -> str:
    """Write a file from arrays of some rows each, and return its hash."""
    dtype = column.dtype.newbyteorder("<")
    header = {"descr": dtype.str, "fortran_order": False, "shape": column.shape(rows)}
    with file.open("w+b") as out:
        np.lib.format.write_array_header_1_0(out, header)
        for some in batches:
            out.write(some.astype(dtype).tobytes())
        out.seek(0)
        return hashlib.file_digest(out, "sha256").hexdigest()


def read(run: Path) -> dict[str, Any] | None:
    """The manifest of the files; None where there are none."""
    about = run / FOLDER / ABOUT
    try:
        return seal.opened(about)
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(
            f"{about} is not as it was written; put it back from a copy, or start another run with "
            "run.dir"
        ) from None


def damaged(run: Path) -> list[str]:
    """The files that are missing or not as they were written; of a run without any, none."""
    try:
        written = read(run)
    except UserError:
        return [f"{FOLDER}/{ABOUT}"]
    if written is None:  # the folder is there with all of its files, or not at all
        return [f"{FOLDER}/{ABOUT}"] if (run / FOLDER).exists() else []
    rows = written["rows"]
    return [f"{FOLDER}/{name}.npy" for name in rows if not is_whole(run, name, rows)]


def _file(run: Path, name: str) -> Path:
    return run / FOLDER / f"{name}.npy"
