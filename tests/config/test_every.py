"""How often: what is read, written again and refused, and when it is time."""

from itertools import accumulate

import pytest

from windlass.config import Due, Every, json_schema, read, section, to_yaml
from windlass.config.reading import describe
from windlass.config.text import parse


@section
class Saving:
    every: Every = Every(500)  # between saves
    other: Every | None = None


@pytest.mark.parametrize(
    ("written", "meant", "again"),
    [
        (50, Every(50, "steps"), 50),
        ("50", Every(50, "steps"), 50),
        (2e3, Every(2000, "steps"), 2000),
        ("50 steps", Every(50, "steps"), 50),
        ("1 step", Every(1, "steps"), 1),
        ("5 epochs", Every(5, "epochs"), "5 epochs"),
        ("1epoch", Every(1, "epochs"), "1 epochs"),
        ("0.5 epochs", Every(0.5, "epochs"), "0.5 epochs"),
        ("15min", Every(15, "min"), "15min"),
        (" 1.5 hours ", Every(1.5, "h"), "1.5h"),
        ("30 s", Every(30, "s"), "30s"),
        ([50, "1 epoch"], Every(50, "steps", (Every(1, "epochs"),)), [50, "1 epochs"]),
        (["15min"], Every(15, "min"), "15min"),
    ],
)
def test_what_is_written_is_read_and_written_down_again(written, meant, again):
    found = read(Saving, {"every": written})
    assert found == Saving(every=meant)
    tree, _ = parse(to_yaml(found), "it")
    assert tree == {"every": again, "other": None}
    assert read(Saving, tree) == found


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("5 epocs", 'is "5 epocs"; did you mean 5 epochs?'),
        ("15mins", 'is "15mins"; did you mean 15min?'),
        ("often", 'is "often"; it must be {words}'),
        ("5 moons", 'is "5 moons"; it must be {words}'),
        ("-5 epochs", 'is "-5 epochs"; it must be {words}'),
        (True, "is true; it must be {words}"),
        (None, "is null; it must be {words}"),
        ([], "is []; it must be {words}"),
        ([5, [6]], "is [5, [6]]; it must be {words}"),
        ([5, "1 epocs"], 'is [5, "1 epocs"]; did you mean 1 epochs?'),
        (float("inf"), "is Infinity; it must be {words}"),
        (0, "is 0; a number of steps is whole, 1 or more"),
        (2.5, "is 2.5; a number of steps is whole, 1 or more"),
        ("0.5 steps", 'is "0.5 steps"; a number of steps is whole, 1 or more'),
        ("0 epochs", 'is "0 epochs"; it must be above 0'),
    ],
)
def test_what_cannot_be_meant_is_refused(refusal, written, said):
    words = "a number of steps, or text such as 5 epochs, 15min or 2h, or a list of these"
    assert refusal(read, Saving, {"every": written}) == (
        f"1 problem in the recipe:\n  every  {said.format(words=words)}"
    )


def test_an_editor_and_the_reference_are_told_what_may_be_written():
    properties = json_schema(Saving)["properties"]
    assert properties["every"] == {**Every.schema, "default": 500, "description": "between saves"}
    assert properties["other"]["anyOf"] == [Every.schema, {"type": "null"}]
    assert describe(Every | None) == (
        "a number of steps, or text such as 5 epochs, 15min or 2h, or a list of these, or null"
    )


@pytest.mark.parametrize(
    ("written", "times"),
    [
        (4, [4, 8, 12]),
        ("1 epoch", [6, 12]),
        ("0.5 epochs", [3, 6, 9, 12]),
        ("0.25 epochs", [2, 3, 5, 6, 8, 9, 11, 12]),  # 1.5 steps: at the first after each of them
        ("0.1 epochs", list(range(1, 14))),
        ("2 epochs", [12]),
        ([4, "1 epoch"], [4, 6, 8, 12]),
    ],
)
def test_steps_and_epochs_are_due_by_the_number_of_the_step_alone(written, times):
    whole = [step for step in range(1, 14) if Due(Every.read(written), 6)(step)]
    assert whole == times
    resumed = Due(Every.read(written), 6)
    assert [step for step in range(7, 14) if resumed(step)] == [t for t in times if t >= 7]


def test_decimals_of_an_epoch_are_exact_after_many_of_them():
    due = Due(Every.read("0.1 epochs"), 30)
    assert [step for step in range(1, 9_000) if due(step)] == list(range(3, 9_000, 3))


def test_minutes_are_counted_from_the_start_and_then_from_the_last_time():
    moments = list(accumulate([0, 50, 20, 45, 10, 130, 59]))
    now = iter(moments)
    clock = [0.0]
    due = Due(Every.read("1min"), 6, clock=lambda: clock[0])
    times = []
    for step, clock[0] in enumerate(now):
        if due(step):
            times.append(clock[0])
    assert times == [70, 255]  # 70 + 55 is too early, and so is 255 + 59


def test_the_minutes_of_a_list_go_on_while_its_steps_are_due():
    clock = [0.0]
    due = Due(Every.read([2, "1min"]), 6, clock=lambda: clock[0])
    times = []
    for step, clock[0] in enumerate([50, 100, 130, 165, 170], start=1):
        if due(step):
            times.append(step)
    # The second step took the minute's turn too, and the third comes 30 seconds after it.
    assert times == [2, 4]


def test_what_is_never_to_happen_is_never_due():
    due = Due(None, 6)
    assert not any(due(step) for step in range(100))


def test_an_interval_is_as_long_as_the_shortest_of_its_parts():
    assert Every.read([50, "1 epoch", "2min"]).seconds(0.5, 100) == 25
    assert Every.read(["3 epochs", "2min"]).seconds(0.5, 100) == 120
    assert Every.read("0.5 epochs").seconds(0.5, 100) == 25
    assert Every.read("0.5 epochs").seconds(0.5, None) is None
    assert Every.read(["1 epoch", "2h"]).seconds(0.5, None) == 7200
