"""A file, its by_device and the command line: which one wins, and what each can get wrong."""

from itertools import pairwise

import pytest

from windlass.config import Written, differences, load, section
from windlass.config import recipe as recipes
from windlass.errors import UserError

RECIPE = """\
model: {family: qwen3, layers: 2, theta: 1e4}
optim.learning_rate: 1e-3
train:
  batch: 32
by_device:
  tpu:
    train.batch: 64
    optim: {learning_rate: 1.2e-3}
  gpu: {train.steps: 7}
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "toy.yaml").write_text(text, encoding="utf-8")
        return "toy.yaml"

    return write


def test_a_kind_of_device_doubles_the_batch_and_raises_the_learning_rate(run, file):
    layers = load(file(RECIPE))
    plain, special = layers.read(run, "cpu"), layers.read(run, "tpu")
    assert (plain.train.batch, plain.optim.learning_rate) == (32, 1e-3)
    assert special.train.batch == 2 * plain.train.batch
    assert special.optim.learning_rate == pytest.approx(1.2 * plain.optim.learning_rate)
    assert differences(layers.merged(None), layers.merged("tpu")) == [
        ("optim.learning_rate", 1e-3, 1.2e-3),
        ("train.batch", 32, 64),
    ]


def test_the_command_line_wins_over_the_device_and_the_device_over_the_file(run, file):
    layers = load(file(RECIPE), ["train.batch=5"])
    found = layers.read(run, "tpu")
    assert (found.train.batch, found.optim.learning_rate) == (5, 1.2e-3)
    assert layers.read(run, "cpu").train.batch == 5


@pytest.mark.parametrize(
    "words",
    [
        ["train.batch=5", "optim.clip_norm=null"],
        ["--train.batch=5", "--optim.clip_norm=null"],
        ["--train.batch", "5", "--optim.clip_norm", "null"],
        ["train={batch: 5}", "--optim", "{clip_norm: null}"],
        ["train.batch=4", "train.batch=5", "optim.clip_norm="],
    ],
)
def test_a_key_may_be_given_on_the_command_line_in_any_spelling(run, file, words):
    found = load(file(RECIPE), words).read(run, "cpu")
    assert (found.train.batch, found.optim.clip_norm) == (5, None)
    assert found.optim.learning_rate == 1e-3


def test_text_on_the_command_line_may_hold_any_mark(run, file):
    words = ["optim.name=Tom: hello = you", "train.patterns=[a, '*.b']"]
    found = load(file(RECIPE), words).read(run, "cpu")
    assert found.optim.name == "Tom: hello = you"
    assert found.train.patterns == ("a", "*.b")


def test_a_number_may_be_negative_on_the_command_line(run, file):
    assert load(file(RECIPE), ["--train.steps", "-3"]).read(run, "cpu").train.steps == -3


def test_a_device_for_one_kind_may_be_changed_on_the_command_line(run, file):
    assert load(file(RECIPE), ["by_device.tpu.train.batch=99"]).read(run, "tpu").train.batch == 99


@pytest.mark.parametrize(
    "text, words, expected",
    [
        ("device: tpu", ["device.count=4"], ("tpu", 4)),
        ("device: {kind: tpu, count: 4}", ["device=cpu"], ("cpu", 4)),
        ("device: tpu", ["device.kind=cpu"], ("cpu", None)),
        ("device: tpu\ndevice.count: 2", [], ("tpu", 2)),
    ],
)
def test_a_bare_value_and_the_keys_of_its_section_go_together(run, file, text, words, expected):
    device = load(file(f"{RECIPE}{text}\n"), words).read(run, "cpu").device
    assert (device.kind, device.count) == expected


def test_one_section_can_be_read_before_the_device_is_known(run, file):
    schema = run.__annotations__["device"]
    assert load(file(RECIPE), ["device=gpu"]).peek("device", schema) == schema(kind="gpu")
    assert load(file(RECIPE)).peek("device", schema) == schema()
    assert load(file(RECIPE), ["device=gqu"]).peek("device", schema) is None


def test_the_file_and_the_command_line_are_refused_together(run, file, refusal):
    text = """\
model: {family: qwen3, layers: 2, theta: 1e4}
optim: {learning_rate: 1e-3}
optim.learning_rate: 2e-3
train: {batch: x}
train: {batch: 3}
by_device:
  tpi: {}
  tpu: {train.batch: y, device: cpu}
  gpu: {train.bach: 3}
  cpu: 3
"""
    words = ["stray", "--model.theta", "--optim.clip=2", "parts=[a", "=3", "weights={a: 1, a: 2}"]
    refused = refusal(load(file(text), words).read, run, "tpu")
    assert (
        refused
        == """\
13 problems in toy.yaml and the command line:
  train                      is given twice, on lines 4 and 5
  optim.learning_rate        is given twice
  stray                      has no value; write stray=value
  model.theta                has no value; write model.theta=value
  parts                      is "[a"; it does not parse: line 1, column 3: \
expected ',' or ']', but got '<stream end>'
  =3                         has no value; write key=value
  weights.a                  is given twice, on lines 1 and 1
  by_device.tpi              unknown; did you mean tpu?
  by_device.tpu.device       cannot be set here: it decides which of these apply
  by_device.cpu              is 3; it must be a mapping of keys
  optim.clip                 unknown; did you mean clip_norm?
  by_device.tpu.train.batch  is "y"; it must be a whole number
  by_device.gpu.train.bach   unknown; did you mean batch?"""
    )


def test_checks_across_sections_are_told_under_their_own_key(run, file, refusal):
    def check(run):
        return [("train.batch", f"is {run.train.batch}; it is too much")]

    assert (
        refusal(load(file(RECIPE)).read, run, "tpu", checks=[check])
        == """\
1 problem in toy.yaml:
  train.batch  is 64; it is too much"""
    )


def test_what_every_kind_of_device_says_need_not_be_said_for_all(run, file):
    text = RECIPE.replace("optim.learning_rate: 1e-3", "optim: {}")
    assert load(file(text)).read(run, "tpu").optim.learning_rate == 1.2e-3


def test_by_device_is_a_mapping(run, file, refusal):
    assert (
        refusal(load(file(f"{RECIPE.partition('by_device')[0]}by_device: tpu")).read, run, "tpu")
        == """\
1 problem in toy.yaml:
  by_device  is "tpu"; it must be a mapping of tpu, gpu or cpu"""
    )


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "train:\n  batch: 4: 5\n",
            "toy.yaml does not parse: line 2, column 11: mapping values are not allowed here\n"
            "    batch: 4: 5\n"
            "            ^",
        ),
        (
            "train: [1,\n",
            "toy.yaml does not parse: line 2, column 1: expected the node content, "
            "but found '<stream end>'\n"
            "  \n"
            "  ^",
        ),
        (
            "train:\n\tbatch: 4\n",
            "toy.yaml does not parse: line 2, column 1: "
            "found character '\\t' that cannot start any token\n"
            "  \tbatch: 4\n"
            "  ^",
        ),
        (
            "? [a, b]\n: 3\n",
            "toy.yaml does not parse: line 1, column 3: a key is a word\n  ? [a, b]\n    ^",
        ),
        (
            "train: \x00",
            "toy.yaml does not parse: line 1, column 8: character 0x0 is not text",
        ),
        ("[1, 2]", "toy.yaml holds [1, 2]; a recipe is a mapping of sections"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_with_the_place(file, refusal, text, message):
    assert refusal(load, file(text)) == message


def test_a_file_that_is_not_text_is_refused(tmp_path, refusal):
    path = tmp_path / "toy.yaml"
    path.write_bytes(b"a: \xff")
    assert refusal(load, path) == f"{path} is not UTF-8 text: byte 3"


def test_a_recipe_is_found_by_path_or_by_name(tmp_path, monkeypatch, refusal):
    shipped = {"quickstart": tmp_path / "quickstart.yaml", "other": tmp_path / "other.yaml"}
    shipped["quickstart"].write_text("train: {batch: 3}")
    monkeypatch.setattr(recipes, "shipped", lambda: shipped)
    layers = load("quickstart", ["train.steps=1"])
    assert (layers.name, layers.origin) == ("quickstart", "quickstart and the command line")
    assert load(shipped["quickstart"]).name == "quickstart"
    assert (
        refusal(load, "quikstart")
        == 'no file or recipe named "quikstart"; did you mean quickstart? '
        "there are quickstart and other"
    )
    assert refusal(load, tmp_path) == f"{tmp_path} is a folder; a recipe is a YAML file"


def test_words_stay_words_and_numbers_are_numbers(file):
    text = (
        "a: no\nb: 3e-4\nc: 1:30\nd: 010\ne: 2024-01-01\nf: 1_000\ng: ~\nh: True\ni: -.5\nj: .inf\n"
    )
    assert load(file(text)).merged(None) == {
        "a": "no",
        "b": 3e-4,
        "c": "1:30",
        "d": "010",
        "e": "2024-01-01",
        "f": 1000,
        "g": None,
        "h": True,
        "i": -0.5,
        "j": float("inf"),
    }


def test_loading_changes_nothing_in_the_mapping_it_is_given():
    given = {"train.batch": 3, "by_device": {"tpu": {"device": "cpu"}}, "parts": [{"a.b": 1}]}
    assert load(given).merged(None) == {"train": {"batch": 3}, "parts": [{"a": {"b": 1}}]}
    assert given == {
        "train.batch": 3,
        "by_device": {"tpu": {"device": "cpu"}},
        "parts": [{"a.b": 1}],
    }


def test_differences_are_told_by_dotted_key_with_both_values():
    a = {"train": {"batch": 1, "steps": 2}, "x": [1], "gone": {}}
    b = {"train": {"batch": 3, "steps": 2}, "x": [1, 2], "new": {"key": 0}}
    assert differences(a, b) == [
        ("train.batch", 1, 3),
        ("x", [1], [1, 2]),
        ("gone", {}, None),
        ("new.key", None, 0),
    ]
    assert differences(a, a) == []


NINE = "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"a: &a [x, x, x, x, x, x, x, x, x]\n{NINE}", "more than 5,000 values"),
        ("a: &a {b: *a}\n", "more than 5,000 values|nested too deeply"),
        ("a: &a [*a]\n", "more than 5,000 values|nested too deeply"),
        ("[" * 200_000, "has 200,000 brackets that open; 5,000 are read at most"),
        ("[" * 4_000, "does not parse: it is nested too deeply"),
        ("{a: " * 5_000, "does not parse: it is nested too deeply"),
        ("x" * 300_000, "has 300,000 characters, and a recipe a few thousand; at most 262,144 are"),
        (f"{'.'.join('a' * 300)}: 1", "has 300 parts; a key has at most 20"),
        (f"train: {{steps: {'9' * 5000}}}", "99 cannot be read as int"),
        ("!!timestamp x", "x cannot be read as timestamp"),
        ("a: !!int x", "x cannot be read as int"),
    ],
)
def test_a_recipe_that_would_fill_the_memory_or_the_stack_is_refused(text, why):
    with pytest.raises(UserError, match=why):
        load(Written("mine", text)).read(Nothing, None)


@section
class Nothing:
    """A section without keys."""


def test_a_number_of_too_many_digits_is_text_on_the_command_line():
    assert load({}, [f"a={'9' * 5000}"]).command_line == {"a": "9" * 5000}
