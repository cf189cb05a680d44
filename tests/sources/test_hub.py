"""Data sets of the hub: a folder laid out like one, and the hub's cache where there is no hub."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.hub.dataset_server import keep_caches_below
from windlass.errors import UserError
from windlass.sources.hub import Source

ROWS = [{"prompt": f"question {n}", "answer": f"answer {n}", "score": n} for n in range(20)]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keep_caches_below(tmp_path, monkeypatch)


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set with two splits, of Parquet files."""
    place = tmp_path / "made"
    place.mkdir()
    for name, rows in (("train", ROWS), ("test", ROWS[:3])):
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, place / f"{name}-00000-of-00001.parquet")
    return place


def rows(source: Source) -> list[dict[str, Any]]:
    return [source.row(index) for index in range(len(source))]


def test_a_folder_of_files_gives_its_rows_by_number(folder: Path):
    source = Source(name=str(folder), column="prompt")
    assert rows(source) == ROWS
    assert source[7] == {"text": "question 7"}
    assert source.where(7) == f"{folder} train row 8"
    assert rows(Source(name=str(folder), split="test")) == ROWS[:3]
    assert rows(Source(name=str(folder), split="train[:10%]")) == ROWS[:2]
    assert rows(Source(name=str(folder), split="train[5:7]+test")) == ROWS[5:7] + ROWS[:3]
    assert rows(Source(name=str(folder), limit=4)) == ROWS[:4]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_other_kinds_of_files_give_the_same_rows(tmp_path: Path, kind: str):
    place = tmp_path / "made"
    place.mkdir()
    comma = ["prompt,answer,score", *(",".join(map(str, row.values())) for row in ROWS)]
    text = {"jsonl": lines(ROWS), "csv": "\n".join(comma)}
    (place / f"train.{kind}").write_text(text[kind])
    assert rows(Source(name=str(place))) == ROWS


def test_columns_are_kept_under_the_names_they_are_given(folder: Path):
    source = Source(name=str(folder), columns={"completion": "answer", "prompt": "prompt"})
    assert rows(source)[3] == {"completion": "answer 3", "prompt": "question 3"}


def test_a_configuration_is_one_of_several(tmp_path: Path):
    for name in ("first", "second"):
        (tmp_path / "made" / name).mkdir(parents=True)
        (tmp_path / "made" / name / "rows.jsonl").write_text(lines([{"text": name}]))
    (tmp_path / "made" / "README.md").write_text(
        "---\nconfigs:\n"
        "- {config_name: first, data_files: first/*.jsonl}\n"
        "- {config_name: second, data_files: second/*.jsonl}\n---\n"
    )
    place = str(tmp_path / "made")
    assert Source(name=place, configuration="second")[0] == {"text": "second"}
    one, other = (Source(name=place, configuration=name) for name in ("first", "second"))
    assert one.fingerprint() != other.fingerprint()
    for asked, said in ((None, "null"), ("third", "third")):
        assert refusal(Source(name=place, configuration=asked)) == (
            f"data.source.configuration is {said}; {place} has first and second"
        )


def test_the_fingerprint_follows_the_files_and_what_is_asked_of_them(folder: Path):
    every: list[dict[str, Any]]
    every = [{}, {"split": "test"}, {"limit": 3}, {"columns": {"a": "answer"}}]
    prints = {Source(name=str(folder), **asked).fingerprint() for asked in every}
    before = Source(name=str(folder)).fingerprint()
    assert len(prints) == 4 and before in prints
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(ROWS[:5]), folder / "train-00000-of-00001.parquet"
    )
    assert Source(name=str(folder)).fingerprint() != before
    assert rows(Source(name=str(folder))) == ROWS[:5]


def test_the_fingerprint_of_a_commit_asks_nobody():
    prints = [
        Source(name=name, revision=COMMIT).fingerprint() for name in ("some/data", "other/data")
    ]
    assert prints[0] == Source(name="some/data", revision=COMMIT).fingerprint() != prints[1]


def test_what_is_in_the_cache_of_the_hub_is_read_without_it(tmp_path: Path):
    cached = tmp_path / "hub/datasets--some--data"
    (cached / "snapshots" / COMMIT).mkdir(parents=True)
    (cached / "snapshots" / COMMIT / "README.md").write_text("# Some data")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(COMMIT)
    assert refusal(Source(name="some/data")) == (
        "data.source.name is some/data; the hub cannot be reached from here, and its files are not "
        f"in {cached / 'snapshots' / COMMIT}. Where there is a connection, `hf download some/data "
        "--repo-type dataset --local-dir FOLDER` makes a folder that data.source.name can be"
    )
    (cached / "snapshots" / COMMIT / "train.jsonl").write_text(lines(ROWS))
    assert rows(Source(name="some/data")) == ROWS


def refusal(source: Source, index: int = 0) -> str:
    with pytest.raises(UserError) as refused:
        source[index]
    return str(refused.value)


def test_what_cannot_be_read_is_refused_with_what_there_is(folder: Path, tmp_path: Path):
    place = str(folder)
    parts = "a part of one is written train[:10%] or train[100:200]"
    assert refusal(Source(name=place, split="trian")) == (
        "data.source.split is trian (Unknown split \"trian\". Should be one of ['train', 'test']); "
        f"did you mean train? {place} has train and test, and {parts}"
    )
    assert refusal(Source(name=place, split="train[:x]")) == (
        "data.source.split is train[:x] (Unrecognized instruction format: train[:x]); "
        f"{place} has train and test, and {parts}"
    )
    assert refusal(Source(name=place, columns={"question": "promt"})) == (
        "data.source.columns.question is promt; did you mean prompt? "
        f"{place} has prompt, answer and score"
    )
    assert refusal(Source(name=place)) == (
        f"{place} train row 1 has no column text; "
        "data.source.column can be one it has: prompt, answer, score"
    )
    assert refusal(Source(name=place, column="score"), 5) == (
        f"{place} train row 6 has a number in column score; text is expected"
    )
    (tmp_path / "empty").mkdir()
    empty = tmp_path / "empty"
    assert refusal(Source(name=str(empty))) == (
        f"data.source.name is {empty}, a folder that is no data set (The directory at {empty} "
        "doesn't contain any data files); one holds Parquet, JSON Lines or CSV files"
    )
    (empty / "train.jsonl").write_text('{"text": "a"}\n{"text": \n')
    assert refusal(Source(name=str(empty))).startswith(f"{empty} cannot be read as a data set (")


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refusal(Source(name="some/data")) == (
        "data.source.kind is hub, which reads with the datasets library, and that is not here: "
        "pip install 'windlass-lm[hub]'"
    )


def test_a_hub_that_cannot_be_reached_is_said_with_what_to_do(tmp_path: Path):
    script = (
        "from windlass.sources.hub import Source\nfrom windlass.errors import UserError\n"
        "try:\n    Source(name='some/data')[0]\nexcept UserError as refused:\n    print(refused)"
    )
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_OFFLINE")
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    begin, _, end = done.stdout.partition(" (")
    assert begin == "data.source.name is some/data; the hub cannot be reached from here"
    assert end.endswith(
        f"), and it is not in {tmp_path / 'hub'}, which has no dataset. Where there is a "
        "connection, `hf download some/data --repo-type dataset` fills that folder, which can be "
        "copied here, and with --local-dir FOLDER makes one that a recipe names by its path\n"
    )
