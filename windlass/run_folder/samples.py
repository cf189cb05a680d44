"""Samples of a run: the file of texts that its model generated, each under the step it was at."""

import re
from pathlib import Path
from typing import NamedTuple

from windlass import files

TITLE = "--- step "


class Sample(NamedTuple):
    """A text that the model generated at a step, its prompt included."""

    step: int
    text: str


def append(path: Path, sample: Sample) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{TITLE}{sample.step}\n{sample.text}\n")


def read(path: Path) -> list[Sample]:
    """The samples of a run, the newest last."""
    if not path.is_file():
        return []
    text = path.read_bytes()
    titles = _titles(text)
    ends = [*(title.start() for title in titles[1:]), len(text)]
    return [
        Sample(int(title[1]), text[title.end() : end].decode(errors="replace").strip("\n"))
        for title, end in zip(titles, ends, strict=True)
    ]


def truncate(path: Path, step: int) -> None:
    """Drop the samples after a step: a run that goes on from there writes them again."""
    if not path.exists():
        return
    if path.is_dir():  # and so is not what a run wrote
        files.put_aside(path)
        return
    text = path.read_bytes()  # in which somebody may have left what is not UTF-8
    later = [title.start() for title in _titles(text) if int(title[1]) > step]
    if later:
        files.write(path, text[: later[0]])


def _titles(text: bytes) -> list[re.Match[bytes]]:
    return [*re.finditer(rf"^{TITLE}(\d+)$".encode(), text, re.MULTILINE)]
