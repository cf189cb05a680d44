"""The table that benchmarks print: a line for each figure, ours beside a rival's."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

HEADINGS = ("figure", "windlass", "rival", "ratio")


class Line(NamedTuple):
    """A figure with its unit, that of a rival, and how many times better ours is."""

    name: str
    ours: str
    rival: str = ""
    ratio: float | None = None


def parser(about: str | None) -> argparse.ArgumentParser:
    """Options of a benchmark, which has a file for its lines beside those of its own."""
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--to", type=Path, metavar="FILE", help="write the table as JSON, too")
    return made


def finish(lines: list[Line], to: Path | None) -> None:
    """Print the table of a benchmark, and write it to a file where one is named."""
    print(f"\n{text(lines)}")
    if to is not None:
        to.write_text(json.dumps([line._asdict() for line in lines], indent=1) + "\n")


def read(file: Path) -> list[Line]:
    return [Line(**line) for line in json.loads(file.read_text())]


def text(lines: Iterable[Line]) -> str:
    cells = [HEADINGS, *((*line[:3], _ratio(line.ratio)) for line in lines)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
