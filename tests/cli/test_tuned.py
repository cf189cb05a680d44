"""A model that is tuned on chats by one command: resumed, talked to and exported."""

import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import windlass
from tests import published, trained
from tests.cli.conftest import Ended
from tests.formats.templates import QWEN3
from tests.training.campaign import weights
from windlass.checkpoint.store import folder_of, steps_in
from windlass.hub.chat_template import EMPTY_THOUGHT

TRAIN = ["train", "--model", "model", "--data", "chats.jsonl"]
RUN = "model-chats"
ALONE = "device.count=1"  # as it was trained, on one of the devices here
SHORT = ["--tokens", "8", "--seed", "3"]


@pytest.fixture(scope="module")
def spoken(tmp_path_factory) -> Path:
    """A folder with a model, chats, and the run that two words made of them."""
    folder = workplace(tmp_path_factory.mktemp("spoken"))
    (folder / "output.txt").write_text(trained.windlass(folder, *TRAIN).stdout)
    return folder


def workplace(folder: Path) -> Path:
    published.write(folder / "model")
    published.write_chats(folder / "chats.jsonl", 64)
    return folder


@pytest.fixture
def say(program, spoken, monkeypatch):
    def call(text: str, *words: str) -> Ended:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return program("chat", RUN, ALONE, *words, cwd=spoken)

    return call


def test_the_recipe_is_printed_with_its_reasons_and_the_run_says_what_comes_next(spoken):
    printed = (spoken / "output.txt").read_text()
    chosen, _, told = printed.partition("--save FILE writes this recipe")
    assert chosen.startswith(
        "# Chosen by\n#\n#   windlass train --model model --data chats.jsonl\n"
    )
    assert "\nmodel:\n  path: model\n" in chosen
    assert "  format: chat  # examples look like chats: messages\n" in chosen
    assert "  length: 128  # the longest of 64 examples has 49 tokens\n" in chosen
    assert "\nlength       96 steps, 3 epochs of 32\n" in told
    assert f"\nnext         windlass chat runs/{trained.only_run(spoken).name}\n" in told


@pytest.mark.long
def test_a_tuned_reasoning_model_answers_to_its_default_prompt_as_without_thinking(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    published.write(tmp_path / "model", "qwen3", QWEN3.source)
    published.write_chats(tmp_path / "chats.jsonl", 10)
    keys = ["adapter=null", "optim.learning_rate=1e-2", "train.epochs=60", "train.batch=5"]
    windlass.train(windlass.recipe("model", "chats.jsonl", [ALONE, *keys, "data.packing=none"]))
    run = trained.only_run(tmp_path)
    default, without = (
        windlass.chat(run, [ALONE], thinking=way, temperature=0, tokens=40)
        for way in ("none", "off")
    )
    for number in range(10):
        question = f"What comes after {number}?"
        answer = without(question)
        assert answer.endswith(" does.") and default(question) == f"{EMPTY_THOUGHT}{answer}"
        default.reset()
        without.reset()


def test_what_was_tuned_is_tuned_further_by_the_name_of_its_run(spoken, monkeypatch):
    monkeypatch.chdir(spoken)
    run = str(trained.only_run(spoken).relative_to(spoken))
    text = windlass.recipe(run, "chats.jsonl", [ALONE]).text
    assert f"\nmodel:\n  run: {run}\n" in text
    assert "  length: 128  # the longest of 64 examples has 49 tokens\n" in text


@pytest.mark.long
def test_left_by_a_kill_and_started_again_by_the_same_words_it_has_the_same_bits(spoken, tmp_path):
    folder = Path(shutil.copytree(spoken, tmp_path / "again"))
    saved = folder_of(trained.only_run(folder))
    for later in steps_in(saved)[1:]:
        shutil.rmtree(saved / str(later))
    (first,) = steps_in(saved)
    resumed = trained.windlass(folder, *TRAIN).stdout
    assert first < 96 and f"resuming from step {first} of 96" in resumed
    assert weights(trained.only_run(folder)) == weights(trained.only_run(spoken))


@pytest.mark.long
def test_what_was_tuned_is_exported_and_peft_finds_the_same_logits(program, spoken, tmp_path):
    out = tmp_path / "adapter"
    words = ["export", RUN, "--to", str(out), "--check"]
    code, printed, err = program(*words, cwd=spoken)
    assert code == 0, printed + err
    assert (out / "adapter_model.safetensors").is_file()


@pytest.mark.long
def test_each_line_of_a_pipe_is_a_turn_and_answers_alone_are_written(say, spoken):
    talk = windlass.chat(trained.only_run(spoken), [ALONE], system="Be brief.", tokens=8, seed=3)
    answers = [talk("Hello"), talk("And then?")]
    code, out, err = say("Hello\n\nAnd then?\n", "--system", "Be brief.", *SHORT)
    assert (code, err) == (0, "")
    assert out == "".join(f"{answer}\n" for answer in answers)


@pytest.mark.long
def test_commands_change_and_keep_a_conversation(say, spoken, tmp_path):
    file = tmp_path / "chats.jsonl"
    typed = ["Hello", f"/save {file}", "/reset", "/system Be kind.", "Hello", f"/save {file}"]
    code, out, err = say("\n".join([*typed, "/quit", "never said"]), *SHORT)
    assert (code, err) == (0, "")
    plain, kind = (
        windlass.chat(trained.only_run(spoken), [ALONE], system=system, tokens=8, seed=3)
        for system in (None, "Be kind.")
    )
    assert out == f"{plain('Hello')}\n{kind('Hello')}\n"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows == [{"messages": plain.messages}, {"messages": kind.messages}]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "/rest",
            "no command /rest; did you mean /reset? there are /reset, /system, /save, /help and "
            "/quit. A space before it makes it text",
        ),
        ("/save", "/save needs a file; /save chats.jsonl adds a line to one"),
        ("/save chats.jsonl", "nothing was said yet: there is nothing to save"),
    ],
)
def test_in_a_pipe_a_command_that_cannot_be_done_ends_the_program(say, typed, said):
    assert say(f"{typed}\nHello\n") == (2, "", f"{said}\n")


def test_the_prompts_of_a_file_are_said_in_chats_where_that_is_asked(program, spoken, tmp_path):
    file = tmp_path / "prompts.jsonl"
    hello = [{"role": "user", "content": "Hello"}]
    rows = [{"prompt": "Hello"}, {"messages": hello}]
    file.write_text("\n".join(map(json.dumps, rows)))
    words = ["generate", RUN, ALONE, "--file", str(file), "--tokens", "8", "--temperature", "0"]
    code, out, err = program(*words, "--chat", cwd=spoken)
    assert (code, err) == (0, "")
    answer = windlass.chat(trained.only_run(spoken), [ALONE], tokens=8, temperature=0)("Hello")
    assert [json.loads(line)["text"] for line in out.splitlines()] == [answer, answer]


def test_a_run_without_a_chat_template_is_refused_with_what_to_do(program, place):
    run = trained.only_run(place)
    code, out, err = program("chat", "tiny", cwd=place)
    assert (code, out) == (2, "")
    assert err == (
        f"runs/{run.name} has no chat template, since its tokenizer came without one; "
        f'`windlass generate runs/{run.name} "..."` continues a text\n'
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--thinking deep", '--thinking is "deep"; it must be none, off or on'),
        ("--temperature -1", "--temperature is -1.0; it is 0 or more"),
        ("--sytem x", "no option --sytem; did you mean --system?"),
    ],
)
def test_options_that_mean_nothing_are_refused(program, words, said):
    assert program("chat", "nowhere", *words.split()) == (2, "", f"{said}\n")


@pytest.mark.long
def test_at_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(spoken):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "windlass", "chat", RUN, "--tokens", "9999"],
        cwd=spoken,
        env=trained.environment() | {"TERM": "dumb", "NO_COLOR": "1"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = _until(ours, "", "> ")
    os.write(ours, b"/help\n")
    seen = _until(ours, seen, "Ctrl-C stops an answer")
    seen = _until(ours, seen, "> ")
    process.send_signal(signal.SIGINT)
    seen = _until(ours, seen, "Ctrl-D leaves\r\n> ")
    os.write(ours, b"Hello\n")
    seen = _until(ours, seen, "Hello\r\n")
    before = len(seen)
    while len(seen) < before + 10:  # some of an answer that would never end
        seen += _some(ours)
    process.send_signal(signal.SIGINT)
    seen = _until(ours, seen, ", stopped\r\n> ")
    os.write(ours, b"\x04")
    assert process.wait(timeout=60) == 0
    os.close(ours)


def _some(terminal: int) -> str:
    assert select.select([terminal], [], [], 120)[0], "nothing was written for two minutes"
    return os.read(terminal, 4096).decode(errors="replace")


def _until(terminal: int, seen: str, text: str) -> str:
    begun = time.monotonic()
    while text not in seen:
        assert time.monotonic() - begun < 240, seen
        seen += _some(terminal)
    return seen[seen.rindex(text) + len(text) :]
