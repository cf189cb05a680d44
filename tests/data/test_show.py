import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from windlass.data import Data, Tokenized, prepare
from windlass.data.mix import Mixture
from windlass.data.show import row, show
from windlass.data.tokenizer import Tokenizer
from windlass.sources import stories, text

Documents = Callable[..., Tokenized]
SHOWN = """\
row 0
document 0, tokens 0 to 5: <|endoftext|>ab[c<|endoftext|>
document 2, tokens 0 to 2: <|endoftext|>z<|endoftext|>
1 of 8 positions padded

row 1
document 1, tokens 0 to 8: <|endoftext|>A 世!x<|endoftext|>
0 of 8 positions padded

┏━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━━━━━━┓
┃ split ┃ documents ┃ sequences ┃ tokens ┃ of all positions ┃
┡━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━━━━━━┩
│ train │         3 │         2 │     15 │            93.8% │
└───────┴───────────┴───────────┴────────┴──────────────────┘
"""


def test_rows_are_shown_as_the_model_sees_them(documents: Documents):
    prepared = documents(["ab[c", "A 世!x", "z"], length=8)
    console = Console(file=io.StringIO(), width=80)
    show(prepared, prepared.split("train"), console, 2)
    assert console.file.getvalue() == SHOWN  # pyright: ignore[reportAttributeAccessIssue]


def test_a_mixture_is_shown_with_its_parts_and_how_often_a_run_comes_to_them(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\ntwo")
    parts = (
        text.Source(path=f"{tmp_path}/a.txt", documents="line", weight=3.0),
        stories.Source(count=9, limit=8),
    )
    data = Data(mixture=parts, length=128, cache=str(tmp_path))
    prepared = dataclasses.replace(prepare(data, Tokenizer(kind="byte")), drawn=40)
    console = Console(file=io.StringIO(), width=200)
    show(prepared, prepared.split("train"), console, 1)
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    lines = [line.strip("│ ").split() for line in shown.splitlines() if "│" in line]
    trained = prepared.split("train")
    assert isinstance(trained, Mixture)
    of_stories = trained.parts[1]
    assert lines[1] == [
        *("0", f"{tmp_path}/a.txt", "│", "text", "│", "75.0%", "│", "2", "│", "1", "│", "8"),
        *("│", "30.00"),  # 40 rows, three in four of them: 30 times the one row there is
    ]
    assert lines[2][:7] == ["1", "│", "stories", "│", "25.0%", "│", "8"]
    assert float(lines[2][-1]) == pytest.approx(10 / len(of_stories), abs=0.01)


def test_what_is_not_trained_on_is_dimmed_and_neighbours_have_other_colours(documents: Documents):
    prepared = documents(["ab", "c"], length=8)
    shown = row(prepared.split("train"), 0, prepared.vocabulary)
    styles = {
        shown.plain[span.start : span.end]: span.style
        for span in shown.spans
        if not shown.plain[span.start :].startswith("document")
    }
    assert styles["ab"] == "cyan" and styles["c"] == "yellow"
    first, *_, last = (span for span in shown.spans if "<" in shown.plain[span.start : span.end])
    assert (first.style, last.style) == ("dim", "yellow")
