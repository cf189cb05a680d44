"""What a tree is read into, and every way it can be refused."""

import pytest

from windlass.config import read, to_yaml, tree
from windlass.config.recipe import load


def with_(whole, **changes):
    return load({**whole, **changes}).merged(None)


def test_every_problem_is_in_one_error_under_its_full_key(run, whole, refusal):
    given = {
        "model": {"family": "qwen3", "layers": 2.5, "theta": "high"},
        "optim": {"learning_rte": 3e-4, "decay_fraction": 0.5},
        "train": {"batch": True, "strict": 1, "steps": None, "patterns": ["a", 3], "rows": "aut"},
        "device": "tpi",
        "parts": [{"path": "a"}, {"weight": 2}],
        "weights": {"a": 1, "b": "x"},
        "wieghts": 3,
        "learning_rate": 3,
    }
    assert (
        refusal(read, run, given, origin="toy.yaml")
        == """\
13 problems in toy.yaml:
  wieghts             unknown; did you mean weights?
  learning_rate       unknown; did you mean optim.learning_rate?
  model.layers        is 2.5; it must be a whole number
  model.theta         is "high"; it must be a number
  optim.learning_rte  unknown; did you mean learning_rate?
  train.batch         is true; it must be a whole number
  train.steps         is null; it must be a whole number
  train.strict        is 1; it must be true or false
  train.patterns.1    is 3; it must be text
  train.rows          is "aut"; did you mean auto?
  device.kind         is "tpi"; did you mean tpu?
  parts.1.path        is required: text
  weights.b           is "x"; it must be a number"""
    )


def test_an_unknown_key_like_no_other_is_met_with_the_keys_there_are(run, whole, refusal):
    assert (
        refusal(read, run, with_(whole, **{"device.zzz": 1, "empty.zzz": 1}))
        == """\
2 problems in the recipe:
  device.zzz  unknown; it can be kind or count
  empty.zzz   unknown; it can be nothing"""
    )


def test_a_value_like_no_other_is_met_with_the_values_there_are(run, whole, refusal):
    assert (
        refusal(read, run, with_(whole, device="abacus", **{"train.rows": []}))
        == """\
2 problems in the recipe:
  train.rows   is []; it must be a whole number or auto
  device.kind  is "abacus"; it must be auto, tpu, gpu or cpu"""
    )


def test_what_is_required_is_named_with_what_it_must_be(run, refusal):
    assert (
        refusal(read, run, {"optim": None})
        == """\
2 problems in the recipe:
  model                is required: a section with family: llama or qwen3
  optim.learning_rate  is required: a number"""
    )


def test_a_name_that_is_not_in_the_folder_is_met_with_the_folder(run, whole, refusal):
    assert (
        refusal(read, run, with_(whole, model="quen3"))
        == """\
1 problem in the recipe:
  model.family  is "quen3"; did you mean qwen3? there are llama and qwen3"""
    )
    assert (
        refusal(read, run, {**whole, "model": {"layers": 2}})
        == """\
1 problem in the recipe:
  model.family  is required: llama or qwen3"""
    )


def test_a_value_of_the_wrong_shape_is_refused_with_the_right_one(run, whole, refusal):
    wrong = with_(whole, train=3, parts="a", weights=[1], teacher=2, **{"train.batch.size": 3})
    wrong["optim"] = {"learning_rate": {"peak": 1}}
    assert (
        refusal(read, run, wrong)
        == """\
5 problems in the recipe:
  optim.learning_rate  is a mapping; it must be a number
  train                is 3; it must be a section with batch, steps, strict, patterns and rows
  parts                is "a"; it must be a list, each item a section with path and weight
  teacher              is 2; it must be a section with path and weight
  weights              is [1]; it must be a mapping, each value a number, or null"""
    )


def test_a_long_value_is_cut_short(run, whole, refusal):
    assert (
        refusal(read, run, with_(whole, **{"train.batch": "x" * 99}))
        == f"""\
1 problem in the recipe:
  train.batch  is "{"x" * 56}...; it must be a whole number"""
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_is_finite(run, whole, refusal, value):
    message = refusal(read, run, with_(whole, **{"optim.learning_rate": value}))
    assert "optim.learning_rate  is" in message and "it must be a number" in message


def test_a_section_refuses_under_the_field_its_message_opens_with(run, whole, refusal):
    assert (
        refusal(read, run, with_(whole, **{"optim.decay_fraction": 2}))
        == """\
1 problem in the recipe:
  optim.decay_fraction  is 2.0; it is a share, 0 to 1"""
    )


def test_a_refusal_of_the_whole_is_under_the_recipe(run, whole, refusal):
    given = with_(whole, parts=[{"path": "a"}], teacher={"path": "b"})
    assert (
        refusal(read, run, given)
        == """\
1 problem in the recipe:
  the recipe  a teacher and parts exclude each other"""
    )


def test_checks_across_sections_run_once_every_key_is_in_order(run, whole, refusal):
    def check(run):
        return [
            ("train.batch", f"is {run.train.batch}; it must be model.layers, {run.model.layers}")
        ]

    assert (
        refusal(read, run, whole, checks=[check])
        == """\
1 problem in the recipe:
  train.batch  is 8; it must be model.layers, 2"""
    )
    assert "train.batch" not in refusal(read, run, {**whole, "x": 1}, checks=[check])


@pytest.mark.parametrize("value", [10, 10.0, "10", "1e1", "1_0"])
def test_a_whole_number_may_be_written_in_any_way_that_is_whole(run, whole, value):
    found = read(run, with_(whole, **{"train.batch": value, "train.rows": value}))
    assert (found.train.batch, type(found.train.batch)) == (10, int)
    assert (found.train.rows, type(found.train.rows)) == (10, int)


@pytest.mark.parametrize("value", [0.0003, "3e-4", "0.0003"])
def test_a_number_may_be_written_with_an_exponent_and_no_point(run, whole, value):
    assert read(run, with_(whole, **{"optim.learning_rate": value})).optim.learning_rate == 3e-4


def test_a_bare_value_is_the_shorthand_field_of_its_section(run, whole):
    assert read(run, {**whole, "device": "tpu"}).device.kind == "tpu"


def test_an_empty_section_is_its_defaults_and_an_optional_one_is_absent(run, whole):
    found = read(run, {**whole, "train": None, "teacher": None})
    assert found.train.batch == 8 and found.teacher is None


def test_a_run_written_down_reads_back_the_same(run, whole, tmp_path):
    more = {
        "parts": [{"path": "1e6"}, {"path": "no"}, {"path": "007"}, {"path": "null"}],
        "optim.learning_rate": 1e-8,
        "optim.clip_norm": None,
        "optim.name": "naïve: yes",
        "weights": {"a": 1e22, "b": 2},
        "train.patterns": ["*.bias", "2024-01-01", "1:30"],
    }
    found = read(run, with_(whole, **more))
    assert read(run, tree(found)) == found
    path = tmp_path / "stored.yaml"
    path.write_text(to_yaml(found), encoding="utf-8")
    assert load(path).read(run, None) == found
    assert tree(found)["model"] == {"family": "qwen3", "layers": 2, "theta": 1e4}
