import io
from collections.abc import Callable

from rich.console import Console

from windlass.data import Prepared
from windlass.data.show import row, show

Documents = Callable[..., Prepared]
SHOWN = """\
row 0
document 0, tokens 0 to 5: <|endoftext|>ab[c<|endoftext|>
document 2, tokens 0 to 2: <|endoftext|>z<|endoftext|>
1 of 8 places left empty

row 1
document 1, tokens 0 to 8: <|endoftext|>A 世!x<|endoftext|>
0 of 8 places left empty

┏━━━━━━━┳━━━━━━━━━━━┳━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━━━┓
┃ split ┃ documents ┃ rows ┃ tokens ┃ of all places ┃
┡━━━━━━━╇━━━━━━━━━━━╇━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━━━┩
│ train │         3 │    2 │     15 │         93.8% │
└───────┴───────────┴──────┴────────┴───────────────┘
"""


def test_rows_are_shown_as_the_model_sees_them(documents: Documents):
    prepared = documents(["ab[c", "A 世!x", "z"], length=8)
    console = Console(file=io.StringIO(), width=80)
    show(prepared, prepared.split("train"), console, 2)
    assert console.file.getvalue() == SHOWN  # pyright: ignore[reportAttributeAccessIssue]


def test_what_is_not_trained_on_is_dimmed_and_neighbours_have_other_colours(documents: Documents):
    prepared = documents(["ab", "c"], length=8)
    shown = row(prepared.split("train"), 0, prepared.tokeniser)
    styles = {
        shown.plain[span.start : span.end]: span.style
        for span in shown.spans
        if not shown.plain[span.start :].startswith("document")
    }
    assert styles["ab"] == "cyan" and styles["c"] == "yellow"
    first, *_, last = (span for span in shown.spans if "<" in shown.plain[span.start : span.end])
    assert (first.style, last.style) == ("dim", "yellow")
