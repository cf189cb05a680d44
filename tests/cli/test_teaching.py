"""The command that caches a teacher's logits, as it is typed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests import trained
from tests.trained import windlass
from windlass import api
from windlass.errors import UserError


@pytest.fixture
def student(tmp_path: Path, tmp_path_factory) -> Path:
    """A folder with a recipe whose teacher is a run."""
    run = trained.only_run(trained.workplace(tmp_path_factory))
    trained.write_corpus(tmp_path / trained.CORPUS, trained.DOCUMENTS)
    teacher = {"path": "cache", "model": {"run": str(run)}, "top_k": 4, "shard": 8}
    recipe = trained.recipe(data={"teacher": teacher})
    recipe["tokenizer"] = {"kind": "file", "path": str(run / "tokenizer")}
    (tmp_path / "student.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


@pytest.mark.long
def test_a_run_teaches_until_it_is_stopped_and_the_same_command_goes_on(student: Path):
    process = subprocess.Popen(
        [sys.executable, "-m", "windlass", "teach", "student.yaml"],
        cwd=student,
        env=trained.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not (student / "cache/train-0/00000").is_dir() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate()
    assert process.returncode == 130, said
    assert "Ctrl-C while running the teacher: nothing was lost" in said
    said = windlass(student, "teach", "student.yaml").stdout
    assert "are written" in said and "cache is complete" in said
    assert "at step 4" in said
    said = windlass(student, "teach", "student.yaml").stdout
    assert "frozen parameters" not in said and "cache is complete" in said
    assert "shards: good" in windlass(student, "verify", "cache").stdout


def test_a_cache_is_imported_or_refused_in_a_line(tmp_path: Path, program):
    (tmp_path / "old").mkdir()
    ids = np.arange(12, dtype=np.int32).reshape(2, 6)
    candidates = {"topk_idx": np.zeros((2, 5, 1), np.int32), "topk_logits": np.zeros((2, 5, 1))}
    np.savez(tmp_path / "old/a.npz", input_ids=ids, **candidates)
    ended = program("teach", "--import", "old", "--out", "cache")
    assert ended.out == "imported to cache: 2 rows, 10 tokens, 300 bytes\n"
    ended = program("teach", "--import", "old")
    assert ended.code == 2
    assert ended.err.strip() == (
        "windlass teach takes a recipe with data.teacher, or --import DIR and --out DIR"
    )


def test_a_teacher_writes_texts_and_goes_on_behind_those_that_are_there(student: Path, monkeypatch):
    monkeypatch.chdir(student)
    how: dict = {"tokens": 3, "batch": 4, "data": {"source": {"limit": 10}}}
    file = api.teach("student.yaml", generate="texts.jsonl", **how)
    whole = file.read_bytes()
    rows = [json.loads(line) for line in whole.splitlines()]
    lines = Path(trained.CORPUS).read_text().splitlines()[:10]
    prompts = [json.loads(line)["text"] for line in lines]
    assert len(rows) == 10
    for row, prompt in zip(rows, prompts, strict=True):
        assert row["text"].startswith(prompt)
    assert any(len(row["text"]) > len(text) for row, text in zip(rows, prompts, strict=True))
    kept = whole.split(b"\n")
    file.write_bytes(b"\n".join(kept[:6]) + b"\n" + kept[6][:9])
    assert api.teach("student.yaml", generate="texts.jsonl", **how).read_bytes() == whole
    file.write_bytes(b'{"text": "Another."}\n' * 4)
    with pytest.raises(UserError) as refused:
        api.teach("student.yaml", generate="texts.jsonl", **how)
    assert str(refused.value) == "texts.jsonl has texts of other examples; name another file"
