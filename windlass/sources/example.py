"""Small made-up data sets that come with the package, to try a recipe before there is data."""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from windlass.config import section
from windlass.sources import Documents, without

FOLDER = Path(__file__).parents[1] / "examples"


@section
class Source(Documents):
    """Questions of an invented law, chats, or pairs of answers: all of it fiction."""

    yields: ClassVar[str] = "text"
    has_rows: ClassVar[bool] = True

    name: Literal["legal", "chats", "pairs"]  # which of them
    column: str = "text"  # for data.format text: the one that is read

    @property
    def total(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.row(index)
        if not isinstance(row.get(self.column), str):
            texts = [name for name, value in row.items() if isinstance(value, str)]
            raise without(self.where(index), self.column, texts)
        return {"text": row[self.column]}

    def row(self, index: int) -> dict[str, Any]:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self._file.name} line {index + 1:,}"

    def fingerprint(self) -> str:
        # The rows are part of the program, and another version of it may have others.
        written = hashlib.sha256(self._file.read_bytes()).hexdigest()
        return f"example {self.name} {self.column} {len(self)} {written}"

    @property
    def _file(self) -> Path:
        return FOLDER / f"{self.name}.jsonl"

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        lines = self._file.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]
