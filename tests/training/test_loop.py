"""The loop, whole: what is compiled, stored, resumed and refused."""

import copy
import dataclasses
import json
import logging
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from io import StringIO
from logging.handlers import BufferingHandler
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from tests import tiny
from tests.training.campaign import RECIPE, Stops, weights
from windlass import api
from windlass.checkpoint.store import folder_of, load_frozen, steps_in
from windlass.config import tree
from windlass.data.load import Loader
from windlass.devices import selection
from windlass.devices.selection import DeviceChoice
from windlass.errors import UserError
from windlass.layers import stack
from windlass.planning import planner
from windlass.processes.signals import Signals
from windlass.program import programs
from windlass.program.described import Divided
from windlass.run_folder import folder as folders
from windlass.starting.describe import describe
from windlass.telemetry.console import ConsoleReport
from windlass.training import loop
from windlass.training.loop import Trained
from windlass.training.session import open_session
from windlass.training.train import train

SMALL = ["train.steps=6", "train.batch=16", "train.evaluate_every=3", "checkpoint.every=2"]
UNMEASURED = ["train.evaluate_every=null", "data.validation=0"]


class Told:
    """A run, and what it said."""

    def __init__(
        self,
        *keys: str,
        recipe: dict | None = None,
        stops: int | None = None,
        plans: bool = False,
    ):
        self.console = Console(record=True, width=1000, file=StringIO())
        recipe, signals = copy.deepcopy(recipe or RECIPE), Stops(stops)
        with ConsoleReport(self.console) as report:
            how = {"signals": signals, "report": report, "plans": plans}
            self.trained: Trained = train(recipe, [*SMALL, *keys], **how)
        self.text = self.console.export_text()


def refused(*keys: str, recipe: dict | None = None) -> str:
    with pytest.raises(UserError) as refusal:
        Told(*keys, recipe=recipe)
    return str(refusal.value)


@pytest.fixture(scope="module")
def heard() -> BufferingHandler:
    """What JAX said while the run that ended was trained."""
    return BufferingHandler(capacity=1_000_000)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, heard) -> tuple[Path, Told]:
    """A run that ended, to be copied by whoever harms it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    logging.getLogger("jax").addHandler(heard)
    with jax.log_compiles(True):
        told = Told(f"run.dir={folder}")
    logging.getLogger("jax").removeHandler(heard)
    return folder, told


def numbers(run: Path, name: str) -> list:
    """What a run recorded under a name, in the order of its steps."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record[name] for record in map(json.loads, lines) if name in record]


def mine(finished: tuple[Path, Told], here: Path) -> Path:
    shutil.copytree(finished[0], here / "run")
    return here / "run"


def left(whole: Path, step: int) -> Path:
    """A copy of a run as it was left by a kill after a checkpoint."""
    run = Path(shutil.copytree(whole, "run"))
    saved = steps_in(folder_of(run))
    assert step in saved[:-1]
    for later in saved[saved.index(step) + 1 :]:
        shutil.rmtree(folder_of(run) / str(later))
    return run


def test_a_run_with_accumulation_evaluation_and_saving_compiles_its_step_once(finished, heard):
    messages = [record.getMessage() for record in heard.buffer]
    compiled = [text for text in messages if "XLA compilation of jit(step)" in text]
    assert len(compiled) == 1, compiled


def test_the_banner_says_what_will_happen(finished):
    _, told = finished
    expected = [
        f"device       {len(jax.devices())} × cpu (requested: cpu)",
        "mesh         data 1 × fsdp 8 × tensor 1 (sharded, as the memory of such devices is not "
        "in the catalogue)",
        "parameters   26,848 trainable of 26,848",
        "batch        16 = 1 a device × 2 accumulation × 8 shards, of 64 tokens",
        "precision    float32 compute, float32 weights and optimiser",
        "attention    plain XLA: there is no flash kernel for cpu devices",
        f"run          {finished[0]}",
    ]
    for line in expected:
        assert line in told.text, told.text


@pytest.mark.long
def test_the_microbatches_that_auto_finds_are_those_of_a_run_that_says_so_and_are_kept(
    finished, here, monkeypatch
):
    divided = Divided(2, "1 row a device at a time")
    monkeypatch.setattr(planner, "divide", lambda described: divided)
    keys = ["train.accumulation=null", "train.microbatch=auto", "run.dir=run"]
    told = Told(*keys, stops=2, plans=True)
    assert "batch        16 = 1 a device × 2 accumulation × 8 shards" in told.text
    assert "microbatch   auto: 1 row a device at a time" in told.text
    for name in ("loss", "gradient_norm"):
        assert numbers(Path("run"), name) == numbers(finished[0], name)[:2]
    programs = [json.loads(line) for line in Path("run/compile.jsonl").read_text().splitlines()]
    assert [one["program"] for one in programs].count("step") == 1
    again = describe(RECIPE, [*SMALL, *keys])
    assert again.divided == divided and again.batches.accumulation == 2
    assert describe(RECIPE, [*SMALL, *keys, "device.count=4"]).divided is None


def test_the_banner_says_how_much_memory_a_known_chip_has(finished, here, monkeypatch):
    from windlass.devices import chips

    monkeypatch.setattr(chips, "find", lambda name: chips._BY_NAME["NVIDIA H200"])
    told = Told(f"run.dir={mine(finished, here)}", "precision.compute=float32")
    assert "device       8 × cpu of 131.3 GiB (requested: cpu)" in told.text


def test_a_run_stores_its_recipe_its_numbers_and_its_vocabulary(finished):
    folder, told = finished
    assert not any("loss_scale" in name for name in weights(folder))
    stored = folders.stored(folder)
    assert stored["train"]["steps"] == 6 and stored["data"]["length"] == 64
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "gradient_norm" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "learning_rate", "tokens_per_second", "accuracy"} <= set(steps[-1])
    assert [record["step"] for record in records if "validation_loss" in record] == [3, 6]
    assert told.trained.is_finished and told.trained.step == 6
    assert told.trained.last["validation_loss"] == records[-1]["validation_loss"]
    assert (folder / "tokenizer/tokenizer.json").is_file()


def test_a_finished_run_says_so_and_is_extended_by_more_steps(finished, here):
    run = mine(finished, here)
    again = Told(f"run.dir={run}")
    assert f"this run is finished: step 6 of 6 in {run}; train.steps=12 would go on" in again.text
    more = Told(f"run.dir={run}", "train.steps=8")
    assert more.trained.step == 8
    # (1 + cos(pi * 5/6)) / 2 of 3e-3 at the sixth of 6 steps, and of 8 steps 6/8 at the seventh.
    assert (
        f"resuming from step 6 of 8 in {run}\n"
        "the run had 6 steps and has 8: the learning rate was 0.000201 at step 6 and is 0.000439 "
        "at step 7, so it rises again; it ends at 0.000114 at step 8\n"
        "compiling the step"
    ) in more.text
    assert more.trained.last["learning_rate"] == pytest.approx(0.000114, rel=1e-2)


def test_a_run_is_not_made_shorter_than_it_is(finished, here):
    run = mine(finished, here)
    assert refused(f"run.dir={run}", "train.steps=5") == (
        f"train.steps is 5, and the run in {run} has done 6; train.steps=6 leaves it as it is, "
        "more goes on, and run.dir starts another run"
    )
    assert folders.stored(run)["train"]["steps"] == 6


@pytest.mark.long
def test_a_run_in_epochs_is_saved_at_the_end_of_each_and_extended_by_more(here):
    run = here / "run"
    keys = [f"run.dir={run}", "train.steps=null", "data.source.count=10", "checkpoint.keep=9"]
    keys += ["checkpoint.every=[2, 1 epoch]", "optim.schedule.shape=constant"]
    told = Told(*keys, "train.epochs=1.5")
    assert "length       4 steps, 1.5 epochs of 3\n" in told.text
    assert steps_in(folder_of(run)) == [0, 2, 3, 4]
    assert api.standing(run).steps == 4
    assert folders.stored(run)["checkpoint"]["every"] == [2, "1 epochs"]
    assert (
        f"step 4 of 4 in {run}; train.epochs=2.666667 would go on"
        in Told(*keys, "train.epochs=1.5").text
    )
    assert refused(*keys, "train.epochs=1") == (
        f"train.epochs is 1, which is 3 steps, and the run in {run} has done 4; "
        "train.epochs=1.333334 leaves it as it is, more goes on, and run.dir starts another run"
    )
    more = Told(*keys, "train.epochs=2")
    assert more.trained.step == 6
    assert "the run had 4 steps and has 6: the learning rate goes on at 0.003; " in more.text


def test_stopped_and_resumed_twice_on_the_same_mesh_gives_the_same_bits(finished, here):
    run = left(finished[0], 3)
    stopped = Told(f"run.dir={run}", stops=5)
    assert "resuming from step 3 of 6" in stopped.text
    assert (stopped.trained.step, stopped.trained.stopped_by) == (5, signal.SIGTERM)
    assert "resuming from step 5 of 6" in Told(f"run.dir={run}").text
    assert weights(run) == weights(finished[0])


@pytest.mark.long
def test_a_mixture_stopped_and_resumed_with_other_workers_gives_the_same_bits(here):
    parts = "[{kind: stories, count: 90}, {kind: stories, count: 40, seed: 1, weight: 3}]"
    keys = ["data.source=null", f"data.mixture={parts}", "data.stride=48"]
    keys += ["checkpoint.every=3", "train.evaluate_every=null"]
    whole = Told("run.dir=whole", "data.prefetch=0", *keys)
    run = left(Path("whole"), 3)
    Told(f"run.dir={run}", "data.workers=2", "data.prefetch=3", *keys)
    assert weights(run) == weights(Path("whole"))
    assert "steps an epoch\n" in whole.text  # no row of a mixture is left out


@pytest.mark.long
def test_a_family_trains_writes_and_resumes_with_the_same_bits_by_being_there(here, shipped):
    config = dataclasses.replace(tiny.config(shipped), vocab=257)
    recipe = RECIPE | {"model": {"family": shipped, **tree(config)}}
    keys = ["train.steps=4", *UNMEASURED, "mesh.fsdp=4", "mesh.tensor=2"]
    told = Told("run.dir=whole", "train.sample=Once", *keys, recipe=recipe)
    assert any(line.startswith("  Once") for line in told.text.splitlines())
    run = left(Path("whole"), 2)
    Told(f"run.dir={run}", *keys, recipe=recipe)
    assert weights(run) == weights(Path("whole"))


@pytest.mark.long
def test_two_optimisers_in_one_with_groups_and_a_short_moment_are_told_and_resumed(here):
    keys = ["optim.kind=muon", "optim.moment=bfloat16", "train.steps=4"]
    keys += ["optim.groups=[{match: 'embedding.*', learning_rate: 1e-4, weight_decay: 0}]"]
    keys += UNMEASURED
    Told("run.dir=whole", *keys)
    run = left(Path("whole"), 2)
    told = Told(f"run.dir={run}", *keys)
    for line in (
        "optimiser    embedding.*: 8,224 parameters, learning_rate 0.0001, weight_decay 0",
        "optimiser    adamw: 192 parameters, learning_rate 0.003, weight_decay 0.1",
        "optimiser    muon: 18,432 parameters, learning_rate 0.003, weight_decay 0.1",
        "precision    float32 compute, float32 weights, first moment in bfloat16",
    ):
        assert line in told.text, told.text
    assert weights(run) == weights(Path("whole"))


@pytest.mark.long
def test_float16_overflows_are_told_and_a_run_resumed_after_them_has_the_same_bits(
    here, monkeypatch
):
    # So large that some steps overflow before one does not.
    monkeypatch.setattr("windlass.program.loss_scale.START", 2.0**18)
    keys = ["precision.compute=float16", *UNMEASURED, "train.steps=4"]
    whole = Told("run.dir=whole", *keys).trained
    run = left(whole.folder, 2)
    told = Told(f"run.dir={run}", *keys)
    assert "precision    float16 compute, float32 weights and optimiser" in told.text
    assert weights(run) == weights(whole.folder)
    lines = (whole.folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if "loss_scale" in line]
    scales, overflows = ([record[key] for record in records] for key in ("loss_scale", "overflows"))
    assert scales == [2.0**18 / 2**count for count in overflows]
    assert f"loss scale   {scales[-1]:g}, after {overflows[-1]:g} overflows" in told.text
    assert 0 < overflows[-1] < 4 and "skipped" not in told.text
    assert refused("run.dir=run", *keys, "precision.compute=float32") == (
        "checkpoint at step 4 was written for loss scale of float16; this run describes loss scale "
        "none. Take the change back, or start another run with run.dir"
    )


@pytest.mark.long
def test_on_another_mesh_a_run_goes_on_with_the_same_losses(finished, here):
    whole, told = finished
    run = left(whole, 3)
    moved = Told(f"run.dir={run}", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    assert "resuming from step 3 of 6" in moved.text
    assert moved.trained.last["loss"] == pytest.approx(told.trained.last["loss"], rel=1e-4)
    streams = [numbers(folder, "token_hash") for folder in (run, whole)]
    assert streams[0] == streams[1] and len(set(streams[0])) == 6
    assert all(type(one) is int for one in streams[0])


FROZEN = ['train.trainable=["blocks.mlp.*"]', "train.steps=2", "train.evaluate_every=null"]


@pytest.fixture(scope="module")
def part(tmp_path_factory) -> tuple[Path, Told]:
    """A run of which most weights are frozen, to be copied by whoever goes on with it."""
    folder = tmp_path_factory.mktemp("part") / "run"
    return folder, Told(f"run.dir={folder}", *FROZEN)


@pytest.mark.long
def test_frozen_weights_are_the_same_bits_after_training_and_are_stored_once(part, here):
    run, told = mine(part, here), part[1]
    keys = [f"run.dir={run}", *FROZEN]
    assert "parameters   12,288 trainable of 26,848" in told.text
    stored = set(weights(run))
    assert not any("embedding" in name for name in stored)
    described = describe(copy.deepcopy(RECIPE), [*SMALL, *keys])
    with described.scope():
        session = open_session(described, Console(quiet=True))
        _, at_start = session.programs.init()
        kept = load_frozen(run, session.programs.abstract_state()[1], session.identity)
    assert eqx.tree_equal(at_start, kept)
    more = Told(*keys, "train.steps=3")
    assert more.trained.step == 3
    assert api.evaluate(run)["loss"] == pytest.approx(more.trained.last["validation_loss"])
    assert api.generate(run, "Once", tokens=4)


@pytest.mark.long
def test_frozen_layers_that_are_held_one_by_one_train_to_the_same_bits(here, monkeypatch):
    keys = ['train.trainable=["blocks.mlp.*"]', "train.layers_per_loop=2", "device.count=1"]
    keys += ["train.batch=4", "train.steps=3", "train.sample=Once", "train.sampling.tokens=4"]
    Told("run.dir=stacked", *keys)
    monkeypatch.setattr(programs, "on_one_gpu", lambda: True)
    monkeypatch.setattr(stack, "LARGE", 1)
    held, made = [], programs.by_layer

    def recorded(frozen, split):
        held.append(made(frozen, split))
        return held[-1]

    monkeypatch.setattr(programs, "by_layer", recorded)
    assert not Told("run.dir=held", *keys, stops=2).trained.is_finished
    Told("run.dir=held", *keys)
    assert any(
        isinstance(one, stack.LayerArrays) for one in jax.tree.leaves(held, is_leaf=is_apart)
    )
    assert weights(Path("held")) == weights(Path("stacked"))
    for name in ("loss", "validation_loss", "token_hash"):
        assert numbers(Path("held"), name) == numbers(Path("stacked"), name)
    held_text, stacked_text = (
        Path(run, folders.SAMPLES).read_text() for run in ("held", "stacked")
    )
    assert held_text == stacked_text


def is_apart(node) -> bool:
    return isinstance(node, stack.LayerArrays)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.long
def test_a_damaged_newest_checkpoint_is_put_aside_and_the_one_before_it_taken(finished, here):
    run = mine(finished, here)
    flip(next((run / "checkpoints/6/state").rglob("d/*")))
    told = Told(f"run.dir={run}")
    assert "checkpoint at step 6 is damaged" in told.text
    assert f"resuming from step 4 of 6 in {run}" in told.text
    assert (run / "checkpoints/6.damaged").is_dir()
    assert weights(run) == weights(finished[0])


def test_a_run_with_nothing_but_damaged_checkpoints_is_refused(finished, here):
    run = mine(finished, here)
    for step in steps_in(folder_of(run)):
        flip(next((run / f"checkpoints/{step}/state").rglob("d/*")))
    assert refused(f"run.dir={run}").startswith(f"no good checkpoint is left in {run}/checkpoints")


@pytest.mark.long
def test_a_run_whose_checkpoints_were_deleted_does_not_start_at_step_0_unasked(finished, here):
    run = mine(finished, here)
    checkpoints = folder_of(run)
    why = (
        f"{run} was trained to step 6, and has no checkpoint any more; put back {checkpoints}, "
        "start another run with run.dir, or start again at step 0 once `windlass runs --delete "
        f"{run}` has deleted what is left"
    )
    for step in steps_in(checkpoints):
        shutil.rmtree(checkpoints / str(step))
    assert refused(f"run.dir={run}") == why
    shutil.rmtree(checkpoints)
    (run / folders.ABOUT).unlink()
    assert refused(f"run.dir={run}") == why
    # As a kill before the first save leaves it.
    checkpoints.mkdir()
    assert Told(f"run.dir={run}").trained.step == 6


@pytest.mark.long
def test_files_beside_the_checkpoints_that_are_spoilt_do_not_keep_a_run_from_going_on(
    finished, here
):
    run = mine(finished, here)
    recorded = numbers(run, "loss")
    spoilt = b"\xff\n[1]\n{}\nnull\n"
    for name in (folders.METRICS, folders.COMPILES):
        (run / name).write_bytes(spoilt + (run / name).read_bytes())
    (run / folders.SAMPLES).write_bytes(b"\xff\n--- step 6\nwas \xfe\n--- step 8\nis not\n")
    told = Told(f"run.dir={run}", "train.steps=7", "train.sample=Once")
    assert told.trained.step == 7
    for name in (folders.METRICS, folders.COMPILES):
        assert (
            f"warning: {run / name} has 4 lines without a record; the others are kept, and all "
            f"are in {run / name}.damaged"
        ) in told.text
        assert (run / f"{name}.damaged").read_bytes().startswith(spoilt)
    assert numbers(run, "loss")[: len(recorded)] == recorded
    kept = (run / folders.SAMPLES).read_bytes()
    assert kept.startswith(b"\xff\n--- step 6\nwas \xfe\n--- step 7\n")


def test_a_run_whose_output_nobody_reads_any_more_saves_and_goes_on(here, monkeypatch):
    reads, writes = os.pipe()
    with open(writes, "w", buffering=1) as output:
        monkeypatch.setattr("sys.stdout", output)
        with ConsoleReport() as report:
            report.note("read")
            os.close(reads)
            keys = ["run.dir=run", "checkpoint.every=5", "train.steps=6", *UNMEASURED]
            words = [*SMALL, *keys, "telemetry.every=1"]
            trained = train(copy.deepcopy(RECIPE), words, signals=Signals(), report=report)
        print("what comes after is no error either", flush=True)
    assert trained.is_finished and numbers(Path("run"), "step") == [*range(1, 7)]
    assert steps_in(folder_of("run")) == [1, 5, 6]  # of those that are kept: saved when it was lost


def test_a_checkpoint_of_another_model_is_refused_with_both(finished, here):
    run = mine(finished, here)
    fields = "vocab 257, embed 32, mlp {}, layers 2, heads 4, kv_heads 2, head_dim 8, "
    fields += "theta 10000.0, pairing half, eps 1e-06, tied True, attention_bias False"
    assert refused(f"run.dir={run}", "model.mlp=48") == (
        f"checkpoint at step 6 was written for model qwen3 ({fields.format(64)}); this run "
        f"describes model qwen3 ({fields.format(48)}). Take the change back, or start another "
        "run with run.dir"
    )


def test_a_checkpoint_of_other_data_is_refused_with_both(finished, here):
    run = mine(finished, here)
    there, other = (
        api.data(copy.deepcopy(RECIPE), words).fingerprint[:12]
        for words in ([], ["data.source.seed=1"])
    )
    assert refused(f"run.dir={run}", "data.source.seed=1") == (
        f"checkpoint at step 6 was written for data {there} in rows of 64; this run describes data "
        f"{other} in rows of 64. Take the change back, or start another run with run.dir"
    )


@pytest.mark.parametrize(
    ("key", "there", "value"),
    [
        ("data.stride", "null", "32"),
        pytest.param("data.packing", "documents", "none", marks=pytest.mark.long),
        pytest.param("data.shuffle", "true", "false", marks=pytest.mark.long),
        ("data.validation", "0.1", "0.2"),
        pytest.param("data.test", "0.0", "0.1", marks=pytest.mark.long),
        pytest.param("data.split_seed", "0", "42", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_of_the_same_documents_in_other_rows_is_refused(
    finished, here, key, there, value
):
    run = mine(finished, here)
    assert refused(f"run.dir={run}", f"{key}={value}") == (
        f"checkpoint at step 6 was written for {key} {there}; this run describes {key} {value}. "
        "Take the change back, or start another run with run.dir"
    )


def test_a_checkpoint_of_another_vocabulary_is_refused_with_both(finished, here):
    run = mine(finished, here)
    keys = ["tokenizer.kind=bpe", "tokenizer.vocab=257"]
    there, other = (api.data(copy.deepcopy(RECIPE), words).vocabulary for words in ([], keys))
    assert there is not None and other is not None
    assert refused(f"run.dir={run}", *keys) == (
        "checkpoint at step 6 was written for tokenizer of 257 tokens "
        f"({there.fingerprint[:12]}); this run describes tokenizer of 257 tokens "
        f"({other.fingerprint[:12]}). Take the change back, or start another run with run.dir"
    )


def test_a_vocabulary_smaller_than_the_vocabulary_is_refused(here):
    assert refused("model.vocab=200") == (
        "model.vocab is 200; the tokenizer has 257 tokens, so it must be 257 or more"
    )


@pytest.mark.long
def test_by_device_wins_on_that_kind_only_and_other_runs_are_named_first_with_what_differs(
    finished, here
):
    first = Path(shutil.copytree(finished[0], describe(copy.deepcopy(RECIPE), SMALL).folder))
    recipe = copy.deepcopy(RECIPE)
    recipe["by_device"] = {
        "cpu": {"telemetry.every": 2, "optim.learning_rate": 1e-3},
        "tpu": {"train.batch": 1024},
    }
    second = Told(recipe=recipe, stops=1)
    assert second.text.splitlines()[0] == (
        f"another run of recipe: {first} (at step 6; optim.learning_rate 0.003, here 0.001)"
    )
    assert "by_device    on cpu: telemetry.every 2, optim.learning_rate 0.001" in second.text
    folder = second.trained.folder
    assert folder != first and folder.parent == Path("runs")
    stored = folders.stored(folder)
    assert stored["telemetry"]["every"] == 2 and stored["optim"]["learning_rate"] == 1e-3
    assert stored["train"]["batch"] == 16
    # What does not change the result finds the same folder.
    assert Told("telemetry.every=5").trained.folder == first


def test_two_processes_do_not_train_one_run(here):
    run = here / "run"
    with folders.locked(run):
        assert refused(f"run.dir={run}") == (
            f"{run} is being trained by process {os.getpid()}; "
            "wait for it, or start another run with run.dir"
        )


def test_a_folder_that_cannot_be_made_is_refused(here):
    (here / "file").write_text("")
    assert refused(f"run.dir={here / 'file' / 'run'}") == (
        f"the run cannot be stored in {here / 'file' / 'run'}: Not a directory"
    )


def test_sizes_that_a_tpu_pads_are_told(monkeypatch):
    monkeypatch.setattr(
        selection, "choose", lambda *_: DeviceChoice("tpu", 1, "tpu", [], ["first"])
    )
    monkeypatch.setattr(selection, "devices", lambda _: jax.devices()[:1])
    first, *padded = describe(copy.deepcopy(RECIPE)).warnings
    assert first == "first" and [told.partition(" is ")[0] for told in padded] == [
        "data.length",
        "model.embed",
        "model.mlp",
        "model.vocab",
        "model.heads × model.head_dim",
    ]


def test_what_auto_chose_is_said(finished, here):
    told = Told(f"run.dir={mine(finished, here)}", "device=auto")
    assert told.text.splitlines()[0] == "device auto: no TPU or GPU is present, using 8 CPUs"


WILD = ["optim.learning_rate=1e30", "optim.clip_norm=null", "optim.schedule.shape=constant"]
WILD += UNMEASURED


@pytest.mark.long
def test_a_loss_that_is_not_finite_stops_the_run_and_says_what_to_try(here):
    run = here / "run"
    text = refused(f"run.dir={run}", *WILD)
    rows = text.partition("its rows are ")[2].partition(".")[0]
    assert len(rows.split(", ")) == 16
    assert text.startswith("loss or gradient is not finite at step 2 (gradient_norm ")
    assert text.endswith(
        f"; its rows are {rows}. Nothing was saved after step 0. A lower optim.learning_rate, a "
        "longer warm-up or a smaller optim.clip_norm may help; `windlass data` shows the rows; "
        "train.nonfinite=skip goes on without such steps"
    )
    assert steps_in(folder_of(run)) == [0]


@pytest.mark.long
def test_steps_that_are_not_finite_are_skipped_up_to_so_many_in_a_row(here):
    text = refused(f"run.dir={here / 'run'}", *WILD, "train.nonfinite=skip", "train.skips=2")
    assert "is not finite at step 4 (" in text and ", as were the 2 before it; its rows" in text


@pytest.mark.long
def test_what_an_objective_solves_for_at_the_end_is_evaluated_and_saved(here, monkeypatch):
    from windlass.objectives.next_token import Objective

    def finish(self, model, carry):
        return eqx.tree_at(lambda model: model.norm.scale, model, 0 * model.norm.scale)

    monkeypatch.setattr(Objective, "finish", finish)
    told = Told(f"run.dir={here / 'run'}", "train.steps=2")
    # A model whose hidden states are all zero knows nothing: ln 257.
    assert told.trained.last["validation_loss"] == pytest.approx(5.549, abs=1e-3)
    assert told.trained.last["loss"] != pytest.approx(5.549, abs=1e-3)


@pytest.mark.long
def test_a_run_whose_frozen_arrays_are_gone_is_refused(part, here):
    run = mine(part, here)
    shutil.rmtree(run / "checkpoints/frozen")
    assert refused(f"run.dir={run}", *FROZEN, "train.steps=3") == (
        f"the frozen arrays in {run}/checkpoints/frozen are gone; put back a copy of that folder, "
        "or start another run with run.dir"
    )


@pytest.mark.long
def test_a_disk_that_is_full_is_told_and_the_run_goes_on_where_there_is_room(finished, here):
    run = mine(finished, here)
    records = run / folders.METRICS
    # So long that this file alone is as large as a file may be.
    records.write_text(json.dumps({"step": 0, "note": "x" * 10_000_000}) + "\n")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (records.stat().st_size, unlimited[1]))
    try:
        refusal = refused(f"run.dir={run}", "train.steps=8")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert refusal == (
        f"the run cannot be stored in {run}: File too large; make room there, and the same "
        "command resumes from step 6"
    )
    assert Told(f"run.dir={run}", "train.steps=8").trained.step == 8


class LateBatches(Loader):
    """Batches that are not there when they are wanted."""

    def iterate(self, *arguments) -> Iterator[dict[str, jax.Array]]:
        for batch in super().iterate(*arguments):
            time.sleep(0.02)
            yield batch


@pytest.mark.long
def test_waiting_for_data_is_recorded_and_epochs_are_those_of_the_data(here, monkeypatch):
    monkeypatch.setattr(loop, "Loader", LateBatches)
    keys = ["train.evaluate_every=0.2 epochs", "checkpoint.every=0.1 epochs", "checkpoint.keep=9"]
    told = Told("run.dir=run", "data.source.count=60", *keys)
    assert "23 steps an epoch" in told.text  # a tenth is 2.3, a fifth 4.6
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [each["step"] for each in records if "validation_loss" in each] == [5, 6]
    assert steps_in(folder_of(Path("run"))) == [0, 3, 5, 6]
    waits = [each["data_wait_ms"] for each in records if "data_wait_ms" in each]
    assert len(waits) == 6 and min(waits) >= 20
    assert re.search(r"\ntime  .* in 6 steps; an epoch takes \S+ m?s\n", told.text)


class OtherBatches(Loader):
    """Batches of which one, before step 4, has a column of another type."""

    def iterate(self, *arguments) -> Iterator[dict[str, jax.Array]]:
        for number, batch in enumerate(super().iterate(*arguments), start=arguments[0] + 1):
            other = {"document": batch["document"].astype(jnp.int16)} if number == 4 else {}
            yield batch | other


CHANGED = "the step is compiled again after step 3: batch['document']: dtype int32 -> int16"


@pytest.mark.long
def test_a_step_that_is_compiled_again_is_warned_of_with_its_cause(here, monkeypatch):
    monkeypatch.setattr(loop, "Loader", OtherBatches)
    told = Told(f"run.dir={here / 'run'}", *UNMEASURED)
    assert f"warning: {CHANGED}\n" in told.text and told.trained.is_finished
    # A machine that is slow just then is also told that it waits for data.
    warned = [line for line in told.text.splitlines() if line.startswith("warning:")]
    assert [line for line in warned if "waiting for data" not in line] == [f"warning: {CHANGED}"]


@pytest.mark.long
def test_when_strict_a_step_that_is_compiled_again_ends_the_run_and_loses_nothing(
    finished, here, monkeypatch
):
    run = here / "run"
    monkeypatch.setattr(loop, "Loader", OtherBatches)
    assert refused(f"run.dir={run}", "train.strict=true") == (
        f"{CHANGED}. train.strict ends the run there, saved; train.strict=false goes on with a "
        "warning, and every such compilation costs its time"
    )
    assert weights(run) == weights(finished[0], 3)
