"""The program called in this process, beside one small run."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import trained
from windlass.cli.commands import run
from windlass.processes.signals import Signals


class Ended(NamedTuple):
    """How a command ended, and what it printed where."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """A folder with tiny.yaml and its one run."""
    return trained.workplace(tmp_path_factory)


@pytest.fixture
def program(monkeypatch, capsys, tmp_path) -> Callable[..., Ended]:
    """The program, in an empty folder unless told where."""

    def call(*words: str, cwd: Path = tmp_path) -> Ended:
        monkeypatch.chdir(cwd)
        monkeypatch.setenv("COLUMNS", "80")
        code = run(list(words), Signals())
        return Ended(code, *capsys.readouterr())

    return call
