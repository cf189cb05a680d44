"""Pairs of answers as documents: which of their tokens are compared, and which rows are refused."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.prepared import tokenized
from windlass.data import Data, Tokenized
from windlass.data.checks import Checks
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.formats import Rendered
from windlass.formats.pairs import Format
from windlass.hub.chat_template import CHATML, Template
from windlass.sources import jsonl

WHERE = "pairs.jsonl line 3"
TEMPLATE = Template(CHATML, ["<|im_start|>", "<|im_end|>"], {})
SILENT = Template("{% for m in messages %}{{ m.content }}{% endfor %}", ["<s>"], {})
PLAIN = {"prompt": "Is 91 prime?", "chosen": "No: 7 × 13.", "rejected": "Yes."}


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED = said("user", "Is 91 prime?")
YES, NO = said("assistant", "Yes."), said("assistant", "No: 7 × 13.")
SHAPES: dict[str, dict[str, Any]] = {
    "text": PLAIN,
    "messages behind a prompt": {"prompt": [ASKED], "chosen": [NO], "rejected": [YES]},
    "messages behind a text": {"prompt": "Is 91 prime?", "chosen": [NO], "rejected": [YES]},
    "conversations": {"chosen": [ASKED, NO], "rejected": [ASKED, YES], "score_chosen": 8.0},
    "ShareGPT": {
        "prompt": [{"from": "human", "value": "Is 91 prime?"}],
        "chosen": {"from": "gpt", "value": "No: 7 × 13."},
        "rejected": {"from": "gpt", "value": "Yes."},
    },
    "conversations with their prompt": {
        **{"prompt": "Is 91 prime?", "prompt_id": "x", "messages": [ASKED, NO]},
        **{"chosen": [ASKED, NO], "rejected": [ASKED, YES]},
    },
}


def compared(one: Rendered) -> str:
    return "".join(one.text[span.start : span.stop] for span in one.spans)


@pytest.mark.parametrize("row", SHAPES.values(), ids=SHAPES)
def test_every_shape_is_the_same_chat_of_which_the_answer_and_its_stop_are_compared(row):
    chosen, rejected = Format().render(row, WHERE, TEMPLATE)
    before = "<|im_start|>user\nIs 91 prime?<|im_end|>\n<|im_start|>assistant\n"
    assert chosen.text == f"{before}No: 7 × 13.<|im_end|>\n"
    assert rejected.text == f"{before}Yes.<|im_end|>\n"
    assert compared(chosen) == "No: 7 × 13.<|im_end|>"
    assert compared(rejected) == "Yes.<|im_end|>"
    assert chosen.is_whole and rejected.is_whole


def test_of_several_turns_only_the_last_answer_is_compared():
    turns = [said("user", "Yes?"), said("assistant", "Yes."), said("user", "Sure?")]
    row = {"chosen": [*turns, YES], "rejected": [*turns, NO]}
    chosen, rejected = Format().render(row, WHERE, TEMPLATE)
    assert compared(chosen) == "Yes.<|im_end|>"
    assert chosen.spans[0].start > chosen.text.index("Sure?")
    assert compared(rejected) == "No: 7 × 13.<|im_end|>"


def test_a_column_may_hold_a_system_message_and_columns_may_have_other_names():
    row = {"persona": "Be short.", "question": "Is 91 prime?", "good": "No.", "bad": "Yes."}
    named = Format(system="persona", prompt="question", chosen="good", rejected="bad")
    whole = {"persona": "Be short.", "good": [ASKED, NO], "bad": [ASKED, YES]}
    opening = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nIs 91 prime?"
    for one in (row, whole):
        chosen, rejected = named.render(one, WHERE, TEMPLATE)
        assert chosen.text.startswith(opening) and rejected.text.startswith(opening)


def test_tools_of_a_row_reach_the_template():
    template = Template("{{ tools[0].name }}" + CHATML, TEMPLATE.special, {})
    for one in Format().render(PLAIN | {"tools": [{"name": "factor"}]}, WHERE, template):
        assert one.text.startswith("factor<|im_start|>user")


def test_as_text_an_answer_stands_right_behind_its_prompt():
    for how, template in ((Format(), None), (Format(style="text"), TEMPLATE)):
        chosen, rejected = how.render(PLAIN, WHERE, template)
        assert (chosen.text, compared(chosen)) == ("Is 91 prime?No: 7 × 13.", "No: 7 × 13.")
        assert (rejected.text, compared(rejected)) == ("Is 91 prime?Yes.", "Yes.")
        assert not chosen.is_whole


@pytest.mark.parametrize(
    ("row", "how", "template", "message"),
    [
        (
            {"prompt": "Is it?", "chosen": "No.", "text": ""},
            {},
            TEMPLATE,
            f"{WHERE} has no rejected; it has prompt and chosen. "
            "data.format.chosen and data.format.rejected name other columns",
        ),
        (
            {"chosen": "No.", "rejected": "Yes."},
            {},
            TEMPLATE,
            f"{WHERE} has no prompt, and its answers are no conversations that begin with one; "
            "data.format.prompt names another column",
        ),
        (
            PLAIN | {"rejected": PLAIN["chosen"]},
            {},
            TEMPLATE,
            f"{WHERE} has the same in chosen and rejected, so that there is nothing to prefer; "
            "data.checks.offending=drop leaves such examples out",
        ),
        (
            {"chosen": [ASKED, NO], "rejected": [said("user", "Is 7 prime?"), YES]},
            {},
            TEMPLATE,
            f"{WHERE} has no prompt that chosen and rejected share: they are to differ in their "
            "last message alone",
        ),
        (
            {"chosen": [ASKED, NO], "rejected": [ASKED]},
            {},
            TEMPLATE,
            f"{WHERE} has no turn of the assistant, whose words are trained on",
        ),
        (
            PLAIN | {"chosen": ["No."]},
            {},
            TEMPLATE,
            f"{WHERE} has no list of messages in column chosen",
        ),
        (
            PLAIN | {"prompt": 91},
            {},
            TEMPLATE,
            f"{WHERE} has neither text nor messages in column prompt",
        ),
        (
            PLAIN,
            {"style": "chat"},
            None,
            "data.format.style is chat, and the tokenizer has no chat template; "
            "data.format.template=chatml would do, or a file with one",
        ),
        (
            {"chosen": [ASKED, YES, ASKED, NO], "rejected": [ASKED, YES, ASKED, YES]},
            {},
            None,
            f"{WHERE} is a conversation, and as text there is one prompt and one answer; "
            "data.format.template=chatml writes it as a chat",
        ),
        (
            PLAIN,
            {},
            SILENT,
            f"{WHERE} is no chat that the template can write: behind message 2, of the assistant, "
            "it writes no special token, so that a model would not learn where to stop",
        ),
    ],
)
def test_a_row_that_is_no_pair_is_refused_with_its_place(row, how, template, message):
    with pytest.raises(UserError) as refused:
        Format(**how).render(row, WHERE, template)
    assert str(refused.value) == message


def pairs(place: Path, rows: list[dict[str, Any]], **how: Any) -> Tokenized:
    file = place / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = {"format": Format(), "length": 40, "cache": str(place / "cache")} | how
    data = Data(source=jsonl.Source(path=str(file)), **how)
    return tokenized(data, Tokenizer(kind="byte"), console=Console(file=io.StringIO()))


def test_rows_of_tokens_hold_whole_pairs_and_weigh_the_answers_and_their_ends(tmp_path):
    short = {"prompt": "a?", "chosen": "bcd", "rejected": "e"}
    rows = [short, PLAIN, short | {"rejected": "bcd"}, short | {"chosen": "fg"}]
    prepared = pairs(tmp_path, rows, checks=Checks(offending="drop"))
    checked = prepared.corpora[0].checked
    assert checked is not None and checked.dropped == {"format": 1}
    found = prepared.split("train")
    assert (len(found), found.longer) == (1, 1)  # in bytes the second row is longer than 40
    row = found[0]
    answers = [
        row["targets"][(row["document"] == number) & (row["weight"] > 0)].tolist()
        for number in range(4)
    ]
    assert [bytes(tokens[:-1]) for tokens in answers] == [b"bcd", b"e", b"fg", b"e"]
    assert {tokens[-1] for tokens in answers} == {prepared.vocabulary.eos}
    assert np.count_nonzero(row["weight"]) == 3 + 1 + 2 + 1 + 4
    assert set(prepared.data.columns) == {*row, "reference"}
    with pytest.raises(UserError) as refused:
        pairs(tmp_path, [short], length=8)  # enough for either, not for both
    assert str(refused.value) == (
        "data.length is 8, and all 1 groups of 2 documents of data.source are longer, the "
        "shortest of 10 tokens; a longer row would do"
    )


def test_both_documents_of_a_row_are_in_the_same_split(tmp_path):
    rows = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(40)]
    held = pairs(tmp_path, rows, validation=0.3).split("validation")
    documents = {piece.document for n in range(len(held)) for piece in held.pieces(n)}
    assert documents == {2 * (n // 2) + one for n in documents for one in (0, 1)}
    assert 0 < len(documents) < 40


def test_a_pair_can_be_dropped_and_not_split():
    with pytest.raises(ValueError) as refused:
        Data(source=jsonl.Source(path="x"), format=Format(), longer="split")
    assert refused.value.args == (
        "longer is split; documents that belong together stay whole: drop would do",
    )
