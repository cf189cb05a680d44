"""Whoever writes the key of another trainer is told ours, and the reference names theirs."""

import re

import pytest

from docs.write import _section
from windlass.config import load
from windlass.config.elsewhere import ELSEWHERE, INSTEAD, OURS, also
from windlass.config.sections import fields
from windlass.run import Run

# Of each open set the member that has the keys, where the usual one has not.
MEMBERS = {"model.family": "gemma", "objective.kind": "preference", "data.format.kind": "chat"}
NEXT_TOKEN = {"objective.kind": "next_token"}
LLAMA = {"model.family": "llama"}
RECURSIVE = {"model.family": "recursive", "objective.kind": "halting"}
# Keys that other members have.
OTHERS = {
    **dict.fromkeys(("model.h_cycles", "model.l_cycles", "model.passes"), RECURSIVE),
    **dict.fromkeys(("model.refinement", "objective.exploration", "objective.minimum"), RECURSIVE),
    "model.tied": LLAMA,
    "model.no_rope_every": {"model.family": "smollm3"},
    "model.rotary_share": {"model.family": "phi3"},
}


def problem(key: str, **changes: str) -> str:
    """What is said of one key that no recipe has."""
    with pytest.raises(Exception) as refused:
        load({**MEMBERS, **changes, key: 1}).read(Run, None)
    (line,) = re.findall(rf"^  {re.escape(key)} +(.*)$", str(refused.value), re.MULTILINE)
    return line


@pytest.mark.parametrize("name", OURS)
def test_a_key_of_another_trainer_is_refused_with_ours(name):
    key = OURS[name]
    said = problem(f"train.{name}", **OTHERS.get(key, {}))
    assert said == f"unknown; here it is {key}"


def test_the_same_without_a_section_and_in_the_right_one():
    assert problem("lr") == "unknown; here it is optim.learning_rate"
    assert problem("adapter.lora_alpha") == "unknown; here it is adapter.alpha"
    assert problem("model.hidden_size") == "unknown; here it is model.embed"
    assert problem("BATCH_SIZE") == "unknown; here it is train.batch"  # as a notebook has it


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("device", "cuda", 'is "cuda"; here it is gpu'),
        ("device.kind", "cuda:0", 'is "cuda:0"; here it is gpu'),
        ("device", "xla", 'is "xla"; here it is tpu'),
        ("precision.compute", "bf16", 'is "bf16"; here it is bfloat16'),
        (
            "checkpoint",
            "runs/best.pt",
            'is "runs/best.pt"; it must be a section with every and keep; model.run, model.path or '
            "model.hub names the weights to start from",
        ),
    ],
)
def test_a_value_of_another_trainer_is_refused_with_ours(key, value, said):
    with pytest.raises(Exception) as refused:
        load({**MEMBERS, key: value}).read(Run, None)
    assert f"  {said}\n" in f"{refused.value}\n"


@pytest.mark.parametrize("name", INSTEAD)
def test_an_option_of_another_trainer_that_is_no_key_is_refused_with_advice(name):
    expected = f"here it is {OURS[name]}" if name in OURS else INSTEAD[name]
    assert problem(name) == f"unknown; {expected}"


def test_what_the_family_does_not_have_is_not_offered():
    assert "model.window" not in problem("model.sliding_window", **LLAMA)


def test_a_required_key_by_another_name_is_one_problem():
    with pytest.raises(Exception) as refused:
        load({**MEMBERS, "model.hidden_size": 64}).read(Run, None)
    assert "model.embed " not in str(refused.value)


def test_the_reference_names_a_key_as_others_do():
    lines = [
        line
        for name, (_, annotation) in fields(Run).items()
        for text in _section(name, annotation, "##")
        for line in text.splitlines()
    ]
    for key, names in ELSEWHERE.items():
        rows = [line for line in lines if line.startswith(f"| `{key}` ")]
        rows += [line for line in lines if line.startswith(f"`{key}` is ")]
        assert rows, key
        assert all(", ".join(names) in row for row in rows), key
    assert also("train.batch") == "elsewhere global_batch_size, train_batch_size, batch_size"
    assert also("train.seed") == ""
