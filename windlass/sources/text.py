"""Plain text files: a document is a file, a line, or what stands between blank lines."""

from array import array
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from windlass.config import section
from windlass.errors import UserError
from windlass.sources import decode, files, stamp

# A document is tokenised whole, which takes about fifty times its size in memory.
LARGEST_DOCUMENT_BYTES = 64 * 2**20


@section
class Source:
    """The text of a file, of every .txt file in a folder, or of the files a pattern matches."""

    yields: ClassVar[str] = "text"

    path: str  # a file, a folder or a pattern such as books/*.txt
    documents: Literal["file", "line", "blank_line"] = "file"  # what one document is

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, begin, end = self._spans[index].tolist()
        file = self._files[number]
        if end - begin > LARGEST_DOCUMENT_BYTES:
            raise UserError(
                f"{file} holds a document of {(end - begin) / 2**20:,.0f} MiB; a document is "
                f"at most {LARGEST_DOCUMENT_BYTES / 2**20:,.0f} MiB: "
                "data.source.documents=blank_line or line makes shorter ones"
            )
        with file.open("rb") as opened:
            opened.seek(begin)
            text = decode(file, opened.read(end - begin), begin)
        text = text.replace("\r\n", "\n")
        return {"text": text if self.documents == "file" else text.strip("\n")}

    def fingerprint(self) -> str:
        return stamp(files(self.path, ".txt"), kind="text", documents=self.documents)

    @cached_property
    def _files(self) -> list[Path]:
        return files(self.path, ".txt")

    @cached_property
    def _spans(self) -> np.ndarray:
        spans = [
            np.insert(self._spans_of(file), 0, number, axis=1)
            for number, file in enumerate(self._files)
        ]
        return np.concatenate(spans)

    def _spans_of(self, file: Path) -> np.ndarray:
        if self.documents == "file":
            return np.array([[0, file.stat().st_size]], np.int64)
        found = array("q")
        place, is_inside = 0, False
        with file.open("rb") as opened:
            for line in opened:
                end = place + len(line)
                if not line.strip():
                    is_inside = False
                elif is_inside and self.documents == "blank_line":
                    found[-1] = end
                else:
                    found.extend((place, end))
                    is_inside = True
                place = end
        return np.array(found, np.int64).reshape(-1, 2)
