import json
from pathlib import Path
from typing import Any

import pytest

import windlass
from windlass.errors import UserError
from windlass.sources.example import Source

FOLDER = Path(windlass.__file__).parent / "examples"
STRUCTURES = {
    "case_analysis": ("Issue", "Rule", "Application", "Conclusion"),
    "educational": ("Definition", "Legal Basis", "Key Elements", "Examples", "Distinctions"),
    "client_interaction": (
        "Understanding",
        "Legal Position",
        "Options",
        "Recommendation",
        "Next Steps",
    ),
    "statutory_interpretation": (
        "Statutory Text",
        "Purpose",
        "Interpretation",
        "Case Law",
        "Application",
    ),
}


def rows(name: Any) -> list[dict]:
    source = Source(name=name)
    return [source.row(index) for index in range(len(source))]


def test_rows_are_the_lines_of_the_file_and_no_two_are_alike():
    for name in ("legal", "chats", "pairs"):
        lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        assert rows(name) == [json.loads(line) for line in lines]
        assert len({json.dumps(row | {"id": None}) for row in rows(name)}) == len(lines)
    assert Source(name="chats").where(11) == "chats.jsonl line 12"


def test_a_legal_answer_has_the_structure_of_its_sample_type():
    kinds = set()
    for row in rows("legal"):
        kind = row.get("sample_type", "case_analysis")
        kinds.add(kind)
        heads = [part.partition(":")[0] for part in row["answer"].split("\n\n")]
        assert tuple(heads) == STRUCTURES[kind]
    assert kinds == set(STRUCTURES)


def test_chats_take_turns_and_end_with_the_assistant():
    roles = [[message["role"] for message in row["messages"]] for row in rows("chats")]
    for each in roles:
        spoken = [role for role in each if role != "system"]
        assert spoken[0] == "user" and spoken[-1] == "assistant"
        assert all(one != other for one, other in zip(each, each[1:], strict=False))
    assert any("system" in each for each in roles) and any("tool" in each for each in roles)


def test_a_document_is_a_column_and_one_that_is_no_text_is_refused():
    source = Source(name="legal", column="question", limit=2)
    assert [source[index]["text"] for index in range(len(source))] == [
        row["question"] for row in rows("legal")[:2]
    ]
    with pytest.raises(UserError) as refused:
        Source(name="pairs")[0]
    assert str(refused.value) == (
        "pairs.jsonl line 1 has no column text; "
        "data.source.column can be one it has: id, prompt, chosen, rejected"
    )


def test_the_fingerprint_changes_with_what_is_read():
    prints = {
        Source(name=name, column=column, limit=limit).fingerprint()
        for name in ("legal", "chats")
        for column in ("id", "question")
        for limit in (None, 3)
    }
    assert len(prints) == 8
