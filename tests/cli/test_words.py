"""How the words of a command line are read."""

import pytest
import typer

from windlass.cli.commands import app
from windlass.config.elsewhere import INSTEAD
from windlass.errors import UserError

PROGRAM = typer.main.get_command(app)
RESUMES = "the same command again resumes the run where it was interrupted"
QUIET, QUIETER = ("--quiet", "-q"), "telemetry.every=100 reports every 100 steps, and > FILE takes"
QUIETER += " the output"
LOUD, LOUDER = ("--verbose", "-v"), "telemetry.every=1 reports every step, and metrics.jsonl in the"
LOUDER += " run's folder has them all"


def read(name: str, *words: str) -> tuple[dict, list[str]]:
    """The options and places that were given to a command, and the keys."""
    command = PROGRAM.commands[name]  # pyright: ignore[reportAttributeAccessIssue]
    ctx = command.make_context(name, list(words))
    given = {key: x for key, x in ctx.params.items() if x not in (None, "", [])}
    return given, ctx.args


@pytest.mark.parametrize(
    "words",
    [
        ["quickstart", "train.steps=3", "--mesh.tensor", "2"],
        ["train.steps=3", "quickstart"],
        ["--mesh.tensor", "2", "quickstart", "train.steps=3"],
        ["--mesh.tensor=2", "quickstart"],
    ],
)
def test_keys_may_stand_anywhere_after_or_before_the_recipe(words):
    given, keys = read("train", *words)
    places = [word for word in words if word not in keys]
    assert [given["recipe"]] == places
    assert keys == [word for word in words if word not in places]


def test_a_prompt_is_not_taken_for_the_value_of_a_key():
    given, keys = read("generate", "mine", "--device", "cpu", "Once", "--tokens", "3")
    assert (given["run"], given["prompt"], given["tokens"]) == ("mine", "Once", "3")
    assert keys == ["--device", "cpu"]


def test_a_key_before_a_prompt_that_is_absent_is_not_the_prompt():
    given, keys = read("generate", "mine", "--device", "cpu")
    assert "prompt" not in given
    assert keys == ["--device", "cpu"]


def test_a_key_of_a_recipe_is_not_a_prompt_and_a_prompt_with_an_equals_sign_is():
    given, keys = read("generate", "mine", "device=cpu")
    assert "prompt" not in given and keys == ["device=cpu"]
    given, keys = read("generate", "model.vocab=3", "mine", "x=1", "by_device.cpu.mesh.fsdp=1")
    assert (given["run"], given["prompt"]) == ("mine", "x=1")
    assert keys == ["model.vocab=3", "by_device.cpu.mesh.fsdp=1"]
    given, keys = read("generate", "mine", "device = cpu")
    assert given["prompt"] == "device = cpu" and keys == []


def test_after_two_dashes_everything_has_its_place():
    given, keys = read("generate", "mine", "--tokens=3", "--", "--hello", "device=cpu")
    assert given["prompt"] == "--hello"
    assert keys == ["device=cpu"]
    assert read("generate", "--", "mine", "- one")[0]["prompt"] == "- one"


def test_the_last_value_of_an_option_wins_and_stops_are_collected():
    given, _ = read("generate", "mine", "--seed", "1", "--seed", "2", "--stop", "a", "--stop", "b")
    assert given["seed"] == "2"
    assert given["stop"] == ["a", "b"]


def test_a_number_below_zero_is_a_value():
    assert read("generate", "mine", "--temperature", "-1")[0]["temperature"] == "-1"
    assert read("train", "mine", "--optim.x", "-1")[1] == ["--optim.x", "-1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "--temprature", "1"], "no option --temprature; did you mean --temperature?"),
        (["generate", "--top_k=4"], "no option --top_k; did you mean --top-k?"),
        (["data", "x", "--rows"], "--rows has no value; write --rows N"),
        (["verify", "a", "b"], "b is one argument too many; usage: windlass verify RUN"),
        (["schema", "--device", "a"], "no option --device; windlass schema has --help"),
        (["runs", "-a"], "no option -a; windlass runs has --delete, --yes, --json and --help"),
        (["train", "x", "--devcie", "gpu"], "no option --devcie; did you mean --device?"),
        (
            ["data", "x", "--force"],
            "no option --force; windlass data has --rows, --split and --help. --KEY VALUE "
            "overrides a key of the recipe, as in --train.steps 500",
        ),
        *(
            (["train", "quickstart", option], f"no option {option}; {RESUMES}")
            for option in ("--resume", "--resume-from-checkpoint")
        ),
        *((["train", "quickstart", option], f"no option {option}; {QUIETER}") for option in QUIET),
        *((["train", "quickstart", option], f"no option {option}; {LOUDER}") for option in LOUD),
        (
            ["train", "quickstart", "resume=true"],
            f"1 problem in quickstart and the command line:\n  resume  unknown; {RESUMES}",
        ),
        *(
            (
                ["train", "quickstart", *words],
                "1 problem in quickstart and the command line:\n"
                f"  {words[0].lstrip('-').partition('=')[0]}  unknown; here it is {key}",
            )
            for words, key in (
                (["--batch-size", "4"], "train.batch"),
                (["--mesh-data", "2"], "mesh.data"),
                (["--mesh-fsdp", "4"], "mesh.fsdp"),
                (["--mesh-tp", "2"], "mesh.tensor"),
                (["--total-steps", "100"], "train.steps"),
                (["--checkpoint-dir", "checkpoints"], "run.dir"),
                (["--checkpoint-interval", "5000"], "checkpoint.every"),
                (["--log-interval", "100"], "telemetry.every"),
                (["--worker-buffer-size", "4"], "data.prefetch"),
                (["--kd-cache-dir", "caches"], "data.teacher"),
                (["--recovery-r", "8"], "adapter.rank"),
                (["--accumulation-steps", "8"], "train.accumulation"),
                (["--num-chips", "2"], "device.count"),
                (["--train-epochs", "5"], "train.epochs"),
                (["--device-type", "tpu"], "device.kind"),
                (["device_type=cuda"], "device.kind"),
                (["grad_clip_norm=1.0"], "optim.clip_norm"),
            )
        ),
        (
            ["train", "quickstart", "--device", "cuda"],
            "1 problem in quickstart and the command line:\n"
            '  device.kind  is "cuda"; here it is gpu',
        ),
        *(
            (["train", "quickstart", *words], f"no option {words[0]}; {INSTEAD[name]}")
            for words, name in (
                (["--tpu"], "tpu"),
                (["--from-scratch"], "from_scratch"),
                (["--use-small-model"], "use_small_model"),
                (["--dataset", "OWNER/NAME"], "dataset"),
                (["--dataset-name", "x"], "dataset_name"),
                (["--cache-dir", "caches"], "cache_dir"),
                (["--run-training"], "run_training"),
                (["--debug"], "debug"),
            )
        ),
    ],
)
def test_words_that_no_command_takes_are_refused(program, words, said):
    assert program(*words) == (2, "", f"{said}\n")


def test_a_section_whose_name_resembles_an_option_is_still_a_key():
    assert read("generate", "mine", "--tokenizer", "byte")[1] == ["--tokenizer", "byte"]


def test_a_refused_word_is_not_run():
    with pytest.raises(UserError):
        read("data", "quickstart", "--splits", "test")
