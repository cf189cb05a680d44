"""Files of JSON objects, one to a line: a document is one column of one line."""

import json
from array import array
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from windlass.config import section
from windlass.errors import UserError
from windlass.files import parse_json
from windlass.sources import Files, Records, decode, kind


@section
class Source(Files, Records):
    """The rows of a .jsonl file, of every one in a folder, or of the files a pattern matches."""

    suffix: ClassVar[str] = ".jsonl"

    path: str  # a file, a folder or a pattern such as data/*.jsonl, or a URL of these

    @property
    def total(self) -> int:
        return len(self._lines)

    def where(self, index: int) -> str:
        number, line, _, _ = self._lines[index].tolist()
        return f"{self.files[number]} line {line:,}"

    def row(self, index: int) -> dict[str, Any]:
        number, _, begin, end = self._lines[index].tolist()
        file, where = self.files[number], self.where(index)
        raw = decode(file, self.reader.read(file, begin, end), begin)
        try:
            row = parse_json(raw.rstrip())
        except ValueError as wrong:
            hint = "one JSON object to a line is expected"
            if raw.lstrip().startswith("["):
                hint += "; `jq -c '.[]'` turns an array into lines"
            what = str(wrong)
            if isinstance(wrong, json.JSONDecodeError):
                what = f"{wrong.msg} at column {wrong.colno}"
            raise UserError(f"{where} is not JSON ({what}); {hint}") from None
        if not isinstance(row, dict):
            raise UserError(f"{where} is {kind(row)}; one JSON object to a line is expected")
        return _mended(row) if "\\u" in raw else row

    @cached_property
    def _lines(self) -> np.ndarray:
        spans = array("q")
        for number, file in enumerate(self.files):
            place = 0
            with file.open() as opened:
                for line, raw in enumerate(opened, start=1):
                    if raw.strip():
                        spans.extend((number, line, place, place + len(raw)))
                    place += len(raw)
                    if len(spans) // 4 == self.limit:
                        return np.array(spans, np.int64).reshape(-1, 4)
        return np.array(spans, np.int64).reshape(-1, 4)


def _mended(value: Any) -> Any:
    """Replace lone surrogates, which JSON can escape and no UTF-8 can hold."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_mended(item) for item in value]
    if isinstance(value, dict):
        return {_mended(name): _mended(item) for name, item in value.items()}
    return value
