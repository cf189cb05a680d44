"""Plain text files: a document is a file, a line, or what stands between blank lines."""

from array import array
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from windlass.config import section
from windlass.errors import UserError
from windlass.sources import Files, SourceFile, decode
from windlass.units import size

# A document is tokenised whole, which takes about fifty times its size in memory.
LARGEST_DOCUMENT_BYTES = 64 * 2**20


@section
class Source(Files):
    """The text of a file, of every .txt file in a folder, or of the files a pattern matches."""

    yields: ClassVar[str] = "text"
    suffix: ClassVar[str] = ".txt"

    path: str  # a file, a folder or a pattern such as books/*.txt, or a URL of these
    documents: Literal["file", "line", "blank_line"] = "file"  # what one document is

    @property
    def total(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, begin, end = self._spans[index].tolist()
        file = self.files[number]
        if end - begin > LARGEST_DOCUMENT_BYTES:
            raise UserError(
                f"{file} holds a document of {size(end - begin)}; a document is "
                f"at most {size(LARGEST_DOCUMENT_BYTES)}: "
                "data.source.documents=blank_line or line makes shorter ones"
            )
        text = decode(file, self.reader.read(file, begin, end), begin)
        text = text.replace("\r\n", "\n")
        return {"text": text if self.documents == "file" else text.strip("\n")}

    @cached_property
    def _spans(self) -> np.ndarray:
        spans, documents = [np.zeros((0, 3), np.int64)], 0
        for number, file in enumerate(self.files):
            spans.append(np.insert(self._spans_of(file), 0, number, axis=1))
            documents += len(spans[-1])
            if self.limit is not None and documents >= self.limit:
                break
        return np.concatenate(spans)

    def _spans_of(self, file: SourceFile) -> np.ndarray:
        if self.documents == "file":
            return np.array([[0, file.size]], np.int64)
        spans = array("q")
        place, is_inside = 0, False
        with file.open() as opened:
            for line in opened:
                end = place + len(line)
                if not line.strip():
                    is_inside = False
                elif is_inside and self.documents == "blank_line":
                    spans[-1] = end
                else:
                    spans.extend((place, end))
                    is_inside = True
                place = end
        return np.array(spans, np.int64).reshape(-1, 2)
