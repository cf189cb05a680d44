import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.prepared import tokenized
from windlass.config import read
from windlass.data import Data, Tokenized, prepare
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.formats.sections import Format, Section
from windlass.sources import jsonl

LAW = (
    Section(heading="### Instruction", column="question"),
    Section(heading="### Response"),
    Section(heading="### Topic", column="topic"),
    Section(heading="### Reasoning", column="reasoning", optional=True, weight=0.5),
    Section(heading="### Answer", column="answer", weight=2.0),
    Section(heading="### Case Citation", column="case_citation", optional=True),
)
ROW = {
    "question": "Who pays?",
    "topic": "Tort - Duty",
    "reasoning": "Step 1: look.",
    "answer": "The owner.",
    "case_citation": "",
}
TEXT = """\
### Instruction
Who pays?

### Response

### Topic
Tort - Duty

### Reasoning
Step 1: look.

### Answer
The owner."""


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[..., Tokenized]:
    def prepare_rows(rows: list[dict], length: int = 256, **how: Any) -> Tokenized:
        file = tmp_path / "law.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        longer = how.pop("longer", None)
        data = Data(
            source=jsonl.Source(path=str(file)),
            format=Format(sections=LAW, **how),
            length=length,
            longer=longer,
            cache=str(tmp_path / "cache"),
        )
        return tokenized(data, Tokenizer(kind="byte"))

    return prepare_rows


def expected(weights: dict[str, float]) -> list[float]:
    """Of every byte that is a target, the end included, by the text each weight is of."""
    assert "".join(weights) == TEXT
    each = [weight for text, weight in weights.items() for _ in text]
    return [*each, each[-1]]


def test_sections_stand_in_order_and_each_weighs_what_it_says(prepared: Callable):
    row = prepared([ROW]).split("train")[0]
    here = row["document"] == 0
    assert bytes(row["targets"][here][:-1].tolist()).decode() == TEXT
    begin, reasoning, answer = TEXT.partition("\n\n### Reasoning")[0], *_parts()
    assert row["weight"][here].tolist() == expected({begin: 1.0, reasoning: 0.5, answer: 2.0})


def _parts() -> tuple[str, str]:
    after = TEXT.partition("\n\n### Reasoning")[2]
    reasoning, _, answer = after.partition("\n\n### Answer")
    return f"\n\n### Reasoning{reasoning}", f"\n\n### Answer{answer}"


def test_the_loss_begins_behind_the_heading_that_a_prompt_ends_in(prepared: Callable):
    form = Format(sections=LAW, response="### Response", loss_from="### Response")
    prompt = form.prompt({"question": "Who pays?"}, "line 1")
    assert prompt == "### Instruction\nWho pays?\n\n### Response"
    found = prepared([ROW], response="### Response", loss_from="### Response")
    rows = found.split("train")
    between = TEXT.removeprefix(prompt).partition("\n\n### Reasoning")[0]
    reasoning, answer = _parts()
    weights = {prompt: 0.0, between: 1.0, reasoning: 0.5, answer: 2.0}
    assert rows[0]["weight"][rows[0]["document"] == 0].tolist() == expected(weights)
    # What counts is what is trained on; the loss of a model that knows how common bytes are
    # weighs them as the loss does.
    assert rows.tokens == len(TEXT) + 1 - len(prompt)
    assert rows.targets == len(TEXT) + 1
    weighed = np.bincount(list(TEXT.encode()) + [256], expected(weights), minlength=257)
    assert found.parts("train")[0].counts.tolist() == weighed.tolist()


def test_a_prompt_ends_in_the_line_above_the_answer(prepared: Callable):
    form = Format(sections=LAW[:1] + LAW[4:5], response="### Answer", loss_from="### Answer")
    assert form.prompt(ROW, "line 1") == "### Instruction\nWho pays?\n\n### Answer\n"
    (rendered,) = form.render(ROW, "line 1", None)
    (span,) = rendered.spans
    assert rendered.text[: span.start] == form.prompt(ROW, "line 1")
    assert Format(sections=LAW).prompt(ROW, "line 1") == "### Instruction\nWho pays?"


def test_rows_longer_than_a_row_are_split_cut_or_dropped_and_counted(prepared: Callable):
    rows = [ROW, {**ROW, "answer": "The owner, " * 20}]
    whole = len(TEXT) + 1
    for longer, targets, documents in (
        (None, whole, 1),
        ("drop", whole, 1),
        ("cut", whole + 128, 2),
        ("split", 2 * whole + len(", " + "The owner, " * 19) - 2, 2),
    ):
        found = prepared(rows, 128, longer=longer).split("train")
        assert (found.targets, found.documents, found.longer) == (targets, documents, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "a", "topic": "b"},
            "has no column answer, which the section ### Answer needs; optional: true leaves it "
            "out of such examples. This one has question and topic",
        ),
        (
            {"question": " ", "topic": "b"},
            "has nothing in column question, which the section ### Instruction needs; optional: "
            "true leaves it out of such examples. This one has question and topic",
        ),
        ({"question": ["a"]}, "has no text in column question"),
    ],
)
def test_a_row_that_lacks_a_section_is_refused_with_its_line(
    row: dict, message: str, prepared: Callable, tmp_path: Path
):
    with pytest.raises(UserError) as refused:
        prepared([ROW, row])
    assert str(refused.value) == (
        "1 of 2 examples of data.source cannot be trained on:\n"
        f"  format: 1 example\n    {tmp_path}/law.jsonl line 2 {message}\n"
        "data.checks.offending=drop leaves them out"
    )


def test_sections_that_do_not_fit_together_are_refused():
    given = [{"heading": "A", "column": "a"}, {"heading": "A"}, {"heading": " ", "weight": -1}]
    with pytest.raises(UserError) as refused:
        read(Format, {"sections": given[:2], "response": "B", "loss_from": "C"})
    assert str(refused.value) == (
        "3 problems in the recipe:\n"
        "  sections   has the heading A twice\n"
        "  response   is B; the headings are A and A\n"
        "  loss_from  is C; the headings are A and A"
    )
    with pytest.raises(UserError) as refused:
        read(Format, {"sections": given[2:]})
    assert str(refused.value) == (
        "1 problem in the recipe:\n  sections.0.heading  is empty; it is a line of text"
    )
    with pytest.raises(UserError) as refused:
        read(Format, {"sections": []})
    assert str(refused.value) == (
        "1 problem in the recipe:\n"
        "  sections  is empty; it is a list of headings, each with a column"
    )


def test_nothing_to_train_on_is_refused(prepared: Callable, tmp_path: Path):
    with pytest.raises(UserError) as refused:
        prepared([{**ROW, "reasoning": ""}], loss_from="### Case Citation")
    assert str(refused.value) == f"{tmp_path}/law.jsonl line 1 has nothing that is trained on"


def test_a_source_without_rows_is_refused(tmp_path: Path):
    from windlass.sources import stories

    data = Data(source=stories.Source(count=3), format=Format(sections=LAW), cache=str(tmp_path))
    with pytest.raises(UserError) as refused:
        prepare(data, Tokenizer(kind="byte"))
    assert str(refused.value) == (
        "data.format is sections, which is made of whole rows, and data.source is stories, which "
        "has none; jsonl, parquet, csv, hub and example do"
    )


def test_a_vocabulary_is_learned_from_all_that_rows_say(prepared: Callable, tmp_path: Path):
    data = prepared([{**ROW, "answer": "zyzzyva " * 20}], 512).data
    found = tokenized(data, Tokenizer(kind="bpe", vocab=270))
    tokens = found.vocabulary.encode("zyzzyva")
    assert len(tokens) < 4 and found.vocabulary.decode(tokens) == "zyzzyva"


def test_a_stride_is_refused_where_nothing_is_split():
    given = {"source": {"kind": "stories"}, "length": 8, "stride": 4}
    with pytest.raises(UserError) as refused:
        read(Data, {**given, "longer": "drop"})
    assert str(refused.value) == (
        "1 problem in the recipe:\n"
        "  stride  is 4; it is for documents that are split over rows, and longer ones are "
        "dropped: data.longer=split splits them"
    )
    assert read(Data, given).lengthy == "split"
