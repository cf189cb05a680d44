"""Objectives in whole runs: helpers that are frozen, a carry that is kept, a model solved for."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.training.campaign import weights
from tests.training.test_loop import Told
from windlass import api
from windlass.checkpoint import store
from windlass.checkpoint.store import contents, folder_of
from windlass.data.load import Loader
from windlass.devices.chips import find
from windlass.errors import UserError
from windlass.evaluation.finished_run import open_run
from windlass.program.footprint import footprint
from windlass.run_folder import folder as folders
from windlass.starting.describe import describe
from windlass.telemetry import metrics

KEYS = ["train.steps=4", "train.batch=8", "train.evaluate_every=2", "checkpoint.every=1"]
MESH = ["device.count=8", "mesh={data: 2, fsdp: 2, tensor: 2}", "train.accumulation=2"]
WIDTHS = tiny.WIDTHS | {"layers": 1}
MATRICES, NORMS = (
    257 * 32 + 2 * (3 * 32 * 32 + 3 * 32 * 64),
    2 * (32 + 32 + 8 + 8) + 32,
)  # teacher's
EXACT = 2e-5  # relative, of sums in another order


def recipe(objective: dict | str, **model) -> dict:
    return {
        "model": {"family": "llama", "vocab": 257, **WIDTHS, **model},
        "data": {"source": {"kind": "stories", "count": 120}, "length": 48, "validation": 0.1},
        "objective": objective,
        "optim": {"kind": "adamw", "learning_rate": 3e-3, "eps": 1e-6},
        "train": {"steps": 4, "batch": 8},
        "telemetry": {"every": 1},
        "device": {"kind": "cpu", "count": 1},
    }


def trained(to: Path, written: dict, *keys: str, stops: int | None = None) -> Told:
    return Told(*KEYS, f"run.dir={to}", *keys, recipe=written, stops=stops)


def refused(to: Path, written: dict, *keys: str) -> str:
    with pytest.raises(UserError) as refusal:
        trained(to, written, *keys)
    return str(refusal.value)


def measured(run: Path) -> dict[int, float]:
    """The validation losses of a run, by step."""
    found = metrics.read(run / folders.METRICS)
    return {one["step"]: one["validation_loss"] for one in found if "validation_loss" in one}


def carry(run: Path, step: int) -> dict[str, dict]:
    arrays = contents(run, str(step))["arrays"]
    return {name: about for name, about in arrays.items() if name.startswith("carry.")}


# A model that is solved for


RIDGE = {"kind": "readout", "penalty": 2.0}
RLS = {"kind": "readout", "solver": "rls", "forgetting": 0.999}


def readout(objective: dict | str, **model) -> dict:
    written = recipe(objective, **model)
    del written["optim"]
    return written


SMALL = {"family": "frozen", "vocab": 257, "embed": 16, "units": 8, "layers": 1}


def test_a_run_that_was_stopped_is_used_with_what_it_has_solved_for_so_far(tmp_path):
    written = readout(RIDGE) | {"model": SMALL}
    whole, half = tmp_path / "whole", tmp_path / "half"
    told = trained(whole, written)
    assert "parameters   4,112 solved for of 8,592 (47.8585%), 64 fixed" in told.text
    trained(half, written, stops=2)
    at = measured(whole)
    assert list(at) == [2, 4] and at[2] != at[4]
    assert api.evaluate(half)["loss"] == at[2]
    assert api.generate(half, "Once", tokens=3, temperature=0.0) != [""]

    # Going on gives the same sums, and no optimizer has a state.
    trained(half, written)
    assert weights(half) == weights(whole) and measured(half) == at
    state = {name.split(".")[0] for name in weights(whole)}
    assert state == {"step", "key", "carry", "progress"}
    records = metrics.read(whole / folders.METRICS)
    assert not {"loss", "gradient_norm", "learning_rate"} & {*records[0]}

    # Sums do not depend on what they are solved with, and on all else they do.
    assert api.evaluate(whole, ["objective.penalty=1e5"])["loss"] != at[4]
    assert refused(half, written, "objective.targets=embedding").startswith(
        "checkpoint at step 4 was written for objective.targets one_hot; this run describes "
        "objective.targets embedding. "
    )


@pytest.mark.long
def test_a_run_that_forgets_beyond_what_float32_holds_says_so(tmp_path):
    written = readout(RLS | {"forgetting": 0.5}) | {"model": SMALL}
    said = refused(tmp_path / "run", written)
    assert said.startswith("what the objective solves from is not finite at step 1; its rows are ")
    assert said.endswith(
        ". Nothing was saved after step 0. Other keys of objective may keep it in the range of "
        "float32; `windlass data` shows the rows; train.nonfinite=skip goes on without such steps"
    )


@pytest.mark.long
@pytest.mark.parametrize("objective", [RIDGE, RLS], ids=["ridge", "rls"])
def test_a_readout_on_a_mesh_is_that_of_one_device_and_starts_another_run(objective, tmp_path):
    alone, mesh = tmp_path / "alone", tmp_path / "mesh"
    written = readout(objective, tied=False)
    trained(alone, written)
    trained(mesh, written, *MESH)
    assert measured(mesh) == pytest.approx(measured(alone), rel=1e-4)
    start = {**recipe("next_token"), "model": {"run": str(mesh)}}
    trained(tmp_path / "next", start, "optim.learning_rate=1e-30", "train.steps=1")
    heads = []
    for run, step in ((alone, None), (mesh, None), (tmp_path / "next", 0)):
        opened = open_run(run, ["device.count=1", "mesh=null", "train.accumulation=1"], step=step)
        with opened.scope():
            heads.append(np.asarray(opened.model().head.weight))
    np.testing.assert_array_equal(heads[1], heads[2])
    np.testing.assert_allclose(heads[1], heads[0], atol=1e-3 * np.abs(heads[0]).max())


@pytest.mark.long
def test_the_sums_of_all_steps_give_the_head_of_least_squares(tmp_path):
    run = tmp_path / "run"
    trained(run, readout(RIDGE, tied=False))
    opened = open_run(run)
    with opened.scope():
        loaded = opened.load()
        model = opened.built.model(loaded.weights, loaded.frozen.model)
        hidden, targets, used = [], [], []
        for batch in _batches(opened, steps=4):
            states, _, _ = model(batch)
            hidden.append(np.asarray(states, np.float64).reshape(-1, states.shape[-1]))
            targets.append(np.asarray(batch["targets"]).ravel())
            used.append(np.asarray(batch["weight"]).ravel() > 0)
        found = np.asarray(opened.model().head.weight)
    keep = np.concatenate(used)
    x, y = np.concatenate(hidden)[keep], np.eye(257)[np.concatenate(targets)[keep]]
    expected = np.linalg.solve(x.T @ x + 2.0 * np.eye(x.shape[1]), x.T @ y).T / 0.1
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("key", ["optim={kind: adamw, learning_rate: 1e-3}", "train.ema=0.9"])
def test_what_trains_by_a_gradient_is_refused_where_there_is_none(key, tmp_path):
    name = key.partition("=")[0]
    said = refused(tmp_path / "run", readout(RIDGE, tied=False), key)
    value = {"optim": "adamw", "train.ema": "0.9"}[name]
    assert said.endswith(
        f"  {name}  is {value}; objective readout solves for weights and trains none by a "
        f"gradient: {name}=null"
    )


def test_an_optimizer_is_required_where_there_is_a_gradient(tmp_path):
    assert refused(tmp_path / "run", readout("next_token")).endswith(
        "  optim  is required: objective next_token trains by a gradient, with optim.kind "
        "adafactor, adam_atan2, adamw, lion, muon or sign"
    )


def _batches(opened, steps: int):
    prepared = api.data(opened.folder / folders.RECIPE)
    loader = Loader(prepared.split("train"), 8, 0, True)
    batches = loader.iterate(0, opened.programs.place)
    return [next(batches) for _ in range(steps)]


@pytest.mark.long
def test_an_objective_that_solves_for_nothing_compiles_nothing_for_it(tmp_path):
    trained(tmp_path / "run", recipe("next_token"))
    records = (tmp_path / "run" / folders.COMPILES).read_text().splitlines()
    programs = [json.loads(line)["program"] for line in records]
    named = [name for name in programs if name]  # others are operations of JAX itself
    assert named[:2] == ["init", "step"] and "finish" not in named


def test_a_head_that_is_the_embedding_is_refused_by_what_solves_for_it(tmp_path):
    assert refused(tmp_path / "run", readout(RIDGE, tied=True)) == (
        "1 problem in the recipe and the command line:\n"
        "  objective  is readout, which does not fit family llama: its head is its embedding "
        "(tied is true)"
    )


# A carry


@pytest.mark.long
def test_rows_and_sums_are_carried_the_same_on_any_mesh_and_through_a_stop(tmp_path):
    written, runs = recipe("slots"), {}
    for name, keys in {"one": [], "parts": ["train.accumulation=4"], "mesh": MESH}.items():
        runs[name] = tmp_path / name
        trained(runs[name], written, *keys)
    found = {name: _restored(run) for name, run in runs.items()}
    for name in ("parts", "mesh"):
        for path, value in found["one"].items():
            np.testing.assert_allclose(found[name][path], value, rtol=1e-4, atol=1e-6, err_msg=path)
    assert found["one"]["rows.steps"].tolist() == [4] * 8
    # The sums, of what was read.
    batches = _batches(open_run(runs["one"]), steps=4)
    kinds, used = (
        np.concatenate([np.asarray(batch[name]).ravel() for batch in batches])
        for name in ("tokens", "weight")
    )
    np.testing.assert_array_equal(
        found["one"]["sums.counts"], np.bincount(kinds % 8, used, minlength=8)
    )
    assert found["one"]["sums.seen"] == used.sum()

    trained(tmp_path / "stopped", written, stops=3)
    trained(tmp_path / "stopped", written)
    assert carry(tmp_path / "stopped", 4) == carry(runs["one"], 4)


@pytest.mark.long
def test_the_carry_of_step_0_is_of_the_first_batch(tmp_path):
    run = tmp_path / "run"
    trained(run, recipe("slots"), "train.steps=1")
    opened = open_run(run, step=0)
    with opened.scope():
        (first,) = _batches(opened, steps=1)
        hidden, _, _ = opened.model()(first)
        weight = np.asarray(first["weight"])[..., None]
        expected = (np.asarray(hidden) * weight).sum(1) / weight.sum(1)
    np.testing.assert_allclose(_restored(run, 0)["rows.state"], expected, rtol=EXACT, atol=1e-6)


def _restored(run: Path, step: int | None = None) -> dict[str, np.ndarray]:
    opened = open_run(run, step=step)
    with opened.scope():
        loaded = opened.load()
        return {path: np.asarray(x) for path, x in store.named(loaded.carry).items()}


# Helpers


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """A run of another family, and beside it the model that was exported of it."""
    place = tmp_path_factory.mktemp("teacher")
    written = recipe("next_token") | {"model": {"family": "qwen3", "vocab": 257, **tiny.WIDTHS}}
    trained(place / "run", written, "train.steps=2")
    api.export(place / "run", place / "model")
    return place


def distilled(origin: dict) -> dict:
    annealed = {"cross_entropy": 0.2, "cross_entropy_end": 0.8}
    return recipe({"kind": "distil", "teacher": origin, **annealed})


def told_of(run: Path, name: str) -> list[float]:
    """What a run reported at each step."""
    return [one[name] for one in metrics.read(run / folders.METRICS) if "loss" in one]


@pytest.mark.long
def test_a_teacher_teaches_the_same_from_a_folder_and_from_a_run_and_is_stored_in_none(
    teacher, tmp_path
):
    told = trained(tmp_path / "path", distilled({"path": str(teacher / "model")}))
    trained(tmp_path / "run", distilled({"run": str(teacher / "run")}))
    assert told_of(tmp_path / "path", "loss") == told_of(tmp_path / "run", "loss")
    assert f"teacher      {MATRICES + NORMS:,} frozen parameters of {teacher}" in told.text
    stored = contents(tmp_path / "path", "4")
    assert not any("teacher" in name for name in stored["arrays"])
    assert not (folder_of(tmp_path / "path") / store.FROZEN).exists()
    assert stored["identity"]["objective.teacher"].startswith("of files with hash ")
    at = contents(tmp_path / "run", "4")["identity"]["objective.teacher"]
    assert at.startswith("of step 2 with hash ")
    each = zip(
        *(told_of(tmp_path / "path", name) for name in ("loss", "divergence", "cross_entropy")),
        strict=True,
    )
    weight = [(loss - divergence) / cross_entropy for loss, divergence, cross_entropy in each]
    assert weight == pytest.approx([0.2, 0.4, 0.6, 0.8], rel=1e-4)


@pytest.mark.long
def test_a_run_goes_on_only_with_the_teacher_that_it_began_with(teacher, tmp_path):
    folder, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(teacher / "model", folder)
    written = distilled({"path": str(folder)})
    trained(run, written, stops=2)

    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # a bit of a weight
    file.write_bytes(content)
    said = refused(run, written)
    assert said.startswith("checkpoint at step 2 was written for objective.teacher of files with ")
    assert "; this run describes objective.teacher of files with hash " in said
    assert said.endswith("Take the change back, or start another run with run.dir")

    shutil.rmtree(folder)
    gone = f"objective.teacher.path is {folder}; there is no such folder"
    assert refused(run, written) == gone
    with pytest.raises(UserError) as refusal:
        api.evaluate(run)
    assert str(refusal.value) == gone
    assert api.generate(run, "Once", tokens=2)  # which needs no teacher

    shutil.copytree(teacher / "model", folder)
    trained(run, written)
    trained(tmp_path / "whole", written)
    assert weights(run) == weights(tmp_path / "whole")
    assert api.evaluate(run)["loss"] == measured(run)[4]


@pytest.mark.long
def test_quantised_maps_are_repaired_the_same_on_any_mesh_and_through_a_stop(teacher, tmp_path):
    """LoRA over a frozen table, distilled, with an anchor whose turn is a part of the run."""
    distil = {"kind": "distil", "teacher": {"run": str(teacher / "run")}, "anchor": 0.5}
    table = {"kind": "lookup", "levels": 4, "rank": 2, "group": 8, "trains": "none"}
    lora = {"kind": "lora", "rank": 2, "dropout": 0.1}
    written = recipe(distil | {"anchor_sequences": 3}) | {"adapter": [table, lora]}
    written["model"] = {"run": str(teacher / "run")}
    one, mesh, half = (tmp_path / name for name in ("one", "mesh", "half"))
    trained(one, written, "train.accumulation=2")
    trained(mesh, written, *MESH)
    trained(half, written, "train.accumulation=2", stops=2)
    programs = [json.loads(x) for x in (half / "compile.jsonl").read_text().splitlines()]
    assert [one["program"] for one in programs].count("step") == 1
    trained(half, written, "train.accumulation=2")
    assert weights(half) == weights(one) and measured(half) == measured(one)
    assert measured(mesh) == pytest.approx(measured(one), rel=1e-4)
    assert told_of(mesh, "anchor") == pytest.approx(told_of(one, "anchor"), rel=1e-4)
    said = refused(half, written | {"adapter": [table | {"rank": 4}, lora]}, "train.steps=6")
    assert said.startswith("checkpoint at step 4 was written for adapter ")


@pytest.mark.long
def test_layers_learn_each_by_itself_the_same_on_any_mesh_and_through_a_stop(teacher, tmp_path):
    """A quantised run of the teacher's own weights, whose maps come back to what they were."""
    layerwise = {"kind": "layerwise", "teacher": {"run": str(teacher / "run")}}
    written = recipe(layerwise) | {"adapter": {"kind": "scalar", "bits": 2}}
    written["model"] = {"run": str(teacher / "run")}
    one, mesh, half = (tmp_path / name for name in ("one", "mesh", "half"))
    keys = ["optim.learning_rate=1e-2"]
    trained(one, written, *keys)
    trained(mesh, written, *keys, *MESH)
    trained(half, written, *keys, stops=2)
    trained(half, written, *keys)
    losses = measured(one)
    assert losses[4] < losses[2] and losses[2] > 0.05
    assert measured(half) == losses and weights(half) == weights(one)
    assert measured(mesh) == pytest.approx(losses, rel=1e-4)


@pytest.mark.long
def test_a_teacher_of_other_tokens_is_refused(teacher, tmp_path):
    origin = {"path": str(teacher / "model")}
    assert refused(tmp_path / "run", distilled(origin), "model.vocab=300") == (
        "1 problem in the recipe and the command line:\n"
        f"  objective.teacher  is {teacher / 'model'}, whose vocabulary has 257 tokens; "
        "model.vocab is 300: they must be the same"
    )
    words = ["tokenizer.kind=bpe", "tokenizer.vocab=257"]
    said = refused(tmp_path / "run", distilled(origin), *words)
    assert said.startswith("objective.teacher: token ")
    assert said.endswith(f"as they are with tokenizer: {{kind: file, path: {teacher / 'model'}}}")


@pytest.mark.parametrize(
    ("origin", "what"),
    [
        ({"path": "nowhere"}, "objective.teacher.path is nowhere; there is no such folder"),
        (
            {"run": "nowhere"},
            "objective.teacher.run: nowhere is not a run: there is no such folder",
        ),
    ],
)
def test_a_teacher_that_is_nowhere_is_refused_by_its_key(origin, what, tmp_path):
    assert refused(tmp_path / "run", distilled(origin)).startswith(what)


@pytest.mark.long
def test_a_teacher_is_a_part_of_what_a_run_takes(teacher):
    with_teacher = describe(distilled({"path": str(teacher / "model")}), []).run
    without = describe(recipe("next_token"), []).run
    chip = find("NVIDIA H100 80GB HBM3")
    assert chip is not None
    found, other = (footprint(run, chip, "bfloat16").state for run in (with_teacher, without))
    assert found - other == 2 * MATRICES + 4 * NORMS
