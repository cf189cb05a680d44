"""Labelled answers as documents: each beside the answer to another prompt, by their weights."""

import json
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from tests.prepared import tokenized
from windlass.data import Data
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.formats.unpaired import DESIRABLE, UNDESIRABLE, Format
from windlass.hub.chat_template import CHATML, Template
from windlass.sources import jsonl

WHERE = "labels.jsonl line 3"
TEMPLATE = Template(CHATML, ["<|im_start|>", "<|im_end|>"], {})
ROWS = [
    {"prompt": "Is 91 prime?", "completion": "No: 7 × 13.", "label": True},
    {"prompt": "Is 91 prime?", "completion": "Yes.", "label": False},
    {"prompt": "Capital of Peru?", "completion": "Lima.", "label": 1},
    {"prompt": "Capital of Peru?", "completion": "Quito.", "label": 0},
    {"prompt": "2 + 2?", "completion": "4", "label": True},
]


def rendered(rows, template=None, **keys):
    """The documents of each example, as they are read one after the other."""
    format, earlier, found = Format(**keys), {}, []
    for row in rows:
        earlier = format.after(row, earlier)
        found.append(format.render(earlier, WHERE, template))
    return found


def test_an_answer_stands_beside_the_last_one_to_another_prompt_and_its_weights_are_its_label():
    texts = [[one.text for one in example] for example in rendered(ROWS)]
    assert texts == [
        [],  # before which no other prompt stands
        [],
        ["Capital of Peru?Lima.", "Capital of Peru?Yes."],
        ["Capital of Peru?Quito.", "Capital of Peru?Yes."],
        ["2 + 2?4", "2 + 2?Quito."],
    ]
    weights = [[span.weight for one in example for span in one.spans] for example in rendered(ROWS)]
    assert weights[2:] == [[DESIRABLE] * 2, [UNDESIRABLE] * 2, [DESIRABLE] * 2]


def test_a_chat_template_writes_both_and_the_answer_with_its_stop_is_weighed():
    own, other = rendered(ROWS, TEMPLATE)[3]
    before = "<|im_start|>user\nCapital of Peru?<|im_end|>\n<|im_start|>assistant\n"
    assert own.text == f"{before}Quito.<|im_end|>\n"
    assert other.text == f"{before}Yes.<|im_end|>\n"
    assert {own.text[s.start : s.stop] for s in own.spans} == {"Quito.<|im_end|>"}


def test_documents_of_an_example_stay_together_and_weights_reach_the_batch(tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    out = Console(file=StringIO())
    data = Data(
        source=jsonl.Source(path=str(file)), format=Format(), length=64, cache=str(tmp_path)
    )
    found = tokenized(data, Tokenizer(), console=out)
    assert found.corpora[0].documents == 6
    packed = found.split("train")
    batch = packed.batch(np.arange(len(packed)))
    by_label = {}
    for weight, document in zip(batch["weight"], batch["document"], strict=True):
        for number in range(document.max() + 1):
            values = {*weight[(document == number) & (weight > 0)].tolist()}
            by_label.setdefault(tuple(values), []).append(number)
    assert {label: len(each) for label, each in by_label.items()} == {(1.0,): 4, (2.0,): 2}


def refusal(row: dict) -> str:
    with pytest.raises(UserError) as error:
        Format().render(row, WHERE, None)
    return str(error.value)


def test_rows_without_a_label_or_with_another_are_refused():
    assert refusal({"prompt": "2 + 2?", "completion": "4"}) == (
        "labels.jsonl line 3 has no label; it has prompt and completion. data.format.prompt, "
        "data.format.completion and data.format.label name other columns"
    )
    assert refusal({"label": False}) == (
        "labels.jsonl line 3 has no prompt and completion; it has label. data.format.prompt, "
        "data.format.completion and data.format.label name other columns"
    )
    assert refusal(ROWS[0] | {"label": "good"}) == (
        "labels.jsonl line 3 has 'good' in column label; a label is true or 1 of a desirable "
        "answer, and false or 0 of an undesirable one"
    )
