"""What a recipe's sections say together."""

import dataclasses

import pytest

from tests import tiny
from windlass.config import load, to_yaml
from windlass.errors import UserError
from windlass.run import Run, Train
from windlass.run.batches import batches
from windlass.run.checks import problems, widths
from windlass.run.identity import digest, essence

RECIPE = {
    "model": {"family": "llama", "vocab": 257, **tiny.WIDTHS},
    "data": {"source": "stories", "length": 64},
    "optim": {"kind": "adamw", "learning_rate": 3e-3},
    "train": {"steps": 60, "batch": 8},
}


def read(*keys: str, devices: int = 1, kind: str = "cpu", name: str = "cpu") -> Run:
    checks = [lambda run: problems(run, kind, [name] * devices)]
    return load(RECIPE, keys).read(Run, kind, checks=checks)


def refused(*keys: str, devices: int = 1, kind: str = "cpu", name: str = "cpu") -> str:
    with pytest.raises(UserError) as refusal:
        read(*keys, devices=devices, kind=kind, name=name)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("per_device", "shards", "accumulation", "rows"),
    [(4, 8, 2, 64), (4, 8, 1, 32), (4, 8, 4, 128), (4, 4, 8, 128)],
)
def test_rows_are_rows_per_device_times_shards_times_accumulation(
    per_device, shards, accumulation, rows
):
    said = Train(steps=1, batch_per_device=per_device, accumulation=accumulation)
    assert batches(said, shards).rows == rows
    assert batches(Train(steps=1, batch=rows, accumulation=accumulation), shards).rows == rows
    both = Train(steps=1, batch=rows, batch_per_device=per_device)
    assert batches(both, shards).accumulation == accumulation
    keys = [f"train.batch_per_device={per_device}", f"train.accumulation={accumulation}"]
    assert read(*keys, f"train.batch={rows}", devices=shards).train.batch == rows


@pytest.mark.parametrize(
    ("shards", "per_device", "accumulation"),
    [(8, 3, 1), (4, 3, 2), (2, 4, 3), (1, 4, 6), (24, 1, 1), (12, 2, 1)],
)
def test_a_run_that_goes_on_keeps_its_rows_where_only_those_of_a_device_are_said(
    shards, per_device, accumulation
):
    said = Train(steps=1, batch_per_device=4, accumulation=7)
    divided = batches(said, shards, began=24)
    assert divided == (per_device, accumulation, shards) and divided.rows == 24
    assert batches(Train(steps=1, batch=48), shards, began=24).rows == 48  # what is said counts


def test_next_token_refuses_a_family_that_attends_to_the_target():
    model = "model={family: bidirectional, vocab: 257, embed: 32, mlp: 48, layers: 1, heads: 4, "
    assert refused(model + "kv_heads: 2, head_dim: 8, theta: 1e4}") == (
        "1 problem in the recipe and the command line:\n"
        "  objective  is next_token, which does not fit family bidirectional: it is bidirectional "
        "(causal is false), and so attends to the token it would predict"
    )


def test_devices_that_cannot_share_the_rows_that_a_run_began_with_are_refused():
    run = read("train.batch=null", "train.batch_per_device=2", devices=6)
    assert problems(run, "cpu", ["cpu"] * 6, began=16) == [
        (
            "mesh",
            "gives the 16 rows of a step, which this run began with, to data × fsdp = 6 groups of "
            "devices; device.count=4 would do",
        )
    ]


def test_batches_that_disagree_are_one_error():
    keys = ["train.batch_per_device=4", "train.accumulation=2", "train.batch=32"]
    assert refused(*keys, devices=8) == (
        "1 problem in the recipe and the command line:\n"
        "  train.batch  is 32; batch_per_device (4) × accumulation (2) × shards (8) is 64: "
        "leave one of them out"
    )


def test_a_batch_that_accumulation_does_not_divide_is_refused():
    assert refused("train.accumulation=3") == (
        "1 problem in the recipe and the command line:\n"
        "  train.batch  is 8; accumulation (3) must divide it"
    )


@pytest.mark.parametrize("said", ["train.accumulation=2", "train.batch_per_device=4"])
def test_how_many_rows_are_computed_at_once_is_said_or_chosen_and_not_both(said):
    name, number = said.removeprefix("train.").split("=")
    assert refused("train.microbatch=auto", said) == (
        "1 problem in the recipe and the command line:\n"
        f"  train.microbatch  is auto, and {name} is {number}, which says how many rows are "
        f"computed at once; train.{name}=null or train.microbatch=null leaves one of them out"
    )


def test_microbatches_that_were_chosen_divide_the_batch():
    said = Train(steps=1, batch=24, microbatch="auto")
    assert batches(said, 2, chosen=3) == (4, 3, 2)
    assert batches(said, 2) == (12, 1, 2)  # nobody chose


def test_a_run_without_a_batch_is_refused():
    assert refused("train.batch=null") == (
        "1 problem in the recipe and the command line:\n"
        "  train.batch  is required, or batch_per_device in its place"
    )


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ["train.steps=null"],
            "train.steps  is required: a whole number; or epochs, times over the data",
        ),
        (
            ["train.epochs=2.5"],
            "train.steps  is {steps}, and epochs is 2.5; train.epochs=null or train.steps=null "
            "leaves one of them out",
        ),
        (["train.steps=null", "train.epochs=0"], "train.epochs  is 0; it must be above 0"),
    ],
)
def test_a_run_is_as_long_as_its_steps_or_its_epochs_say(keys, said):
    steps = read().train.steps
    assert refused(*keys) == (
        f"1 problem in the recipe and the command line:\n  {said.format(steps=steps)}"
    )


def test_numbers_that_are_too_small_are_refused_together():
    assert refused("train.steps=0", "train.accumulation=0", "train.seed=-1") == (
        "3 problems in the recipe and the command line:\n"
        "  train.steps         is 0; it must be 1 or more\n"
        "  train.accumulation  is 0; it must be 1 or more\n"
        "  train.seed          is -1; it must be 0 or more"
    )


def test_a_mesh_that_does_not_fit_and_a_format_the_chip_has_not_are_one_error():
    assert refused("mesh.tensor=8", "precision.compute=float16", devices=8, kind="tpu") == (
        "2 problems in the recipe and the command line:\n"
        "  precision.compute  is float16; the matrix units of a TPU do not take it: "
        "bfloat16, float32 or auto would do\n"
        "  mesh.tensor        is 8; it must divide model.heads (4), model.mlp (64) and "
        "model.kv_heads (2) or be a multiple of it: 1, 2 or 4"
    )


def test_a_mesh_that_leaves_devices_over_and_a_batch_that_does_not_divide_are_one_error():
    keys = ["mesh.data=1", "mesh.fsdp=2", "mesh.tensor=2", "train.accumulation=3"]
    assert refused(*keys, devices=8) == (
        "2 problems in the recipe and the command line:\n"
        "  mesh         is data 1 × fsdp 2 × tensor 2 = 4, and there are 8 devices; "
        "mesh.data=auto, mesh.fsdp=auto, mesh.tensor=auto or device.count=4 would do\n"
        "  train.batch  is 8; accumulation (3) must divide it"
    )


def test_an_objective_that_needs_what_the_data_has_not_is_refused(monkeypatch):
    from windlass.objectives.next_token import Objective

    monkeypatch.setattr(Objective, "columns", ("tokens", "teacher"))
    assert refused() == (
        "1 problem in the recipe:\n"
        "  objective  is next_token, which reads the column teacher; data.format text gives "
        "tokens, targets, weight, position, document"
    )


def test_pairs_and_preference_need_each_other():
    assert refused("objective=preference") == (
        "1 problem in the recipe and the command line:\n"
        "  objective  is preference, whose loss is of pairs, and examples of data.format text are "
        "for losses of tokens: data.format pairs would do"
    )
    assert refused("data.format=pairs") == (
        "1 problem in the recipe and the command line:\n"
        "  objective  is next_token, whose loss is of tokens, and examples of data.format pairs "
        "are for losses of pairs: objective ipo, orpo, preference, reward or simpo would do"
    )
    assert refused("data.format=pairs", "objective=kto") == (
        "1 problem in the recipe and the command line:\n"
        "  objective  is kto, whose loss is of answers, and examples of data.format pairs are for "
        "losses of pairs: data.format unpaired would do"
    )
    for name in ("ipo", "orpo", "preference", "simpo"):
        read("data.format=pairs", f"objective={name}")
    read("data.format=unpaired", "objective=kto")


def test_a_sample_of_a_bidirectional_family_is_refused():
    family = ["model.family=bidirectional", "objective.kind=masked", "train.sample=Once"]
    assert refused(*family) == (
        "1 problem in the recipe and the command line:\n"
        "  train.sample  is Once; generation needs a causal family, and bidirectional attends in "
        "both directions: leave it out"
    )


def test_where_and_how_fast_a_run_goes_does_not_make_it_another_run():
    same = read(
        "train.steps=90",
        "train.remat=full",
        "train.microbatch=auto",
        "train.evaluate_every=3",
        "train.sampling.temperature=0.1",
        "telemetry.every=3",
        "checkpoint.every=3",
        "data.cache=elsewhere",
        "data.workers=2",
        "data.prefetch=9",
        "run.dir=there",
        "device=cpu",
        "mesh.fsdp=1",
    )
    assert digest(same) == digest(read())
    assert digest(read("train.steps=null", "train.epochs=2")) == digest(read())


@pytest.mark.parametrize(
    "key",
    [
        "model.theta=2e4",
        "tokenizer=bpe tokenizer.vocab=300",
        "data.length=32",
        "data.stride=32",
        "data.split_seed=42",
        "data.source.limit=9",
        "data.source=null data.mixture=[stories]",
        "objective.z_loss=1e-4",
        "optim.beta2=0.99",
        "train.batch=16",
        "train.seed=1",
        "train.ema=0.9",
        "start.run=runs/another",
    ],
)
def test_what_is_computed_makes_it_another_run(key):
    assert digest(read(*key.split())) != digest(read())


def test_the_sizes_that_a_chip_may_pad_are_named_by_their_keys():
    assert widths(read()) == {
        "data.length": 64,
        "model.embed": 32,
        "model.mlp": 64,
        "model.vocab": 257,
        "model.heads × model.head_dim": 32,
    }


def test_a_stored_recipe_is_the_same_run():
    run = read("train.accumulation=2")
    again = load_text(to_yaml(run))
    assert essence(again) == essence(run) and digest(again) == digest(run)
    assert dataclasses.asdict(again) == dataclasses.asdict(run)


def load_text(text: str) -> Run:
    import yaml

    from windlass.config.text import parse

    assert isinstance(yaml.safe_load(text), dict)
    return load(parse(text, "stored")[0]).read(Run, "cpu")


def test_another_member_of_an_open_set_keeps_the_keys_it_knows_and_no_others():
    from windlass.models import qwen3
    from windlass.sources import jsonl, text

    run = read("data.source={kind: jsonl, path: x.jsonl}", "model.family=qwen3")
    assert run.data.source == jsonl.Source(path="x.jsonl")
    assert isinstance(run.model, qwen3.Config) and run.model.embed == 32
    recipe = {**RECIPE, "data": {"source": {"kind": "stories", "count": 9}, "length": 64}}
    changed = load(recipe, ["data.source.kind=text", "data.source.path=x"]).read(Run, "cpu")
    assert changed.data.source == text.Source(path="x")


def test_rows_too_long_for_attention_without_a_flash_kernel_are_refused():
    assert refused("data.length=8320") == (
        "1 problem in the recipe and the command line:\n"
        "  data.length  is 8320; attention here is plain XLA: there is no flash kernel for cpu "
        "devices, and a row takes length × length numbers in each head: up to 8192 would do"
    )
    assert read("data.length=8192").data.length == 8192


def test_a_flash_kernel_takes_longer_rows_and_float32_has_none_on_a_gpu():
    keys = ("data.length=65536", "model.head_dim=64")
    assert read(*keys, kind="gpu", name="NVIDIA H200")
    assert read(*keys, kind="tpu", name="TPU v5 lite")
    exact = refused(*keys, "precision.compute=float32", kind="gpu", name="NVIDIA H200")
    assert exact == (
        "1 problem in the recipe and the command line:\n"
        "  data.length  is 65536; attention here is plain XLA: cuDNN has no flash kernel for "
        "float32 matrices, and a row takes length × length numbers in each head: up to 8192 "
        "would do"
    )
