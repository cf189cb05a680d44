"""Files of prompts: what is read of them, and which line is refused."""

import json

import pytest

from windlass.data import Data
from windlass.errors import UserError
from windlass.evaluation.prompts import of_data, read
from windlass.formats.chat import Format as Chats
from windlass.formats.pairs import Format as Pairs
from windlass.formats.sections import Format as Sections
from windlass.formats.sections import Section
from windlass.formats.text import Format as Texts
from windlass.sources import jsonl, stories


def test_a_text_has_a_prompt_in_each_line_that_is_not_empty(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("One day\r\n\n  \nZoë said\u2028 {\n".encode())
    assert [one.row["prompt"] for one in read(file)] == ["One day", "Zoë said\u2028 {"]
    assert [one.where for one in read(file)] == [f"{file} line 1", f"{file} line 4"]


def test_json_lines_keep_the_keys_beside_their_prompt(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": 7, "prompt": "One\nday"}, {"messages": [{"role": "user", "content": "Hi"}]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert [one.row for one in read(str(file))] == rows


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 "),
        ('"Once"', 'is no JSON object; it must be like {"prompt": "..."}'),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_by_its_number(tmp_path, line, said):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "Once"}}\n\n{line}\n')
    with pytest.raises(UserError) as refusal:
        read(file)
    assert str(refusal.value).startswith(f"{file} line 3 {said}")


@pytest.mark.parametrize(
    ("row", "has"),
    [
        ({"id": 1, "text": "Once"}, "it has id and text"),
        ({}, "it is empty"),
        ({"prompt": 3}, "it has prompt"),
    ],
)
def test_a_line_without_a_prompt_is_refused_by_the_format_that_is_asked(row, has):
    with pytest.raises(UserError) as refusal:
        Texts().asked(row, "prompts.jsonl line 3")
    assert str(refusal.value) == (
        "prompts.jsonl line 3 has no prompt that is text and no messages that are a list; " + has
    )


def test_a_file_that_is_not_there_or_empty_or_no_text_is_refused(tmp_path):
    file = tmp_path / "prompts.txt"
    for content, said in [
        (None, f"--file is {file}, which cannot be read: No such file or directory"),
        (b"\n \n", f"{file} has no prompts: it is empty"),
        (b"ab\xff", f"{file} is not UTF-8 text: byte 2"),
    ]:
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(UserError) as refusal:
            read(file)
        assert str(refusal.value) == said


def test_examples_of_a_recipe_are_prompts_without_their_last_answers(tmp_path):
    file = tmp_path / "chats.jsonl"
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "1 + 1"), ("assistant", "2")]
    messages = [{"role": role, "content": content} for role, content in turns]
    file.write_text(json.dumps({"messages": messages}) + "\n")
    chats = Data(source=jsonl.Source(path=str(file)), format=Chats())
    assert list(of_data(chats)) == [{"messages": messages[:3]}]
    texts = Data(source=stories.Source(count=2))
    assert list(of_data(texts)) == [{"prompt": stories.Source(count=2)[n]["text"]} for n in (0, 1)]
    parts = (Section(heading="# Q", column="question"), Section(heading="# A", column="answer"))
    law = tmp_path / "law.jsonl"
    law.write_text('{"question": "Who pays?", "answer": "The owner."}\n')
    sections = Sections(sections=parts, response="# A")
    asked = Data(source=jsonl.Source(path=str(law)), format=sections)
    assert list(of_data(asked)) == [{"prompt": "# Q\nWho pays?\n\n# A\n"}]
    with pytest.raises(UserError) as refusal:
        list(of_data(Data(source=jsonl.Source(path=str(file)), format=Pairs())))
    assert str(refusal.value) == (
        "prompts are made of texts, chats and sections; data.source has none"
    )
