"""Commands of the pages: the program takes each, and those of the first pages are run."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from io import StringIO
from itertools import dropwhile, groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
import typer
from huggingface_hub import constants
from safetensors.numpy import load_file

import windlass.models
from tests import published, trained
from tests.docs.test_written import _keys
from windlass.cli.commands import app
from windlass.cli.commands import run as program_run
from windlass.errors import UserError
from windlass.processes.signals import Signals

FOLDER = Path(__file__).parents[2] / "docs"
PAGES = sorted(FOLDER.glob("*.md"))
FENCE = re.compile(r"^ *```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(windlass [^`]+)`")
ENDS = {"|", "&&", ";", ">"}
# Words of a page that stand for others, and are no words of a command.
STANDS = re.compile(r"\.\.\.|COMMAND|^\w*=?\[|key=value")


class Fence(NamedTuple):
    """A block of code of a page."""

    language: str
    title: str
    text: str


def fences(path: Path) -> list[Fence]:
    return [Fence(*found) for found in FENCE.findall(path.read_text(encoding="utf-8"))]


def lines(text: str) -> Iterator[str]:
    """Commands of a shell block, without remarks."""
    for line in text.splitlines():
        command = re.sub(r"(^|\s)#.*", "", line).strip()
        if command:
            yield command


def commands(path: Path) -> Iterator[list[str]]:
    """Words of every command of the program on a page, in blocks, transcripts and text."""
    text = path.read_text(encoding="utf-8")
    found = []
    for fence in fences(path):
        joined = re.sub(r"\\\n *", "", fence.text)
        typed = [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
        found += lines(joined if fence.language == "sh" else "\n".join(typed))
    found += [" ".join(one.split()) for one in INLINE.findall(FENCE.sub("", text))]
    for line in found:
        for is_end, part in groupby(shlex.split(line), key=ENDS.__contains__):
            words = list(dropwhile(lambda word: "=" in word, part))  # variables of the environment
            if not is_end and words[:1] == ["windlass"] and not any(map(STANDS.search, words)):
                yield words[1:]


def parsed(words: list[str]) -> list[str]:
    """Objections of the program to a command, or nothing; it is parsed and not run."""
    program, whole = grammar()
    if not words or words[0].startswith("-"):
        return []
    name, *rest = words
    if name not in program.commands:
        return [f"no command {name}"]
    try:
        ctx = program.commands[name].make_context(name, rest, parent=whole)
    except UserError as error:
        return [str(error)]
    left = [word for word in (*ctx.args, *rest) if re.match(r"[a-z_]+(\.\w+)*=", word)]
    keys = known()
    named = {word: re.sub(r"\.\d+(?=\.)", "", word.partition("=")[0]) for word in left}
    return [f"no key {word}" for word, key in named.items() if key not in keys]


@cache
def grammar() -> tuple[Any, Any]:
    """The program, and the context that its commands are parsed in."""
    program: Any = typer.main.get_command(app)
    return program, program.make_context("windlass", [], resilient_parsing=True)


@cache
def known() -> set[str]:
    """Full keys of a recipe, those of sections, and those that say of which kind a section is."""
    schema = json.loads((FOLDER / "recipe.schema.json").read_text(encoding="utf-8"))
    keys = _keys(schema) | kinds(schema)
    return {key.rpartition(".")[0] for key in keys} | keys | set(schema["properties"])


def kinds(schema: dict[str, Any], at: str = "") -> set[str]:
    found = set()
    for name, entry in schema.get("properties", {}).items():
        key = f"{at}.{name}" if at else name
        found |= {key} if "const" in entry else set()
        for one in entry.get("anyOf", [entry]):
            found |= kinds(one, key)
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_command_of_a_page_is_one_that_the_program_takes(path):
    wrong = {" ".join(words): why for words in commands(path) if (why := parsed(words))}
    assert wrong == {}


def test_what_no_command_takes_is_found():
    assert parsed(["train", "quickstart", "train.stesp=5"]) == ["no key train.stesp=5"]
    assert parsed(["trian", "quickstart"]) == ["no command trian"]
    assert "--nowhere" in parsed(["verify", "mine", "--nowhere"])[0]
    assert parsed(["train", "quickstart", "train.kind=5"]) == ["no key train.kind=5"]
    assert parsed(["train", "quickstart", "data.source.kind=jsonl", "run.dir=mine"]) == []


def to_run(page: str) -> list[str]:
    """Commands of a page that need nothing but a CPU, in their order; it has no others unmarked."""
    found = [one for one in fences(FOLDER / page) if one.language == "sh"]
    return [line for one in found if not one.title for line in lines(one.text)]


def run(command: str, small: list[str], monkeypatch, typed: str = "") -> None:
    """Run a command as it stands, in this process; `train` with keys that make it small."""
    program, *words = shlex.split(command)
    if program == "pip":
        assert words[0] == "install" and words[1].startswith("windlass-lm")
        return
    assert program == "windlass", command
    monkeypatch.setattr("sys.stdin", StringIO(typed))
    assert program_run([*words, *(small if words[0] == "train" else [])], Signals()) == 0, command


SMALL = [*trained.SMALL, "device=cpu", "device.count=1"]


def test_the_path_from_the_front_page_to_a_tuned_model_is_five_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    published.in_cache(tmp_path / "hub", "Qwen/Qwen2.5-0.5B-Instruct")
    chat = [{"role": "user", "content": "What comes after 7?"}]
    chat += [{"role": "assistant", "content": "8 does."}]
    Path("chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 20)
    path = to_run("index.md")
    assert len(path) <= 5
    few = ["train.epochs=null", "train.steps=2", "data.checks.duplicates=warn", *SMALL[-2:]]
    for command in path:
        run(command, few, monkeypatch, "What comes after 7?\n")
    assert (tmp_path / "tuned/adapter_model.safetensors").is_file()


@pytest.mark.long
def test_the_first_steps_on_a_cpu_run_as_they_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in to_run("start-cpu.md"):
        run(command, SMALL, monkeypatch)
    assert (tmp_path / "stories/model.safetensors").is_file()


def test_the_family_of_the_page_is_there_trains_generates_and_is_exported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = FOLDER / "adding-a-family.md"
    for fence in fences(page):
        if fence.title:
            (tmp_path / Path(fence.title).name).write_text(fence.text)
    monkeypatch.setattr(windlass.models, "__path__", [*windlass.models.__path__, str(tmp_path)])
    for command in to_run(page.name):
        run(command, SMALL[-2:], monkeypatch)
    assert (tmp_path / "mine/model.safetensors").is_file()


def test_blocks_that_are_not_run_say_what_they_need():
    first = ("index.md", "start-cpu.md", "start-colab.md", "start-gpu.md", "gpu-to-tpu.md")
    for name in (*first, "troubleshooting.md", "old-checkpoints.md"):
        for fence in fences(FOLDER / name):
            if fence.title:
                assert fence.title.startswith("needs "), fence.title
    assert not any(to_run(name) for name in first[2:])


def test_a_value_is_printed_inside_a_step(capfd):
    (fence,) = [one for one in fences(FOLDER / "troubleshooting.md") if one.language == "python"]
    scope: dict[str, Any] = {}
    exec(fence.text, scope)
    jax.block_until_ready(jax.jit(scope["traced"])(jax.numpy.array([-3.0, 2.0])))
    jax.effects_barrier()
    assert "largest activation 3.0" in capfd.readouterr().out


@pytest.mark.long
def test_an_old_checkpoint_is_converted_outside_and_then_read(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    published.in_cache(tmp_path / "hub", "Qwen/Qwen3-0.6B")
    (snapshot,) = (tmp_path / "hub").rglob("snapshots/*")
    held = load_file(snapshot / "model.safetensors")
    state = {f"module.{name}": torch.from_numpy(value) for name, value in held.items()}
    torch.save({"model": state}, tmp_path / "best.pt")
    (tmp_path / "old").mkdir()
    (fence,) = [one for one in fences(FOLDER / "old-checkpoints.md") if one.language == "python"]
    variables = trained.environment() | {"HF_HUB_CACHE": str(tmp_path / "hub")}
    words = [sys.executable, "-c", fence.text]
    subprocess.run(words, cwd=tmp_path, env=variables, check=True)
    monkeypatch.chdir(tmp_path)
    keys = ["model.path=old", "data.length=512", "train.epochs=null", *SMALL[:2], *SMALL[-2:]]
    run("windlass train chat-lora model.hub=null", keys, monkeypatch)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_python_of_a_page_is_python_and_calls_what_is_there(path):
    for fence in fences(path):
        if fence.language == "python":
            compile(re.sub(r"^%.*", "", fence.text, flags=re.MULTILINE), path.name, "exec")
    called = set(re.findall(r"\bwindlass\.(\w+)\(", path.read_text(encoding="utf-8")))
    assert called <= set(windlass.__all__)
