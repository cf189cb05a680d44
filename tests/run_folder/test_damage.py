"""A dozen tries of the campaign in `proofs/bytes.py`."""

import shutil
from pathlib import Path

import pytest

import windlass
from tests import damage, trained


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> Path:
    """A copy of a run with one checkpoint, and a cache of its own."""
    there = trained.workplace(tmp_path_factory)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    shutil.copyfile(there / trained.CORPUS, tmp_path / trained.CORPUS)
    copy = Path(shutil.copytree(trained.only_run(there), tmp_path / "runs" / "tiny-1"))
    for step in (0, 2):
        shutil.rmtree(copy / "checkpoints" / str(step))
    return copy


@pytest.mark.parametrize("name", ["run", "cache", "export"])
def test_whatever_is_damaged_is_named_or_harmless(run: Path, tmp_path: Path, name: str):
    if name == "export":
        windlass.export(run, tmp_path / "export")
    subjects = {
        "run": lambda: damage.run(run),
        "cache": lambda: damage.cache(tmp_path / "cache", run),
        "export": lambda: damage.export(tmp_path / "export"),
    }
    found = damage.totals([*damage.campaign(subjects[name](), 4, seed=1)])
    assert found["holds"] and found["tried"] == 4, found["failures"]
