"""What was measured, in lines."""

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
