"""What is noted of a start."""

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

import windlass
from tests import trained
from windlass.run_folder import folder as folders
from windlass.telemetry import about
from windlass.telemetry.about import About, commits


def git(place: Path, *words: str) -> str:
    who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    command = ["git", "-C", str(place), *who, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "mine.yaml").write_text("train: {}\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "Begin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commit_of_the_folder_is_read_from_its_files(repository, tmp_path, monkeypatch):
    commit = git(repository, "rev-parse", "HEAD")
    expected = {"commit": commit, "is_changed": None}
    assert commits()["folder"] == expected
    inner = repository / "data/deep"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert commits()["folder"] == expected
    git(repository, "pack-refs", "--all")
    assert commits()["folder"] == expected
    git(repository, "checkout", "--quiet", "--detach")
    assert commits()["folder"] == expected
    git(repository, "worktree", "add", "--quiet", "-b", "other", str(tmp_path / "tree"))
    monkeypatch.chdir(tmp_path / "tree")
    assert commits()["folder"] == expected


def test_nothing_that_the_folders_git_config_names_is_run(repository):
    marker = repository / "marker"
    program = repository / "program"
    program.write_text(f"#!/bin/sh\ntouch {marker}\ncat\n")
    program.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(program))
    git(repository, "config", "filter.mine.clean", str(program))
    (repository / ".gitattributes").write_text("*.yaml filter=mine\n")
    (repository / "mine.yaml").write_text("train: {steps: 2}\n")
    assert commits()["folder"]["commit"]
    assert not marker.exists()
    git(repository, "status")
    assert marker.exists()  # git itself runs it, or the test would show nothing


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"ref: refs/none", b"ref: ../secret", b"ref: refs/\0", b"ref: " * 9999],
)
def test_a_head_that_names_no_commit_is_left_out(repository, content):
    (repository / "secret").write_text("a password")
    (repository / ".git/HEAD").write_bytes(content)
    assert "folder" not in commits()
    (repository / ".git/HEAD").unlink()
    os.mkfifo(repository / ".git/HEAD")
    assert "folder" not in commits()


def test_the_commit_of_the_source_is_noted_where_it_runs_from_a_clone(repository, monkeypatch):
    source = Path(about.__file__).parents[2]
    expected = {"folder", "windlass"} if (source / ".git").exists() else {"folder"}
    assert set(commits()) == expected
    # A copy that was installed somewhere inside a repository is not that repository's.
    installed = repository / ".venv/site-packages/windlass/telemetry/about.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(about, "__file__", str(installed))
    assert set(commits()) == {"folder"}


def test_without_a_repository_or_without_git_nothing_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(about, "__file__", str(tmp_path / "windlass/telemetry/about.py"))
    monkeypatch.chdir(tmp_path)
    assert commits() == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commits() == {}


def test_every_start_is_kept_and_one_that_was_killed_has_no_end(tmp_path):
    path = tmp_path / "about.json"
    times = iter([0.0, 60.0, 120.0])
    noted = About(path, clock=lambda: next(times))
    noted.begin(step=0)
    noted.begin(step=50)
    noted.end(at=100, is_finished=True)
    first, second = about.read(path)
    assert (first["began"], first["step"], "ended" in first) == ("1970-01-01T00:00:00Z", 0, False)
    assert (second["began"], second["ended"]) == ("1970-01-01T00:01:00Z", "1970-01-01T00:02:00Z")
    assert (second["step"], second["at"], second["is_finished"]) == (50, 100, True)


def test_a_run_notes_what_it_was_made_with_and_nothing_of_the_environment(tmp_path_factory):
    run = trained.only_run(trained.workplace(tmp_path_factory))
    (start,) = about.read(run / folders.ABOUT)
    assert start["versions"]["jax"] == version("jax")
    assert start["versions"]["windlass"] == windlass.__version__
    assert start["chose"]["device"] == {
        **{"asked": "cpu", "kind": "cpu", "count": 1},
        "cores": about.cores(),
    }
    assert start["chose"]["batch"] == {"per_device": 16, "accumulation": 1, "shards": 1}
    assert (start["recipe"], start["command_line"]) == ("tiny", {})
    assert (start["step"], start["at"], start["is_finished"]) == (0, 4, True)
    assert start["parameters"]["trainable"] == start["parameters"]["total"] > 0
    assert start["data"]["data"].endswith("steps an epoch, 8 rows left out of each")
    assert str(Path.home()) not in json.dumps(start)
    assert set(start) == {
        *("began", "step", "steps", "parameters", "data", "recipe", "command_line", "chose"),
        *("versions", "commits"),
        *("host", "ended", "at", "is_finished"),
    }
