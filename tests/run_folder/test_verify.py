"""All that a run computes from is sealed: what is changed there is named, and not computed with."""

import os
import re
import shutil
from pathlib import Path

import pytest

import windlass
from tests import trained
from windlass import seal
from windlass.errors import UserError
from windlass.run_folder import folder as folders


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> Path:
    """A copy of a run, in a folder with its corpus that the test stands in."""
    there = trained.workplace(tmp_path_factory)
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(there / trained.CORPUS, tmp_path / trained.CORPUS)
    return Path(shutil.copytree(trained.only_run(there), tmp_path / "runs" / "tiny-1"))


def damaged(run: Path) -> str:
    report = windlass.verify(run)
    return "" if report.good else str(report)


def refusal(run: Path) -> str:
    with pytest.raises(UserError) as refused:
        windlass.generate(run, "Once", tokens=1)
    return str(refused.value)


def test_a_changed_theta_does_not_pass(run: Path):
    assert damaged(run) == ""
    recipe = run / folders.RECIPE
    recipe.write_text(re.sub("theta: .*", "theta: 20000.0", recipe.read_text()))
    assert "  recipe and tokenizer: damaged (file recipe.yaml)\n" in damaged(run)
    assert refusal(run) == (
        f"{recipe} is not as the run wrote it, and what is computed from there may be of another "
        "model or of other data. Put back a copy, or give the command that trained the run again, "
        "which writes recipe.yaml and a learned tokenizer anew; keys can be changed on the command "
        "line instead"
    )


@pytest.mark.parametrize("name", ["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"])
def test_a_changed_tokenizer_is_one_message(run: Path, name: str):
    (run / name).write_text((run / name).read_text().replace("e", "x", 1))
    assert f"  recipe and tokenizer: damaged (file {name})\n" in damaged(run)
    assert refusal(run).startswith(f"{run / name} is not as the run wrote it, and what is computed")


@pytest.mark.parametrize("name", ["recipe.yaml", "about.json", "files.json"])
def test_a_file_that_is_cut_short_or_gone_is_named(run: Path, name: str):
    os.truncate(run / name, 40)
    assert f"file {name})" in damaged(run)
    (run / name).unlink()
    if name == "recipe.yaml":
        assert "recipe.yaml" in refusal(run)
    else:
        assert f"file {name})" in damaged(run)
        assert windlass.generate(run, "Once", tokens=1)


def test_the_prepared_data_of_a_run_is_verified_and_so_is_a_whole_cache(run: Path):
    sealed = seal.opened(run / folders.SEAL)
    shared = Path(sealed["prepared"][0]).parents[1]  # others read there
    cache = Path(shutil.copytree(shared, run.parent / "cache"))
    places = [cache / Path(place).relative_to(shared) for place in sealed["prepared"]]
    seal.write_signed(run / folders.SEAL, {**sealed, "prepared": list(map(str, places))})
    assert windlass.verify(cache).good
    for place in places:
        file = max(place.glob("*"), key=lambda path: path.stat().st_size)
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 64]))
        assert f"  prepared data {place}: damaged (file {file.name})" in damaged(run)
        assert f"  {place.relative_to(cache)}: damaged (file {file.name})" in damaged(cache)
        file.write_bytes(whole)
    assert damaged(run) == "" and damaged(cache) == ""
