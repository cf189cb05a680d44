"""Files of JSON objects, one to a line: a document is one column of one line."""

import json
from array import array
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from windlass.config import section
from windlass.errors import UserError
from windlass.sources import Files, decode, without


@section
class Source(Files):
    """The rows of a .jsonl file, of every one in a folder, or of the files a pattern matches."""

    yields: ClassVar[str] = "text"
    suffix: ClassVar[str] = ".jsonl"

    path: str  # a file, a folder or a pattern such as data/*.jsonl, or a URL of these
    column: str = "text"  # the key of each object that holds its text

    @property
    def total(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, line, begin, end = self._lines[index].tolist()
        file = self.found[number]
        raw = decode(file, self.reader.read(file, begin, end), begin)
        return {"text": self._text(raw, f"{file} line {line:,}")}

    def _text(self, raw: str, where: str) -> str:
        try:
            row = json.loads(raw.rstrip())
        except json.JSONDecodeError as wrong:
            hint = "one JSON object to a line is expected"
            if raw.lstrip().startswith("["):
                hint += "; `jq -c '.[]'` turns an array into lines"
            raise UserError(
                f"{where} is not JSON ({wrong.msg} at column {wrong.colno}); {hint}"
            ) from None
        if not isinstance(row, dict):
            raise UserError(f"{where} is {_named(row)}; one JSON object to a line is expected")
        if self.column not in row:
            raise without(where, self.column, list(row))
        text = row[self.column]
        if not isinstance(text, str):
            raise UserError(f"{where} has {_named(text)} in column {self.column}; text is expected")
        # JSON can escape half of a surrogate pair, which no UTF-8 can hold.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    @cached_property
    def _lines(self) -> np.ndarray:
        found = array("q")
        for number, file in enumerate(self.found):
            place = 0
            with file.open() as opened:
                for line, raw in enumerate(opened, start=1):
                    if raw.strip():
                        found.extend((number, line, place, place + len(raw)))
                    place += len(raw)
                    if len(found) // 4 == self.limit:
                        return np.array(found, np.int64).reshape(-1, 4)
        return np.array(found, np.int64).reshape(-1, 4)


def _named(value: Any) -> str:
    kinds = {dict: "an object", list: "an array", str: "text", bool: "a truth value"}
    return "null" if value is None else kinds.get(type(value), "a number")
