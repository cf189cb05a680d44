"""Every command, as it is typed and as it is printed."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

import windlass
from tests import trained
from windlass import seal
from windlass.cli.commands import app
from windlass.config import listing, read, shipped
from windlass.config.sampling import Sampling
from windlass.starting.describe import describe

COMMANDS = [
    "train",
    "plan",
    "teach",
    "new",
    "data",
    "evaluate",
    "generate",
    "chat",
    "export",
    "launch",
    "verify",
]
COMMANDS += ["runs", "report", "compare", "schema", "prices", "doctor"]
ALL = f"{', '.join(COMMANDS[:-1])} and {COMMANDS[-1]}"


def test_alone_it_explains_itself(program):
    alone = program()
    assert alone == program("--help") == program("-h")
    assert alone.code == 0
    listed = re.findall(r"^  (\w+)  ", alone.out, re.MULTILINE)
    assert listed == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_teaches_by_examples_that_fit_a_terminal(program, name):
    code, out, err = program(name, "--help")
    assert (code, err) == (0, "")
    assert re.search(rf"^  windlass {name}", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80


def test_the_version_is_that_of_the_package(program):
    code, out, _ = program("--version")
    assert code == 0
    assert out.startswith(f"windlass {windlass.__version__}, jax ")


def test_train_alone_lists_every_recipe_with_its_first_line(program):
    code, out, _ = program("train")
    title, *lines = out.splitlines()
    assert code == 0
    assert title == "windlass train RECIPE, where RECIPE is a YAML file or one of"
    for line, (name, path) in zip(lines, shipped().items(), strict=True):
        assert line.split(maxsplit=1) == [name, path.read_text().splitlines()[0].lstrip("# ")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "nope",
            f"windlass has no command nope; there are {ALL}",
        ),
        (
            "trian",
            f"windlass has no command trian; did you mean train? there are {ALL}",
        ),
        ("--nope", "no such option: --nope; windlass --help says what there is"),
        ("data", f"which recipe? A YAML file, or {listing(shipped())}"),
        (
            "train quickstat",
            'no file or recipe named "quickstat"; did you mean quickstart? '
            f"there are {listing(shipped(), 'and')}",
        ),
        ("data quickstart --rows x", '--rows is "x"; it must be a whole number'),
        ("data quickstart --rows -1", "--rows is -1; it must be 0 or more"),
        ("data quickstart --split tset", '--split is "tset"; did you mean test?'),
        (
            "data quickstart --split dev --rows 1.5",
            "--rows is 1.5; it must be a whole number\n"
            '--split is "dev"; it must be train, validation or test',
        ),
        (
            "data quickstart --split test data.source.count=20 data.validation=0",
            "there are no test documents; data.test=0.05 holds out one in twenty",
        ),
        ("evaluate nowhere --step x", '--step is "x"; it must be a whole number or null'),
        ("generate nowhere --temperature hot", '--temperature is "hot"; it must be a number'),
        ("generate nowhere --weights bst", '--weights is "bst"; did you mean best?'),
        ("generate nowhere --top-k 0", "--top-k is 0; it is a number of tokens, 1 or more"),
        (
            "verify nowhere",
            "nowhere is not a run: there is no such folder; "
            "nothing is in runs/ here yet, and `windlass train RECIPE` makes a run",
        ),
        (
            "train quickstart optim.learning_rte=1 --train.steps",
            "2 problems in quickstart and the command line:\n"
            "  train.steps         has no value; write train.steps=value\n"
            "  optim.learning_rte  unknown; did you mean learning_rate?",
        ),
    ],
)
def test_what_cannot_be_done_is_said_alone(program, words, said):
    assert program(*words.split()) == (2, "", f"{said}\n")


def test_rows_are_shown_whole_and_without_colour_in_a_pipe(program, place):
    code, out, err = program("data", "tiny.yaml", "--rows", "2", cwd=place)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert len(re.findall("^row ", out, re.MULTILINE)) == 2
    assert max(map(len, out.splitlines())) > 150  # a document is a line
    assert re.search(r"validation .* 10 ", out)


def test_an_evaluation_is_printed_a_fact_in_a_line(program, place):
    code, out, err = program("evaluate", "--train.batch", "3", "tiny", "device.count=1", cwd=place)
    run = trained.only_run(place)
    assert (code, err) == (0, "")
    facts = dict(line.split(maxsplit=1) for line in out.splitlines() if "cross" not in line)
    assert (
        facts | {"run": f"runs/{run.name}", "split": "validation", "weights": "last", "step": "4"}
        == facts
    )
    found = windlass.evaluate(run)
    assert facts["loss"] == f"{found['loss']:.4f}"
    assert "perplexity" in facts


def test_a_text_in_a_pipe_is_the_prompt_and_what_follows_it(program, place):
    words = ["generate", "tiny", "--tokens", "9", "Once", "--seed", "2", "--device.count=1"]
    code, out, err = program(*words, cwd=place)
    assert (code, err) == (0, "")
    (text,) = windlass.generate("tiny", "Once", tokens=9, seed=2)
    assert out == f"Once{text}\n"


def test_every_prompt_of_a_file_is_a_line_of_json_as_the_call_gives_it(program, place, tmp_path):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    rows = [{"id": number, "prompt": word} for number, word in enumerate(("Once", "Ada", "Tom"))]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["generate", "tiny", "--file", str(file), "--batch", "2", "--tokens", "9"]
    code, printed, err = program(*words, cwd=place)
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in printed.splitlines()]
    texts = windlass.generate("tiny", [row["prompt"] for row in rows], tokens=9, batch=2)
    assert lines == [row | {"text": text} for row, text in zip(rows, texts, strict=True)]
    assert program(*words, "--out", str(out), cwd=place) == (0, "", "")
    assert out.read_text() == printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("Once --file p.txt", "--file is p.txt, and a prompt is given too; leave one of them out"),
        ("--out o.jsonl", "--out is o.jsonl; it needs --file, and > is for one prompt"),
        ("--file p.txt --batch 0", "--batch is 0; it must be 1 or more"),
        (
            "--file p.txt --out no/o.jsonl",
            "--out is no/o.jsonl, which cannot be written: No such file or directory",
        ),
        ("--file q.txt", "--file is q.txt, which cannot be read: No such file or directory"),
    ],
)
def test_prompts_that_cannot_be_read_or_written_on_from_are_refused(program, tmp_path, words, said):
    (tmp_path / "p.txt").write_text("Once")
    assert program("generate", "nowhere", *words.split()) == (2, "", f"{said}\n")


def test_the_options_of_generate_default_to_those_of_a_call():
    command = typer.main.get_command(app).commands["generate"]  # pyright: ignore
    names = Sampling.__dataclass_fields__
    defaults = {param.name: param.default for param in command.params if param.name in names}
    assert len(defaults) == len(names)
    assert read(Sampling, defaults | {"stop": []}) == Sampling()


def test_a_damaged_checkpoint_is_named_and_the_exit_code_is_1(program, place, tmp_path):
    run = trained.only_run(place)
    good = program("verify", run.name, cwd=place)
    assert good == (0, _verified(place, f"runs/{run.name}", "good"), "")
    shutil.copytree(run, tmp_path / "runs" / run.name)
    manifest = tmp_path / f"runs/{run.name}/checkpoints/2/manifest/metadata"
    manifest.write_bytes(b" " + manifest.read_bytes()[1:])
    damaged = program("verify", "tiny", cwd=tmp_path)
    assert damaged.code == 1
    assert "  step 2: damaged (" in damaged.out
    assert "manifest/metadata" in damaged.out


@pytest.mark.parametrize(
    "words",
    [["evaluate"], ["generate", "Once"], ["chat"], ["export", "--to", "exported"]],
    ids=lambda words: words[0],
)
def test_a_damaged_newest_checkpoint_is_no_reason_to_use_an_older_one(
    program, place, tmp_path, words
):
    run = trained.only_run(place)
    folder = f"runs/{run.name}/checkpoints"
    shutil.copytree(run, tmp_path / "runs" / run.name)
    shutil.copy(place / trained.CORPUS, tmp_path)
    manifest = tmp_path / folder / "4/manifest/metadata"
    manifest.write_bytes(b" " + manifest.read_bytes()[1:])
    command, *rest = words
    ended = program(command, "tiny", *rest, cwd=tmp_path)
    assert ended == (
        2,
        "",
        f"checkpoint at step 4 in {folder} is damaged (file manifest/metadata); good there: steps "
        f"0, 2. Once {folder}/4 is moved away, step 2 is used; a command that has --step takes "
        "--step 2, too\n",
    )
    if command != "chat":  # the run has no chat template
        assert program(command, "tiny", *rest, "--step", "2", cwd=tmp_path).code == 0


def _verified(place: Path, run: str, state: str) -> str:
    prepared = seal.opened(place / run / seal.NAME)["prepared"]
    assert len(prepared) == 3  # tokens, and the rows of training and validation
    names = [*(f"step {n}" for n in (0, 2, 4)), "recipe and tokenizer"]
    names += [f"prepared data {folder}" for folder in prepared]
    return "\n".join([run, *(f"  {name}: {state}" for name in names), ""])


def test_the_schema_is_printed_as_json(program):
    code, out, _ = program("schema")
    assert code == 0
    assert json.loads(out) == windlass.schema()


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    shell = f"{sys.executable} -m windlass schema | head -1"
    done = subprocess.run(
        shell,
        shell=True,
        cwd=tmp_path,
        env=trained.environment(),
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.long
def test_on_a_terminal_the_prompt_stands_out_and_the_text_cannot_move_it(place):
    ours, theirs = pty.openpty()
    words = ["generate", "tiny", "Once\tmore", "--tokens", "40", "--temperature", "3"]
    process = subprocess.Popen(
        [sys.executable, "-m", "windlass", *words],
        cwd=place,
        env=trained.environment() | {"TERM": "xterm"},
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    shown = _all_of(ours)
    assert process.communicate()[1] == b""
    assert process.returncode == 0
    prompt, after = shown.rsplit("\x1b[0m", 1)
    assert prompt.startswith("\x1b[1mOnce")
    assert all(letter.isprintable() or letter in "\r\n\t" for letter in after)


def _all_of(terminal: int) -> str:
    shown = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # how Linux says that the other side was closed
            piece = b""
        if not piece:
            os.close(terminal)
            return shown.decode()
        shown += piece


@pytest.mark.parametrize(
    ("words", "doing"),
    [
        (["data", "tiny.yaml"], "preparing the data"),
        pytest.param(["evaluate", "tiny"], "evaluating", marks=pytest.mark.long),
    ],
)
def test_ctrl_c_ends_a_long_reading_with_one_line(place, tmp_path, words, doing):
    large = tmp_path / "large.jsonl"
    large.write_text('{"text": "Once upon a time there was a dog."}\n' * 1_000_000)
    cache = tmp_path / "cache"
    process = subprocess.Popen(
        [sys.executable, "-m", "windlass", *words, f"data.source.path={large}"],
        cwd=place,
        env=trained.environment() | {"WINDLASS_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not any(cache.glob("building/*/*")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert err == f"Ctrl-C while {doing}: nothing was lost\n"


@pytest.mark.long
def test_ctrl_c_ends_a_text_with_one_line(place):
    process = subprocess.Popen(
        [sys.executable, "-m", "windlass", "generate", "tiny", "Once", "--tokens", "9999"],
        cwd=place,
        env=trained.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(4) == b"Once"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err == b"Ctrl-C while generating: nothing was lost\n"


def test_a_new_recipe_is_written_trains_the_same_and_is_not_overwritten(program, tmp_path):
    done = program("new", "mine.yaml", "--from", "quickstart")
    assert (done.code, done.out) == (
        0,
        "written to mine.yaml; edit it, and windlass train mine.yaml trains it\n",
    )
    there = tmp_path / "mine.yaml"
    assert there.read_text().startswith(
        "# Made from quickstart. `windlass train mine.yaml` trains it.\n"
    )
    assert describe(there).run == describe("quickstart").run
    again = program("new", "mine.yaml", "--from", "chat-lora")
    assert (again.code, again.err) == (
        2,
        "mine.yaml is there already, and is left as it is; name another file\n",
    )
    assert program("new", "mine").err == "mine is no name of a recipe; mine.yaml would do\n"
    assert program("new").err == "which file? windlass new mine.yaml writes one\n"
