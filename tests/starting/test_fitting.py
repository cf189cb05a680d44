"""Adapters that are fitted on the host before the first step, to whatever weights there are."""

import re
from pathlib import Path

import equinox as eqx
import numpy as np
import pytest
import yaml

import windlass
from tests import tiny
from tests.spawn import processes
from windlass.checkpoint.fingerprint import measure, named
from windlass.errors import UserError
from windlass.evaluation.finished_run import open_on_cpu
from windlass.program.built import Built
from windlass.program.programs import Programs
from windlass.starting import origin
from windlass.starting.describe import describe
from windlass.telemetry import metrics
from windlass.training.train import train

TABLE = {"kind": "lookup", "rank": 2, "group": 8}
LORA = {"kind": "lora", "rank": 2, "init": "normal"}
RECIPE = {
    "model": {"family": "qwen3", "vocab": 257, **tiny.WIDTHS},
    "adapter": TABLE,
    "data": {"source": {"kind": "stories", "count": 60}, "length": 32},
    "optim": {"kind": "adamw", "learning_rate": 3e-2},
    "train": {"steps": 2, "batch": 8},
}
ALONE = ("device.kind=cpu", "device.count=1")
MESH = ("device.kind=cpu", "device.count=8", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
TOKENS = "of 257 tokens (aa6a2d29becf)"  # bytes, as a checkpoint has them
MAPS = ("query", "key", "value", "output", "gate", "up", "down")


def taken(recipe: dict, *keys: str) -> origin.Taken:
    """The arrays that a recipe starts from, and the facts of them."""
    described = describe(recipe, keys or ALONE)
    with described.scope():
        return origin.take(Built(described), TOKENS, print)


def begun(recipe: dict) -> dict:
    """The arrays of the model that a recipe starts with, by path."""
    described = describe(recipe, ALONE)
    with described.scope():
        built = Built(described)
        state, frozen = Programs(built, 1).init(origin.take(built, TOKENS, print).arrays)
    return named(eqx.combine(state.weights, frozen.model))


def of(arrays: dict, end: str) -> dict[str, np.ndarray]:
    """The arrays of a name, by the map that they belong to."""
    return {
        word: np.asarray(x)
        for path, x in arrays.items()
        for word in path.split(".")
        if word in MAPS and path.endswith(end)
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of two steps with a table and LoRA."""
    folder = tmp_path_factory.mktemp("table") / "run"
    train(RECIPE | {"adapter": [TABLE, LORA]}, [f"run.dir={folder}", *ALONE])
    return folder


@pytest.fixture(scope="module")
def trained(run) -> dict:
    """The arrays of that run, by path."""
    stored = open_on_cpu(run, weights="last", step=None)
    with stored.scope():
        return named(eqx.filter(stored.stored_model()[1], eqx.is_array))


def from_run(run: Path, adapter) -> dict:
    return RECIPE | {"model": {"run": str(run)}, "adapter": adapter}


@pytest.mark.long
def test_random_weights_are_fitted_alike_alone_and_on_a_mesh_of_all_three_axes():
    alone, split = taken(RECIPE), taken(RECIPE, *MESH)
    error = "relative error 0.1077, at most 0.1214 (blocks.mlp.down)"
    assert alone.facts == split.facts == [("lookup", f"14 matrices of 5.80 bits a weight, {error}")]
    for path, x in alone.arrays[1].items():
        y = split.arrays[1][path]
        assert x.dtype == y.dtype and x.shape == y.shape
        assert (np.abs(np.asarray(x, float) - np.asarray(y, float)) < 1e-5).mean() > 0.999


@pytest.mark.long
def test_indices_stay_as_they_were_and_go_on_bit_by_bit_under_more_lora(run, trained, tmp_path):
    start = taken(RECIPE)
    began = {path.replace(".base.", "."): x for path, x in start.arrays[1].items()}
    table = {path.replace(".base.", "."): x for path, x in trained.items() if ".base." in path}
    indices = [path for path in table if path.endswith(".indices")]
    assert len(indices) == 7
    assert measure({p: table[p] for p in indices}) == measure({p: began[p] for p in indices})
    assert (of(table, ".gains")["query"] != of(began, ".gains")["query"]).all()

    frozen = [TABLE | {"trains": "none"}, LORA, LORA]
    more = begun(from_run(run, frozen))
    kept = {p.replace(".base.", ".", 1): x for p, x in more.items() if ".base." in p}
    assert measure(kept) == measure({path: trained[path] for path in kept})
    assert set(indices) <= {path.replace(".base.", ".") for path in kept}

    windlass.export(run, tmp_path / "it", form="own")
    exported = RECIPE | {"model": {"path": str(tmp_path / "it")}}
    exported.pop("adapter")
    arrays = taken(exported)
    assert "lookup" not in dict(arrays.facts)
    assert measure(dict(arrays.arrays[2])) == measure(trained)


@pytest.mark.long
def test_a_run_is_not_resumed_with_another_table(run):
    with pytest.raises(UserError) as refusal:
        train(RECIPE | {"adapter": [TABLE | {"rank": 3}, LORA]}, [f"run.dir={run}", *ALONE])
    described = "lookup (preset None, levels None, rank {rank}, group 8, scales ranks"
    assert f"step 2 was written for adapter {described.format(rank=2)}" in str(refusal.value)
    assert f"this run describes adapter {described.format(rank=3)}" in str(refusal.value)


@pytest.mark.long
def test_other_tables_start_from_the_scales_there_and_lora_is_merged_into_indices(run, trained):
    said = {}

    def lookup(**keys) -> dict:
        start = taken(from_run(run, TABLE | keys))
        (said[", ".join(keys)],) = (text for name, text in start.facts if name == "lookup")
        return dict(start.arrays[1])

    same, two = lookup(), lookup(levels=4, rank=4)
    expected = {  # of weights that were trained, to other bits on another processor
        "": "14 matrices of 5.80 bits a weight, 14 converted, relative error 0.0153, at most "
        "0.0207 (blocks.mlp.down)",
        "levels, rank": "14 matrices of 5.60 bits a weight, 14 converted, relative error 0.2830, "
        "at most 0.2898 (blocks.attention.query)",
    }
    error = re.compile(r"0\.\d{4}")
    assert said.keys() == expected.keys()
    for name, text in expected.items():
        assert error.sub("", said[name]) == error.sub("", text)
        found, known = ([*map(float, error.findall(one))] for one in (said[name], text))
        assert found == pytest.approx(known, rel=1e-2)
    theirs, ours = (of(x, ".indices") for x in (trained, same))
    assert all((theirs[name] == ours[name]).mean() > 0.9 for name in MAPS)
    assert any((theirs[name] != ours[name]).any() for name in MAPS)
    gains = of(trained, ".gains")
    for name, found in of(same, ".gains").items():
        assert np.sort(found) == pytest.approx(np.sort(gains[name]), rel=1e-5)
    assert {x.max() for x in of(two, ".indices").values()} == {3}
    each = [
        TABLE | {"levels": 4, "targets": ["blocks.mlp.*"]},
        TABLE | {"targets": ["blocks.attention.*"]},
    ]
    facts = [text for name, text in taken(from_run(run, each)).facts if name == "lookup"]
    assert [text.partition(" of")[0] for text in facts] == ["6 matrices", "8 matrices"]
    assert ["6 converted" in facts[0], "8 converted" in facts[1]] == [True, True]


@pytest.mark.long
def test_two_processes_fit_what_one_fits(tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    words = ["tiny.yaml", "train.steps=1", "mesh.fsdp=2", "mesh.tensor=2"]
    with processes(tmp_path, [*words, f"run.dir={tmp_path / 'both'}"]) as running:
        first, second = running.finish()
    assert first.code == second.code == 0, first.output + second.output
    assert "14 matrices of 5.80 bits a weight, relative error 0.1077" in first.output
    keys = [f"run.dir={tmp_path / 'alone'}", "device.kind=cpu", "device.count=8", *words[1:]]
    train(RECIPE, keys)
    losses = [
        record["loss"]
        for name in ("both", "alone")
        for record in metrics.read(tmp_path / name / "metrics.jsonl")
        if "loss" in record
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
