"""What was measured, in lines."""

import pytest

from windlass.cli.evaluation import WIDTH, lines


def shown(found: dict) -> list[str]:
    return [f"{name:<{WIDTH}}{value}" for name, value in lines(found)]


def test_two_splits_are_two_columns_with_the_verdict_below_them():
    losses = {"loss": 1.25, "perplexity": 3.4903, "validation_loss": 1.125}
    found = {"step": 300, **losses, "validation_perplexity": 3.0802, "looks": 2}
    assert shown(found | {"verdict": "undecided: it is so", "over": "some tokens"}) == [
        "step             300",
        "                 test        validation",
        "loss             1.2500      1.1250",
        "perplexity       3.4903      3.0802",
        "over             some tokens",
        "verdict          undecided: it is so",
        "test split       evaluated 2 times so far",
    ]


def test_one_split_is_one_column():
    assert shown({"step": 3, "cross_entropy": 0.5, "looks": 1}) == [
        "step             3",
        "cross entropy    0.5000",
        "test split       evaluated once so far",
    ]


def test_what_was_elected_and_where_answers_are_is_shown():
    found = {"step": 3, "exact_accuracy": 0.5, "votes": 8, "pass@1": 0.75, "saved": "a.npz"}
    assert shown(found) == [
        "step             3",
        "exact accuracy   0.5000",
        "votes            8",
        "pass@1           0.7500",
        "saved            a.npz",
    ]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (
            ["--votes", "8"],
            "--save and --votes are of answers by row, and the objective next_token has none; "
            "halting has",
        ),
        (
            ["--save", "a.json"],
            "--save is a.json; answers are arrays in a file of NumPy's, which ends in .npz",
        ),
        (["--votes", "many"], '--votes is "many"; it must be a whole number or null'),
        (
            ["--votes", "2", "--tasks", "hellaswag"],
            "--votes is of answers to rows of data, and --tasks has tasks of its own; leave one of "
            "them out",
        ),
        (
            ["--save", "a.npz", "--diagnose"],
            "--save is of what is measured on data, and --diagnose measures a model without; leave "
            "one of them out",
        ),
    ],
)
def test_answers_that_cannot_be_had_are_refused(program, place, words, what):
    done = program("evaluate", "tiny", *words, cwd=place)
    assert (done.code, " ".join(done.err.split())) == (2, what)


def test_a_family_without_measures_of_its_own_has_no_diagnosis(program, place):
    done = program("evaluate", "tiny", "--diagnose", cwd=place)
    assert (done.code, " ".join(done.err.split())) == (
        2,
        "--diagnose is of models that can be measured without data, and family qwen3 declares no "
        "such measure; windlass evaluate without it measures the loss",
    )


def test_what_is_measured_on_data_is_no_part_of_a_diagnosis(program):
    for words in (["--tasks", "hellaswag"], ["--beside", "other"], ["--split", "test"]):
        done = program("evaluate", "mine", "--diagnose", *words)
        assert (done.code, " ".join(done.err.split())) == (
            2,
            f"{words[0]} is of what is measured on data, and --diagnose measures a model without; "
            "leave one of them out",
        )
