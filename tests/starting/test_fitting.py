"""Adapters that are fitted on the host before the first step, to whatever weights there are."""

from pathlib import Path

import equinox as eqx
import numpy as np
import pytest

import windlass
from tests import strangers, tiny  # noqa: F401
from windlass.adapters.lookup import Adapter
from windlass.checkpoint.fingerprint import measure, named
from windlass.checkpoint.store import load_frozen
from windlass.errors import UserError
from windlass.evaluation.finished_run import open_on_cpu
from windlass.program.built import Built
from windlass.program.programs import Programs
from windlass.starting import origin
from windlass.starting.describe import describe
from windlass.training.loop import train

TABLE = {"kind": "lookup", "rank": 2, "group": 8}
RECIPE = {
    "model": {"family": "qwen3", "vocab": 257, **tiny.WIDTHS},
    "adapter": TABLE,
    "data": {"source": {"kind": "stories", "count": 60}, "length": 32},
    "optim": {"kind": "adamw", "learning_rate": 1e-2},
    "train": {"steps": 2, "batch": 8},
}
ALONE = ("device.kind=cpu", "device.count=1")
MESH = ("device.kind=cpu", "device.count=8", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
MAPS = ("query", "key", "value", "output", "gate", "up", "down")


def taken(recipe: dict, *keys: str) -> origin.Taken:
    """The arrays that a recipe starts from, and the facts of them."""
    described = describe(recipe, keys or ALONE)
    with described.scope():
        return origin.take(Built(described), "", print)


def begun(recipe: dict) -> dict:
    """The arrays of the model that a recipe starts with, by path."""
    described = describe(recipe, ALONE)
    with described.scope():
        built = Built(described)
        state, frozen = Programs(built, 1).init(origin.take(built, "", print).arrays)
    return named(eqx.combine(state.weights, frozen.model))


def of(arrays: dict, end: str) -> dict[str, np.ndarray]:
    """The arrays of a name, by the map that they belong to."""
    return {
        next(word for word in path.split(".") if word in MAPS): np.asarray(x)
        for path, x in arrays.items()
        if path.endswith(end)
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of two steps with a table."""
    folder = tmp_path_factory.mktemp("table") / "run"
    train(RECIPE, [f"run.dir={folder}", *ALONE])
    return folder


def from_run(run: Path, adapter) -> dict:
    return RECIPE | {"model": {"run": str(run)}, "adapter": adapter}


def test_random_weights_are_fitted_alike_alone_and_on_a_mesh_of_all_three_axes():
    alone, split = taken(RECIPE), taken(RECIPE, *MESH)
    assert (
        alone.facts
        == split.facts
        == [("lookup", "14 matrices, relative error 0.1077, at most 0.1214 (blocks.mlp.down)")]
    )
    plain = begun(RECIPE | {"adapter": None})
    weights, found = of(plain, ".weight"), of(dict(alone.arrays[1]), ".indices")
    assert found.keys() == weights.keys() == set(MAPS)
    for name, weight in weights.items():
        reads = 2 if name == "output" else 1
        expected = [Adapter(rank=2, levels=16, group=8).fit(x, reads) for x in weight]
        same = found[name] == np.stack([fields["indices"] for fields in expected])
        assert same.mean() > 0.999  # the last bit of a weight depends on how it was compiled
    for path, x in alone.arrays[1].items():
        y = split.arrays[1][path]
        assert x.dtype == y.dtype and x.shape == y.shape
        assert (np.abs(np.asarray(x, float) - np.asarray(y, float)) < 1e-5).mean() > 0.999


def test_indices_stay_as_they_were_and_go_on_bit_by_bit_under_lora(run, tmp_path):
    began = taken(RECIPE)
    stored = open_on_cpu(run, weights="last", step=None)
    with stored.scope():
        trained = named(eqx.filter(stored.stored_model()[1], eqx.is_array))
    indices = measure({p: x for p, x in trained.items() if p.endswith(".indices")})
    assert indices == measure({p: x for p, x in began.arrays[1].items() if p in indices})
    gains = of(trained, ".gains")["query"]
    assert (gains != of(dict(began.arrays[1]), ".gains")["query"]).all()

    lora = [TABLE | {"trains": "none"}, {"kind": "lora", "rank": 2}]
    more = begun(from_run(run, lora))
    kept = {p.replace(".base.", "."): x for p, x in more.items() if ".base." in p}
    assert measure(kept) == measure({p: x for p, x in trained.items() if p in kept})
    assert {path.rpartition(".")[2] for path in kept} >= {"indices", "in_scales", "gains", "table"}

    windlass.export(run, tmp_path / "it")
    exported = RECIPE | {"model": {"path": str(tmp_path / "it")}}
    exported.pop("adapter")
    arrays = taken(exported)
    assert "lookup" not in dict(arrays.facts)
    assert measure(dict(arrays.arrays[1])) == measure(trained)


def test_a_run_is_not_resumed_with_another_table(run):
    with pytest.raises(UserError) as refusal:
        train(RECIPE | {"adapter": TABLE | {"rank": 3}}, [f"run.dir={run}", *ALONE])
    assert str(refusal.value) == ""


def test_other_tables_start_from_the_scales_there_and_report_their_error(run):
    found = {}
    for name, keys in {
        "the same scales as a product": {"scales": "baked"},
        "two bits and more ranks": {"levels": 4, "rank": 4},
        "a scale for each group": {"rank": 0},
    }.items():
        found[name] = dict(taken(from_run(run, TABLE | keys)).facts)["lookup"]
    assert found == {}
