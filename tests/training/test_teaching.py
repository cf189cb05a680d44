"""A teacher's cache: its content, and that it is of these rows and this teacher alone."""

import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from rich.console import Console

import windlass
from tests import tiny, trained
from tests.spawn import processes
from windlass import seal, teacher_cache
from windlass.api import Taught
from windlass.config import read
from windlass.data import Data, Tokenizer, prepare
from windlass.data import vocabulary as vocabularies
from windlass.data.load import Loader
from windlass.data.taught import joined
from windlass.devices.selection import DeviceChoice
from windlass.errors import UserError
from windlass.layers.head import Candidates
from windlass.planning import targets
from windlass.processes.signals import Signals
from windlass.program.described import read_for
from windlass.sources.teacher import Source
from windlass.teacher_cache import TeacherCache
from windlass.telemetry.console import ConsoleReport
from windlass.training.teaching import Teaching, describe_teacher, stored_log_z
from windlass.training.train import train

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOP_K, NEGATIVES, VOCAB = 8, 4, 257
MESH = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
RECIPE = {
    "model": {"family": "llama", "vocab": VOCAB, **tiny.WIDTHS},
    "tokenizer": {"kind": "byte"},
    "data": {
        "source": {"kind": "jsonl", "path": "stories.jsonl"},
        "length": 48,
        "validation": 0.2,
        "teacher": {
            "path": "cache",
            "model": {"path": "teacher"},
            "top_k": TOP_K,
            "negatives": NEGATIVES,
            "dtype": "float32",
            "shard": 24,
        },
    },
    "objective": "distil",
    "optim": {"kind": "adamw", "learning_rate": 1e-3},
    "train": {"steps": 2, "batch": 8},
    "checkpoint": {"every": 1},
    "device": {"kind": "cpu", "count": 1},
}


def recipe(**teacher) -> dict:
    changed = copy.deepcopy(RECIPE)
    changed["data"]["teacher"] |= teacher
    return changed


def teach(*keys: str, **teacher) -> tuple[Taught, str]:
    console = Console(file=StringIO(), width=1000)
    with ConsoleReport(console) as report:
        found = windlass.teach(recipe(**teacher), list(keys), report=report)
    return found, console.file.getvalue()  # pyright: ignore


def write_teacher(folder: Path, seed: int = 0) -> Any:
    """A small Qwen3 with random weights, as Hugging Face writes it."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> tuple[Path, Any, str]:
    """A folder with a corpus, a teacher and its cache; the teacher; and what was printed."""
    place = tmp_path_factory.mktemp("teaching")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        trained.write_corpus(place / "stories.jsonl", 10)
        model = write_teacher(place / "teacher")
        return place, model, teach()[1]


@pytest.fixture
def here(taught, tmp_path, monkeypatch) -> Path:
    """A copy of it, to be changed, which is the current folder."""
    shutil.copytree(taught[0], tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def columns(folder: Path, part: str = "train-0") -> dict[str, np.ndarray]:
    """All rows of a part, read shard by shard with numpy alone."""
    shards = sorted((folder / part).iterdir())
    names = {file.stem for file in shards[0].glob("*.npy")}
    return {name: np.concatenate([np.load(s / f"{name}.npy") for s in shards]) for name in names}


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def logits_of(model, row: dict[str, np.ndarray]) -> np.ndarray:
    """What transformers gives every position of a packed row, document by document."""
    every = np.zeros((len(row["tokens"]), VOCAB), np.float32)
    for document in range(row["document"].max() + 1):
        here = row["document"] == document
        with torch.no_grad():
            tokens = torch.tensor(row["tokens"][here][None], dtype=torch.long)
            every[here] = model(tokens).logits[0].numpy()
    return every


def test_a_cache_has_what_the_teacher_gives_every_position(taught):
    place, model, _ = taught
    for part in ("train-0", "validation-0"):
        found = columns(place / "cache", part)
        for number in (0, len(found["tokens"]) - 1):
            row = {name: values[number] for name, values in found.items()}
            is_read = row["document"] >= 0
            logits, ids = logits_of(model, row)[is_read], row["teacher_ids"][is_read]
            expected = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP_K]
            np.testing.assert_array_equal(ids[:, :TOP_K], expected)
            np.testing.assert_allclose(
                row["teacher_logits"][is_read], np.take_along_axis(logits, ids, -1), atol=1e-5
            )
            log_z = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1))
            np.testing.assert_allclose(row["teacher_log_z"][is_read], log_z, atol=1e-5)


def test_float16_leaves_the_mass_outside_the_candidates_as_it_is():
    logits = jnp.asarray(20 + 3 * np.random.default_rng(0).normal(size=(64, VOCAB)), jnp.float32)
    values, ids = jax.lax.top_k(logits, TOP_K)
    found = Candidates(ids, values, jax.nn.logsumexp(logits, axis=-1))
    expected = 1 - np.exp(np.asarray(values - found.log_z[:, None], np.float64)).sum(axis=-1)
    rounded = values.astype(jnp.float16)
    log_z = np.asarray(stored_log_z(found, rounded), np.float64)
    stored = 1 - np.exp(np.asarray(rounded, np.float64) - log_z[:, None]).sum(axis=-1)
    np.testing.assert_allclose(stored / (1 - stored), expected / (1 - expected), rtol=2e-2)
    np.testing.assert_allclose(log_z, found.log_z, atol=1e-2)
    np.testing.assert_allclose(stored_log_z(found, values), found.log_z, atol=3e-6)


@pytest.mark.long
def test_a_cache_of_the_whole_vocabulary_teaches_as_the_teacher_itself_does(here):
    whole = recipe(top_k=VOCAB, negatives=0, path="whole")
    windlass.teach(whole)
    live = recipe()
    del live["data"]["teacher"]
    live["objective"] = {"kind": "distil", "teacher": {"path": "teacher"}, "temperature": 2.0}
    runs = {}
    for name, one in (
        ("cached", whole | {"objective": {"kind": "distil", "temperature": 2.0}}),
        ("live", live),
    ):
        runs[name] = train(one, [f"run.dir={name}", "telemetry.every=1"]).metrics
    for name in ("loss", "divergence", "gradient_norm", "agreement"):
        cached, alive = ([row[name] for row in rows if name in row] for rows in runs.values())
        assert cached and cached == pytest.approx(alive, rel=2e-5), name


@pytest.mark.long
def test_a_run_on_a_cache_is_the_same_on_a_mesh_and_through_a_stop(here):
    keys = ["train.steps=4", "train.evaluate_every=2", "telemetry.every=1", "train.accumulation=2"]
    keys.append("optim.schedule.shape=constant")  # that of four steps begins as that of two
    one = train(recipe(), [*keys, "run.dir=one"]).metrics
    spread = train(recipe(), [*keys, "run.dir=spread", "device.count=8", *MESH]).metrics
    train(recipe(), [*keys, "run.dir=stopped", "train.steps=2"])
    resumed = train(recipe(), [*keys, "run.dir=stopped"]).metrics
    for name in ("loss", "gradient_norm"):
        whole, other, again = ([row[name] for row in rows] for rows in (one, spread, resumed))
        assert other == pytest.approx(whole, rel=2e-5) and again == whole, name


def test_candidates_are_distinct_and_negatives_are_drawn_from_the_whole_vocabulary(taught):
    ids = columns(taught[0] / "cache")["teacher_ids"]
    ordered = np.sort(ids, axis=-1)
    assert (np.diff(ordered, axis=-1) > 0).all()
    assert ordered.min() == 0 and ordered.max() == VOCAB - 1
    counts = np.bincount(ids[..., TOP_K:].ravel(), minlength=VOCAB)
    assert counts.min() > 0
    assert counts.std() / counts.mean() < 0.25


def test_rows_bytes_and_time_are_printed_before_it_starts(taught):
    place, _, said = taught
    rows = len(columns(place / "cache")["tokens"])
    lines = [line.split(maxsplit=1) for line in said.splitlines()]
    names = [name for name, _ in lines]
    assert names[:5] == ["teacher", "cache", "rows", "size", "time"]
    facts = dict(map(tuple, lines[:5]))
    assert f"train-0 {rows:,}" in facts["rows"]
    per_token = 20 + 8 * (TOP_K + NEGATIVES) + 4
    total = sum(path.stat().st_size - 128 for path in (place / "cache").rglob("*.npy"))
    assert f"{per_token} bytes a token: top 8 and 4 negatives in float32" in facts["size"]
    assert facts["size"].startswith(f"{total / 2**10:.1f} KiB" if total < 2**20 else "")
    assert facts["time"] == "no speed estimate for CPUs"


def test_a_mesh_of_all_three_axes_writes_the_same(taught, here):
    teach("device.count=8", *MESH, path="spread")
    assert_close(columns(here / "spread"), columns(here / "cache"))


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """The same ids, and logits to what another order of additions changes."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        close = 2e-5 if name in ("teacher_logits", "teacher_log_z") else 0
        np.testing.assert_allclose(found[name], values, rtol=0, atol=close)


@pytest.mark.long
def test_two_processes_write_one_cache_with_what_one_would(taught, here):
    (here / "student.yaml").write_text(yaml.safe_dump(recipe(path="both")))
    words = ["student.yaml", "objective=next_token", "device.count=8", *MESH]
    with processes(here, words, command="teach") as running:
        first, second = running.finish()
    assert first.code == second.code == 0, first.output + second.output
    assert "both is complete" in first.output and "complete" not in second.output
    assert_close(columns(here / "both"), columns(here / "cache"))
    assert windlass.verify("both").good


def test_a_cache_that_was_interrupted_goes_on_and_ends_in_the_same_bytes(taught, here, monkeypatch):
    whole, write = contents(here / "cache"), TeacherCache.write
    shutil.rmtree(here / "cache")
    written = []

    def stops(self, shard, columns):
        if len(written) == 2:
            (self.folder / "train-0-00002.partial").mkdir()
            (self.folder / "train-0-00002.partial/tokens.npy").write_bytes(b"half of it")
            raise KeyboardInterrupt
        written.append(shard)
        write(self, shard, columns)

    monkeypatch.setattr(TeacherCache, "write", stops)
    with pytest.raises(KeyboardInterrupt):
        teach()
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert refusal(windlass.train, recipe(), ["run.dir=run"]).startswith(
        f"data.teacher.path is cache, a teacher's cache with 2 of its {len(list_shards())} shards"
    )
    found, said = teach()
    assert f"2 of {found.shards} are written" in said
    assert found.written == found.shards - 2
    assert contents(here / "cache") == whole


def list_shards() -> list:
    cache = teacher_cache.find(Path("cache"))
    assert cache is not None
    return cache.shards


def test_a_cache_that_is_complete_says_so_and_one_shard_is_made_again_by_itself(taught, here):
    whole = contents(here / "cache")
    found, said = teach()
    assert found.written == 0
    assert said.splitlines()[-1].startswith("cache is complete")
    shutil.rmtree(here / "cache/train-0/00001")
    assert teach()[0].written == 1
    assert contents(here / "cache") == whole


@pytest.mark.long
def test_a_cache_killed_five_times_is_byte_for_byte_an_undisturbed_one(taught, here):
    whole = contents(here / "cache")
    shutil.rmtree(here / "cache")
    (here / "student.yaml").write_text(yaml.safe_dump(RECIPE))
    rng, root = random.Random(0), str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "tests.strangers", "teach", "student.yaml"]
    environment = os.environ | {"PYTHONPATH": root}
    for _ in range(5):
        before = shards(here / "cache")
        process = subprocess.Popen(command, env=environment, stdout=-3, stderr=-3)
        while shards(here / "cache") == before and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(here / "cache") == whole


def shards(cache: Path) -> int:
    """Count of what is whole in a cache, in which folders get other names meanwhile."""
    while True:
        with suppress(FileNotFoundError):
            return len(list(cache.rglob("files.json")))


def refusal(call, *words, **options) -> str:
    with pytest.raises(UserError) as refused:
        call(*words, **options)
    return str(refused.value)


AGAIN = ". Take the change back, or name another folder for `windlass teach` to write to"


def test_anything_that_differs_is_refused_by_its_name(taught, here):
    for call in (windlass.teach, windlass.train):

        def of(call=call, keys=(), **teacher) -> str:
            return refusal(call, recipe(**teacher), keys)

        for keys, name, change in [
            (["data.length=32"], "data.length", "it is 48 there, 32 here"),
            (["data.packing=none"], "data.packing", "it is documents there, none here"),
            (["data.validation=0.1"], "data.validation", "it is 0.2 there, 0.1 here"),
            (["data.teacher.top_k=9"], "data.teacher.top_k", "it is 8 there, 9 here"),
            (["data.teacher.dtype=float16"], "data.teacher.dtype", "it is float32 there, float16"),
        ]:
            assert of(keys=keys).startswith(
                f"data.teacher.path is cache, whose cache is of another {name}: {change}"
            )
        (here / "teacher").rename(here / "first")
        write_teacher(here / "teacher", seed=1)
        said = of()
        assert said.startswith(
            "data.teacher.path is cache, whose cache is of another data.teacher.model: it is of "
            "files with hash"
        )
        assert said.endswith(AGAIN)
        shutil.rmtree(here / "teacher")
        (here / "first").rename(here / "teacher")


def test_a_teacher_of_other_tokens_is_refused_before_anything_is_written(here):
    vocabularies.byte().save(here / "teacher")
    file = here / "teacher" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer))
    said = refusal(windlass.teach, recipe(path="other"), [])
    assert said.startswith("data.teacher.model: token 97 is 'b' in its vocabulary, teacher, and ")
    assert not (here / "other").exists()


def test_another_tokenizer_and_a_changed_file_are_refused_by_name(taught, here):
    keys = ["tokenizer.kind=bpe", f"tokenizer.vocab={VOCAB}"]
    start = "data.teacher.path is cache, whose cache is of another "
    for call in (windlass.teach, windlass.train):
        assert refusal(call, RECIPE, keys).startswith(f"{start}tokenizer: it is of 257 tokens (")
    with (here / "stories.jsonl").open("a") as file:
        file.write(json.dumps({"text": "One more."}) + "\n")
    for call in (windlass.teach, windlass.train):
        assert refusal(call, RECIPE).startswith(f"{start}text in data.source: it is ")


def test_a_teacher_is_needed_and_must_have_the_vocabulary_of_the_student(taught, here):
    without = copy.deepcopy(RECIPE)
    del without["data"]["teacher"]["model"]
    assert refusal(windlass.teach, without) == (
        "data.teacher.model is missing: data.teacher.path is the folder that the cache goes to, "
        "and data.teacher.model the teacher, as {hub: OWNER/NAME}, {path: FOLDER} or {run: RUN}"
    )
    assert refusal(windlass.teach, RECIPE, ["model.vocab=300"]) == (
        "data.teacher.model is teacher, whose vocabulary has 257 tokens; model.vocab is 300: they "
        "must be the same"
    )
    assert refusal(windlass.teach, recipe(model={"path": "nowhere"})) == (
        "data.teacher.model.path is nowhere; there is no such folder"
    )
    assert refusal(windlass.teach, recipe(path="other", top_k=250, negatives=8)).startswith(
        "data.teacher.top_k is 250 and negatives is 8; together they are more than the 257 tokens"
    )


def test_a_folder_with_other_files_is_left_alone(taught, here):
    assert refusal(windlass.teach, recipe(path="teacher")) == (
        "teacher has other files, such as config.json, and a cache goes to a folder of its own"
    )


def test_one_flipped_byte_is_found_and_named(taught, here):
    assert windlass.verify("cache").good
    for name in (
        "train-0/00001/teacher_logits.npy",
        "teacher.json",
        "validation-0/00000/files.json",
    ):
        file = here / "cache" / name
        before = file.read_bytes()
        changed = bytearray(before)
        changed[len(changed) // 2] ^= 1
        file.write_bytes(changed)
        report = windlass.verify("cache")
        assert not report.good and f"damaged (file {name})" in str(report), str(report)
        file.write_bytes(before)
    assert windlass.verify("cache").good


def test_an_unfinished_cache_is_verified_as_far_as_it_is(taught, here):
    (here / "cache" / seal.NAME).unlink()
    shutil.rmtree(here / "cache/train-0/00001")
    total = len(list_shards())
    assert f"teacher's cache, {total - 1} of {total} shards: good" in str(windlass.verify("cache"))
    (here / "cache/train-0/00000/tokens.npy").write_bytes(b"half of it")
    assert "damaged (file train-0/00000/tokens.npy)" in str(windlass.verify("cache"))


def test_a_cache_alone_is_a_data_set_of_the_same_batches(taught, here):
    data = read(Data, RECIPE["data"])
    prepared = joined(prepare(data, Tokenizer()), vocab=VOCAB)
    alone = prepare(Data(source=Source(path="cache")), Tokenizer())
    assert alone.columns == prepared.columns == data.columns
    for epoch_step in range(3):
        one, other = (
            Loader(each.split("train"), 8, seed=1, shuffle=True).batch(epoch_step)
            for each in (prepared, alone)
        )
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    assert alone.vocab == VOCAB


def test_a_student_learns_from_its_cache_and_goes_on_with_that_alone(taught, here):
    keys = ["run.dir=run"]
    train(recipe(), [*keys, "train.steps=1"], signals=Signals())
    assert windlass.verify("run").good
    _change(here / "cache")
    said = refusal(train, recipe(), keys, signals=Signals())
    assert "data.teacher" in said and "a cache with hash" in said
    shutil.rmtree(here / "cache")
    said = refusal(train, recipe(), keys, signals=Signals())
    assert said.startswith("data.teacher.path is cache, where there is no teacher's cache")


def _change(folder: Path) -> None:
    """Another logit in a cache, as another teacher may have written it."""
    file = folder / "train-0/00000/teacher_logits.npy"
    logits = np.load(file)
    logits[0, 0, 0] += 1
    np.save(file, logits)
    seal.seal(file.parent, leave=[seal.NAME])
    cache = teacher_cache.find(folder)
    assert cache is not None
    cache.finish()


def test_columns_that_the_objective_does_not_read_are_reported(taught, here):
    said = refusal(windlass.train, recipe(), ["objective=next_token"])
    assert "  data.teacher  gives the columns teacher_ids, teacher_logits, teacher_log_z" in said
    said = refusal(windlass.train, RECIPE, ["data.teacher=null"])
    assert "data.teacher, a cache that `windlass teach` writes, would do" in said


def test_time_and_cost_are_estimated_where_the_catalogue_has_the_chip(taught, here):
    student, described = describe_teacher(RECIPE, [])
    target = targets.find("8xh100")
    there = read_for(
        described.layers, DeviceChoice("gpu", 8, "gpu", [], []), target.absent, is_trained=False
    )
    teaching = Teaching(student, there, Signals(), ConsoleReport(Console(file=StringIO())))
    said = teaching.estimate(100_000_000)
    assert re.fullmatch(r"about \S+ \(\S+ to \S+\) on 8xh100, \$[\d,.]+ on demand", said), said
