"""A run on sections that is asked questions: its headings are put around them, in every command."""

import io
import json
import sys
from pathlib import Path

import pytest

import windlass
from tests import tiny, trained
from tests.cli.conftest import Ended

ANSWERS = {"one": "two", "two": "three", "three": "four", "four": "five"}
RECIPE = {
    "model": {"family": "qwen3", "vocab": 257, **tiny.WIDTHS},
    "tokenizer": {"kind": "byte"},
    "data": {
        "source": {"kind": "jsonl", "path": "rows.jsonl"},
        "format": {
            "kind": "sections",
            "sections": [
                {"heading": "### Ask", "column": "question"},
                {"heading": "### Hint", "column": "hint", "optional": True},
                {"heading": "### Say"},
                {"heading": "### Next", "column": "answer"},
            ],
            "response": "### Say",
        },
        "length": 64,
        "packing": "none",
    },
    "optim": {"kind": "adamw", "learning_rate": 1e-2},
    "train": {"steps": 120, "batch": 4, "sample": "one", "sampling": {"tokens": 4}},
    "device": {"kind": "cpu", "count": 1},
    "telemetry": {"every": 60},
}
GREEDY = ["--temperature", "0", "--tokens", "30"]


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> Path:
    """A folder with the run of a model that learned what comes after four numbers."""
    folder = tmp_path_factory.mktemp("counted")
    rows = [{"question": one, "answer": other} for one, other in ANSWERS.items()]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "count.yaml").write_text(json.dumps(RECIPE))
    (folder / "output.txt").write_text(trained.windlass(folder, "train", "count.yaml").stdout)
    return folder


def test_a_question_gets_the_headings_it_was_trained_with(program, counted):
    text = "### Ask\ntwo\n\n### Say\n\n### Next\nthree\n"
    assert program("generate", "count", "two", *GREEDY, cwd=counted) == Ended(0, text, "")
    typed = program("generate", "count", "### Ask\ntwo\n\n### Say", *GREEDY, cwd=counted)
    assert typed == Ended(0, text, "")
    run = trained.only_run(counted)
    answers = windlass.generate(run, [*ANSWERS], temperature=0, tokens=30)
    assert answers == [f"\n\n### Next\n{answer}" for answer in ANSWERS.values()]


def test_lines_of_a_file_are_questions_or_have_the_columns_in_front_of_the_answer(
    program, counted, tmp_path
):
    file = tmp_path / "questions.jsonl"
    rows = [{"prompt": "one", "id": 7}, {"question": "two"}, {"question": "two", "hint": "odd"}]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ended = program("generate", "count", "--file", str(file), *GREEDY, cwd=counted)
    written = [json.loads(line) for line in ended.out.splitlines()]
    assert [{k: x for k, x in row.items() if k != "text"} for row in written] == rows
    assert [row["text"] for row in written[:2]] == ["\n\n### Next\ntwo", "\n\n### Next\nthree"]
    run = trained.only_run(counted)
    typed = "### Ask\ntwo\n\n### Hint\nodd\n\n### Say"
    assert windlass.generate(run, typed, temperature=0, tokens=30) == [written[2]["text"]]
    plain = tmp_path / "questions.txt"
    plain.write_text("four\none\n")
    ended = program("generate", "count", "--file", str(plain), *GREEDY, cwd=counted)
    assert [json.loads(line)["text"] for line in ended.out.splitlines()] == [
        "\n\n### Next\nfive",
        "\n\n### Next\ntwo",
    ]
    file.write_text('{"id": 1, "query": "one"}\n')
    refused = program("generate", "count", "--file", str(file), cwd=counted)
    assert (refused.code, refused.err) == (
        2,
        f"{file} line 1 has no prompt that is text, no question and no messages that are a list; "
        "it has id and query\n",
    )


def test_each_line_of_a_chat_is_a_question_by_itself(program, counted, tmp_path, monkeypatch):
    saved = tmp_path / "saved.jsonl"
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"one\nthree\n/save {saved}\n"))
    ended = program("chat", "count", *GREEDY, cwd=counted)
    assert ended == Ended(0, "\n\n### Next\ntwo\n\n\n### Next\nfour\n", "")
    said = [("user", "three"), ("assistant", "\n\n### Next\nfour")]
    messages = [{"role": role, "content": content} for role, content in said]
    assert json.loads(saved.read_text()) == {"messages": messages}
    for words, line in (["--system", "Be brief."], "one"), ([], "/system Be brief."):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{line}\n"))
        refused = program("chat", "count", *words, cwd=counted)
        assert (refused.code, refused.err) == (
            2,
            "this model was trained on sections under headings, which have no system prompt; what "
            "it is to know belongs to the question\n",
        )
    refused = program("chat", "count", "--thinking", "on", cwd=counted)
    assert refused.code == 2 and refused.err.startswith("thinking is on, and this model was ")


def test_the_end_of_the_run_and_its_samples_ask_as_the_format_does(counted):
    printed, run = (counted / "output.txt").read_text(), trained.only_run(counted)
    assert f"windlass chat runs/{run.name}\n" in printed
    assert (run / "samples.txt").read_text().startswith("--- step 120\n### Ask\none\n\n### Say")


def test_a_format_that_needs_several_columns_takes_them_from_a_file(program, counted, tmp_path):
    whole = ["data.format.response=### Next", "device.count=1"]
    sections = [*RECIPE["data"]["format"]["sections"]]
    sections[1] = sections[1] | {"optional": False}
    key = f"data.format.sections={json.dumps(sections)}"
    said = (
        "is one text, and a prompt of this model has the columns question and hint; `windlass "
        "generate RUN --file FILE.jsonl` takes them from a file of JSON Lines\n"
    )
    refused = program("generate", "count", "one", key, *whole, cwd=counted)
    assert (refused.code, refused.err) == (2, f"the prompt {said}")
    refused = program("chat", "count", key, *whole, cwd=counted)
    assert (refused.code, refused.err) == (2, f"a question {said}")
