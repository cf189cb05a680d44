"""Columns beside packed rows, in files of their own: found by part, and joined by row number."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from windlass.columns import StoredColumn
from windlass.data.mix import Mixture
from windlass.data.pack import Sequences
from windlass.data.prepared import Prepared
from windlass.data.split import Split


def joined(prepared: Prepared, stored: Callable[[str], Mapping[str, StoredColumn]]) -> Prepared:
    """Prepared data with further columns; `stored` has those of a part, by its name."""
    splits = {}
    for split, rows in prepared.splits.items():
        parts = [
            part.with_beside({**part.beside, **stored(name)}) for name, part in _of(split, rows)
        ]
        splits[split] = Mixture(parts, rows.shares) if isinstance(rows, Mixture) else parts[0]
    return replace(prepared, splits=splits)


def parts(prepared: Prepared, splits: Sequence[str] | None = None) -> dict[str, Sequences]:
    """The rows of each source in some splits, or in all, by names such as `train-0`."""
    return {
        name: part
        for split, rows in prepared.splits.items()
        if splits is None or split in splits
        for name, part in _of(split, rows)
    }


def _of(split: str, rows: Split) -> Iterator[tuple[str, Sequences]]:
    for number, part in enumerate(rows.parts if isinstance(rows, Mixture) else (rows,)):
        assert isinstance(part, Sequences)
        yield f"{split}-{number}", part
