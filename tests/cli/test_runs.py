"""Runs, listed and deleted from the command line."""

import io
import json
import os
import pty
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests import trained
from windlass.cli.runs import table
from windlass.run_folder.runs import Standing, size_of
from windlass.units import size

DELETED = r"deleted (runs/\S+), [\d.]+ \wiB\n"


@pytest.fixture
def copied(place, tmp_path) -> Path:
    """A run that may be deleted, as it is named from the folder of the program."""
    run = trained.only_run(place)
    shutil.copytree(run, tmp_path / "runs" / run.name)
    return Path("runs") / run.name


def test_without_runs_one_is_told_how_to_make_one(program, tmp_path):
    said = "no runs in {} yet; `windlass train quickstart` makes one in ./runs\n"
    assert program("runs") == (0, said.format("runs"), "")
    assert program("runs", str(tmp_path)) == (0, said.format(tmp_path), "")


def test_a_run_is_a_line_of_the_list_however_long(program, place, tmp_path):
    code, out, err = program("runs", cwd=place)
    run = trained.only_run(place)
    assert (code, err) == (0, "")
    title, line = out.splitlines()
    assert title.split() == "run state step loss validation size age".split()
    cells = re.split(r"\s{2,}", line.strip())
    assert cells[:3] == [run.name, "finished", "4/4"]
    assert cells[5] == size(size_of(run))
    (tmp_path / "long").mkdir()
    shutil.copytree(run, tmp_path / "long" / f"tiny-{'x' * 80}")
    title = program("runs", str(tmp_path / "long")).out.splitlines()[0]
    assert title.split() == "run state step loss validation size age".split()
    assert program("runs", str(place / "runs")).out.splitlines()[1].startswith(run.name)


def test_the_recipe_is_listed_where_a_name_does_not_tell_it():
    tells = dict(state="stopped", step=1, steps=None, loss=None, validation_loss=None)
    tells |= dict(size_bytes=0, changed=0.0)
    plain = Standing(Path("runs/mine-1a2b"), "mine", **tells)  # pyright: ignore
    other = Standing(Path("runs/best"), "mine", **tells)  # pyright: ignore
    assert "recipe" not in [column.header for column in table([plain]).columns]
    assert "recipe" in [column.header for column in table([plain, other]).columns]


def test_a_run_is_shown_in_full_with_what_it_was_made_with(program, place):
    code, out, err = program("runs", "tiny", cwd=place)
    assert (code, err) == (0, "")
    facts = dict(line.split(maxsplit=1) for line in out.splitlines())
    run = f"runs/{trained.only_run(place).name}"
    assert facts["run"] == run and facts["recipe"] == "tiny" and facts["step"] == "4/4"
    assert facts["device"] == "1 × cpu (requested: cpu)"
    assert re.fullmatch(r"\S+Z from step 0, ended \S+Z at step 4", facts["started"])
    assert re.search(r"^windlass \S+, python \S+, jax \S+", facts["versions"])


def test_the_list_is_there_for_programs_too(program, place):
    (record,) = json.loads(program("runs", "--json", cwd=place).out)
    assert record["folder"] == f"runs/{trained.only_run(place).name}"
    assert (record["state"], record["step"], record["steps"]) == ("finished", 4, 4)


def test_runs_are_deleted_without_asking_where_one_says_so(program, copied, tmp_path):
    code, out, err = program("runs", "--delete", "tiny", "--yes")
    assert (code, err) == (0, "")
    deleted = re.fullmatch(DELETED, out)
    assert deleted and deleted[1] == str(copied)
    assert os.listdir(tmp_path / "runs") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "which runs? windlass runs lists them, windlass runs --delete RUN deletes"),
        ("tiny", "deleting needs a confirmation, and this is no terminal; --yes skips it"),
    ],
)
def test_what_is_not_deleted_is_said_alone(program, copied, tmp_path, monkeypatch, words, said):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert program("runs", "--delete", *words.split()) == (2, "", f"{said}\n")
    assert (tmp_path / copied).is_dir()


def test_on_a_terminal_what_goes_is_shown_and_asked_for(program, copied, tmp_path, monkeypatch):
    def answered(keys: str) -> str:
        """What the program says to somebody who presses keys at a terminal; named twice is once."""
        ours, theirs = pty.openpty()
        os.write(ours, keys.encode())
        with open(theirs) as terminal:
            monkeypatch.setattr(sys, "stdin", terminal)
            code, out, err = program("runs", "--delete", "tiny", "tiny")
        os.close(ours)
        assert (code, err) == (0, "")
        return out

    run = tmp_path / copied
    (run / "notes.md").write_text("Mine.")
    held = size(size_of(run))
    asked = f"{copied}, {held}, finished at step 4\ndelete it? [y/N] "
    assert answered("n\n") == f"{asked}nothing was deleted\n"
    assert answered("\4") == f"{asked}\nnothing was deleted\n"
    assert (run / "recipe.yaml").is_file()
    left = f"kept, since the run did not write it: {copied}/notes.md\n"
    assert answered("y\n") == f"{asked}deleted {copied}, {held}\n{left}"
    assert os.listdir(run) == ["notes.md"]
