"""Documents in packed rows: what attention is told of them."""

from windlass.columns import DocumentsInRows
from windlass.data.mix import Mixture
from windlass.data.pack import Sequences
from windlass.data.split import Split
from windlass.data.streams.rows import StreamedRows


def documents_in_rows(rows: Split) -> DocumentsInRows | None:
    """One document in every row, or several in some; None for rows that are not packed."""
    parts = rows.parts if isinstance(rows, Mixture) else (rows,)
    if not all(isinstance(part, Sequences | StreamedRows) for part in parts):
        return None
    # Of a stream the parts to come are not known.
    known = [part.pieces_per_row.max() for part in parts if isinstance(part, Sequences)]
    return "one" if len(known) == len(parts) and max(known) == 1 else "several"
