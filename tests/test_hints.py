"""Every `pip install ...` in a message names something that installs what the message is about."""

import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import windlass
from windlass.errors import UserError
from windlass.release import check

ROOT = Path(windlass.__file__).parent
PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# What messages say an extra is for: a module that is missing, or a program.
NEEDED = {
    "cloud": {"gcsfs", "skypilot[gcp]"},
    "cuda": {"jax[cuda12]"},
    "gguf": {"gguf"},
    "harness": {"lm-eval"},
    "hub": {"datasets"},
    "tpu": {"jax[tpu]"},
    "track": {"tensorboard", "trackio", "wandb"},
}
HINT = re.compile(r"pip install ((?:'[^'\n]+'|[\w.-]+(?: |(?=[`\"]))?)+)")
OURS = re.compile(r"windlass-lm(?:\[([\w,-]+)\])?")


def requirement(text: str) -> str:
    """The name of a requirement, with its extras, without versions."""
    return re.split(r"[<>=!~; ]", text)[0]


def hints() -> list[str]:
    """The words behind `pip install` wherever the package or its pages say so to people."""
    files = [*ROOT.rglob("*.py"), *ROOT.rglob("*.yaml"), *(ROOT.parent / "docs").glob("*.md")]
    text = "\n".join(file.read_text() for file in [*files, ROOT.parent / "README.md"])
    return [word for found in HINT.findall(text) for word in shlex.split(found)]


def test_every_hint_names_this_package_and_an_extra_that_it_has():
    found = {word for word in hints() if not word.startswith("-")}
    ours = {word: match[1] for word in found if (match := OURS.fullmatch(word))}
    assert found == set(ours)
    assert {extra for extra in ours.values() if extra} == set(NEEDED)
    for extra, needed in NEEDED.items():
        assert {requirement(one) for one in EXTRAS[extra]} >= needed, extra


def test_the_packages_that_a_check_names_are_those_that_the_tests_install(monkeypatch):
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    source: Any = SimpleNamespace(
        run=SimpleNamespace(model=SimpleNamespace()), has_hugging_face_form=True
    )
    with pytest.raises(UserError) as refused:
        check.check_possible("adapter", source)
    (words,) = re.findall(r"`pip install ([^`]+)`", str(refused.value))
    made = re.findall(r"([\w-]+)[=>]=", (ROOT.parent / "Makefile").read_text())
    assert set(words.split()) == {"transformers", "torch", "peft"}
    assert set(words.split()) <= {*made, *map(requirement, EXTRAS["dev"])}
