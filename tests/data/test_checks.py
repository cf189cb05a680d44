"""Rules for rows: each broken once, and the words that say so."""

from typing import Any

import pytest

from windlass.config import read
from windlass.data import counting
from windlass.data.checks import Checker, Checks
from windlass.errors import UserError
from windlass.sources.example import Source

# The schema of the legal recipe; the least words are those of rows that are examples.
LEGAL = {
    "required": "id question answer topic difficulty case_citation reasoning".split(),
    "allowed": {
        "difficulty": ["basic", "intermediate", "advanced", "expert"],
        "jurisdiction": ["uk", "us", "eu", "international"],
    },
    "by": "difficulty",
    "least": {
        "any": {"reasoning": {"characters": 200}},
        "basic": {"answer": {"words": 140, "citations": 2}, "reasoning": {"steps": 4}},
        "expert": {"answer": {"words": 140, "citations": 3}, "reasoning": {"steps": 5}},
    },
    "duplicates": "refuse",
    "alike": "refuse",
}
ROW = {"question": "Why?", "answer": "Because of Smith v Jones [2023] UKSC 12.", "level": "basic"}


def checked(rows: list[dict[str, Any]], checks: dict[str, Any]) -> tuple[list[int], Checker]:
    """The rows that are kept, and what looked at them; a row's text is its answer."""
    checker = Checker(read(Checks, checks))
    kept = []
    for number, row in enumerate(rows):
        where = f"a.jsonl line {number + 1}"
        if checker.takes(row, where) and checker.keeps([row.get("answer") or ""], where):
            kept.append(number)
    return kept, checker


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("In Smith v Jones [2023] UKSC 12 it was held so, and Smith v Jones is the law.", 1),
        ("See R v Brown [1994] 1 AC 212, Re Lark and [2020] EWCA Civ 14.", 3),
        ("Donoghue v. Stevenson, [1932] AC 562, and section 2 of the Human Rights Act 1998.", 2),
        ("The Sale of Goods Act 1979 came first. The Sale of Goods Act 1979 is still there.", 1),
        ("He acted in 1979, the Act was late, and team one v nobody.", 0),
    ],
)
def test_a_citation_is_a_case_or_an_act_and_counts_once(text: str, count: int):
    assert counting.citations(text) == count


def test_words_characters_and_steps_are_counted_as_written():
    text = " Step 1: read it.\nStep 2: think. Step 2: think again. Step three: stop. "
    assert counting.steps(text) == 2
    assert counting.words(text) == 14
    assert counting.characters(text) == len(text) - 2
    turns = [{"role": "user", "content": "one two"}, {"from": "gpt", "value": "three"}]
    assert counting.words(counting.text_of(turns)) == 3


def test_the_legal_example_passes_the_checks_of_its_schema():
    source = Source(name="legal")
    rows = [source.row(index) for index in range(len(source))]
    kept, checker = checked(rows, LEGAL)
    assert kept == list(range(60))
    found = checker.finish()
    assert (found.rows, found.kept, found.dropped, found.told) == (60, 60, {}, {})


def test_rows_that_break_rules_are_refused_with_the_first_of_each_and_their_count():
    rules = {
        "required": ["question"],
        "allowed": {"level": ["basic", "expert"]},
        "by": "level",
        "least": {
            "any": {"answer": {"words": 2}},
            "expert": {"answer": {"citations": 2, "steps": 1, "characters": 50}},
        },
        "duplicates": "refuse",
        "empty": "refuse",
    }
    rows = [
        ROW,
        ROW | {"question": " ", "answer": "Two words."},
        {"answer": "One", "level": "easy"},
        ROW | {"level": "expert", "answer": "See Smith v Jones."},
        {"question": "", "answer": None},
        ROW,
        *[{"answer": f"An answer {n}"} for n in range(4)],
    ]
    _, checker = checked(rows, rules)
    with pytest.raises(UserError) as refused:
        checker.finish()
    assert str(refused.value) == (
        "9 of 10 examples of data.source cannot be trained on:\n"
        "  required question: 6 examples\n"
        "    a.jsonl line 2: question is empty\n"
        "    a.jsonl line 3: question is missing\n"
        "    a.jsonl line 7: question is missing\n"
        "    and 3 more\n"
        "  allowed level: 1 example\n"
        "    a.jsonl line 3: level is easy; it can be basic, expert\n"
        "  answer words: 1 example\n"
        "    a.jsonl line 3: answer has 1 words; the minimum is 2\n"
        "  answer characters: 1 example\n"
        "    a.jsonl line 4: answer has 18 characters; the minimum is 50 where level is expert\n"
        "  answer citations: 1 example\n"
        "    a.jsonl line 4: answer has 1 citations; the minimum is 2 where level is expert\n"
        "  answer steps: 1 example\n"
        "    a.jsonl line 4: answer has 0 steps; the minimum is 1 where level is expert\n"
        "  empty: 1 example\n"
        "    a.jsonl line 5: it has no text\n"
        "  duplicate: 1 example\n"
        "    a.jsonl line 6: the same as a.jsonl line 1\n"
        "data.checks.offending=drop, data.checks.empty=drop and data.checks.duplicates=drop "
        "leave them out"
    )


def test_dropped_rows_are_counted_once_by_the_first_rule_they_break():
    rows = [ROW, {"answer": "no"}, ROW | {"question": "Who?"}, {}, ROW | {"answer": "Because!"}]
    rows.append(ROW | {"answer": "  because"})
    rules = {"required": ["question", "level"], "offending": "drop", "duplicates": "drop"}
    kept, checker = checked(rows, rules | {"alike": "drop"})
    found = checker.finish()
    assert kept == [0, 4]
    assert (found.rows, found.kept) == (6, 2)
    assert found.dropped == {"required question": 1, "duplicate": 1, "empty": 1, "alike": 1}


def test_rows_that_are_warned_of_are_kept_and_told():
    rows = [ROW, ROW, {"answer": "short", "question": ""}]
    kept, checker = checked(rows, {"required": ["question"], "offending": "warn"})
    assert kept == [0, 1, 2]
    assert list(checker.finish().lines()) == [
        ("examples", "3 read, 3 kept"),
        (
            "checks",
            "1 duplicate example kept, the first a.jsonl line 2: the same as a.jsonl line 1",
        ),
        (
            "checks",
            "1 example that breaks required question kept, the first a.jsonl line 3: question is "
            "empty",
        ),
    ]


def test_rules_that_leave_nothing_are_refused():
    _, checker = checked([{"answer": "a"}], {"required": ["question"], "offending": "drop"})
    with pytest.raises(UserError) as refused:
        checker.finish()
    assert str(refused.value) == (
        "data.checks leave none of the 1 examples; the first to go breaks required question: "
        "a.jsonl line 1: question is missing"
    )


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(UserError) as refused:
        read(Checks, {"least": {"basic": {"answer": {"words": -1}}}})
    assert str(refused.value) == (
        "1 problem in the recipe:\n  least.basic.answer.words  is -1; it is 0 or more"
    )
    with pytest.raises(UserError) as refused:
        read(Checks, {"least": {"basic": {"answer": {"words": 1}}}})
    assert str(refused.value) == (
        "1 problem in the recipe:\n  least  names basic; by says which column has these values, "
        "and any stands for every example"
    )
