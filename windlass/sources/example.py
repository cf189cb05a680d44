"""Small made-up data sets that come with the package, to try a recipe before there is data."""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from windlass.config import section
from windlass.sources import Records

FOLDER = Path(__file__).parents[1] / "examples"


@section
class Source(Records):
    """Questions of an invented law, chats, or pairs of answers: all of it fiction."""

    name: Literal["legal", "chats", "pairs"]  # which of them

    @property
    def total(self) -> int:
        return len(self._rows)

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
