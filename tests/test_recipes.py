"""Every recipe that ships: it opens with what to expect, and it runs."""

import dataclasses
import importlib
import math
import shlex
import shutil
import socket
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import windlass
from tests import published
from tests.hub.published import QWEN2_5_0_5B, QWEN3_0_6B
from tests.sources import test_arc as arc
from windlass.adapters import bits_per_weight
from windlass.config import Every, load, shipped, tree
from windlass.data.tokenizer import SMALLEST_VOCABULARY
from windlass.errors import UserError
from windlass.layers.names import named
from windlass.planning.plan import Plan
from windlass.program.built import Built
from windlass.starting.describe import describe

ROOT = Path(__file__).parents[1]
CHIPS = 8  # of the commands in docs/distillation.md
VOCAB = SMALLEST_VOCABULARY + 20
BY_HUB = [
    *("train.epochs=null", "train.steps=2", "train.batch=4", "data.validation=0.1"),
    *("device=cpu", "device.count=1"),
]
SHORT = ["data.length=256", "data.longer=cut"]
WHOLE = ["data.length=512"]  # what belongs together is not cut
SMALL = [
    "train.steps=2",
    "train.batch=8",
    "data.length=32",
    "data.source.count=100",
    "data.validation=0.05",
    "device=cpu",
    "device.count=1",
]
# Of puzzles, which have a length and a vocabulary of their own.
THINKING = [
    *("train.steps=2", "train.batch=8", "device=cpu", "device.count=1"),
    *("model.embed=32", "model.mlp=48", "model.passes=2"),
]
GENERATED = [*THINKING, "data.source.count=100", "data.validation=0.2"]
OF_PUZZLES = {
    "trm-maze": [*GENERATED, "data.source.size=10", "data.source.shortest=8"],
    "trm-arc": [*THINKING, "data.source.copies=3", "model.prefix.identifiers=13", "model.heads=1"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A cache of the hub in which every model of a recipe is a tiny one."""
    names = {name for one in shipped() for name in (on_hub(one), teacher_of(one)) if name}
    return published.in_cache(tmp_path_factory.mktemp("hub"), *names)


@pytest.fixture(autouse=True)
def hub(models, tmp_path, monkeypatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return Path(shutil.copytree(models, tmp_path / "hub"))


def on_hub(name: str) -> str | None:
    return load(name).merged(None)["model"].get("hub")


def teacher_of(name: str) -> str | None:
    return load(name).merged(None)["data"].get("teacher", {}).get("model", {}).get("hub")


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_opens_with_its_command_hardware_time_and_the_number_to_expect(name):
    text = shipped()[name].read_text(encoding="utf-8")
    opening = text[: text.index("\n\n")]
    first, *rest = [line.removeprefix("#").strip() for line in opening.splitlines()]
    assert all(line.startswith("#") for line in opening.splitlines())
    assert first.endswith(".") and len(first) < 100
    assert f"windlass train {name}" in rest
    words = " ".join(rest)
    assert "Hardware: " in words
    assert "minute" in words or "hour" in words
    assert "Expect " in words


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_is_in_order_as_it_is_written(name):
    assert describe(name, ["device=cpu"]).name == name


# The others train as tests/cli/test_tuned.py and tests/trained.py do.
QUICK = {"legal-cot-sft"}
TIERED = [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in shipped()]


@pytest.mark.parametrize("name", TIERED)
def test_a_recipe_runs_two_steps_reduced(name, tmp_path):
    keys, data = SMALL, load(name).merged(None)["data"]
    if on_hub(name):
        keys = [*BY_HUB, *(WHOLE if data.get("format") == "pairs" else SHORT)]
    has_tokenizer = "tokenizer" in load(name).merged(None)
    recipe = reduced(name) if has_tokenizer and not on_hub(name) else name
    if "minimum" in load(name).merged(None).get("objective", {}):
        keys = [*keys, "objective.minimum=1"]
    if not on_hub(name) and not has_tokenizer:
        keys = OF_PUZZLES.get(name, GENERATED)
    if data["source"]["kind"] == "arc":
        keys = [*keys, *arc_folders(tmp_path)]
    if "teacher" in data:
        keys = [*SMALL, f"data.teacher.path={tmp_path}/cache", "train.accumulation=2"]
        if not teacher_of(name):
            windlass.train(reduced("quickstart"), [*SMALL, f"run.dir={tmp_path}/teacher"])
            keys.append(f"data.teacher.model.run={tmp_path}/teacher")
        windlass.teach(recipe, keys)
    trained = windlass.train(recipe, [*keys, f"run.dir={tmp_path}/run"])
    assert (trained.step, trained.is_finished) == (2, True)
    assert math.isfinite(trained.last["loss"])
    assert trained.last["validation_loss"] < 1.5 * math.log(VOCAB)


def test_the_legal_recipe_has_the_settings_of_what_it_was_written_for():
    run = describe("legal-cot-sft", ["device=cpu"]).run
    assert run.start is not None and run.start.hub == "Qwen/Qwen2.5-0.5B"
    assert run.optim is not None
    (adapter,) = run.adapter
    assert (run.data.length, run.train.batch, run.train.epochs) == (1024, 64, 3)
    assert (run.optim.learning_rate, run.optim.weight_decay, run.optim.clip_norm) == (
        2e-4,
        0.01,
        0.3,
    )
    assert (run.optim.beta1, run.optim.beta2, run.optim.eps) == (0.9, 0.999, 1e-8)
    schedule = run.optim.schedule
    assert (schedule.shape, schedule.floor, schedule.decay_share) == ("cosine", 0, 1)
    assert [schedule.warmup(steps) for steps in (75, 100)] == [3, 3]  # 3%, rounded up
    assert (adapter.rank, adapter.alpha, adapter.dropout) == (32, 64, 0.05)
    assert adapter.targets == tuple(f"{name}_proj" for name in "q k v o gate up down".split())
    assert run.checkpoint.every == Every(50, "steps", (Every(1, "epochs"),))
    assert (run.checkpoint.keep, run.telemetry.every) == (2, Every(5))
    assert (run.data.validation, run.data.test, run.data.split_seed) == (0.1, 0.1, 42)
    assert run.data.packing == "documents"
    headings = [one.heading.removeprefix("### ") for one in run.data.format.sections]
    assert headings == [
        *("Instruction", "Response", "Topic", "Difficulty", "Reasoning", "Answer"),
        "Case Citation",
    ]
    assert [one.optional for one in run.data.format.sections] == [*[False] * 4, True, False, True]
    assert run.data.format.loss_from is None


@pytest.mark.long
def test_the_legal_recipe_trains_the_share_of_the_published_model_that_it_says(hub):
    folder = hub / "models--Qwen--Qwen2.5-0.5B" / "snapshots" / published.COMMIT
    (folder / "config.json").write_text(QWEN2_5_0_5B)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    chosen = Built(describe("legal-cot-sft", ["device=cpu"])).trainable
    assert (chosen.trained, chosen.total) == (17_596_416, 511_629_184)
    plan = windlass.plan("legal-cot-sft", on="v5e-1", rows=2054)
    assert isinstance(plan, Plan) and plan.fits == "yes"  # on one chip of 16 GB, as it says


def test_the_recipe_that_quantises_trains_the_factors_that_it_says(hub):
    real(hub)
    built = Built(describe("qwen3-qat", ["device=cpu"]))
    assert built.trainable.trained == 20_191_360
    assert bits_per_weight(built.abstract) == pytest.approx(4.73, abs=5e-3)
    plan = windlass.plan("qwen3-qat", on="v5e-1", rows=50_000)
    assert isinstance(plan, Plan) and plan.fits == "yes"


@pytest.mark.long
def test_the_recipe_that_repairs_trains_small_adapters_and_nothing_else(hub):
    real(hub)
    run = describe("recovery-lora", ["device=cpu"]).run
    assert Built(describe("recovery-lora", ["device=cpu"])).trainable.trained == 4_587_520
    assert run.optim is not None
    objective, schedule = run.objective, run.optim.schedule
    assert (objective.temperature, objective.hard, objective.hard_end) == (1.05, 0.02, 0.0)
    assert (objective.anchor, objective.anchor_sequences) == (0.01, 32)
    assert (run.optim.learning_rate, run.train.steps, schedule.floor) == (8e-5, 1200, 0.1)
    assert (run.train.batch, run.train.accumulation, run.data.length) == (32, 8, 1024)
    plan = windlass.plan("recovery-lora", on="v6e-1", rows=50_000)
    assert isinstance(plan, Plan) and plan.fits == "yes"


def test_the_baseline_of_reservoirs_is_trained_as_what_it_was_written_for():
    run = describe("tinystories-transformer", ["device=cpu"]).run
    optim, train, data = run.optim, run.train, run.data
    assert optim is not None
    assert (optim.beta1, optim.beta2, optim.weight_decay, optim.clip_norm) == (0.9, 0.95, 0.01, 1)
    assert (optim.schedule.shape, optim.schedule.floor) == ("cosine", 0)
    assert [optim.schedule.warmup(steps) for steps in (230, 10_000, 52_416)] == [12, 500, 500]
    assert (train.accumulation, train.batch) == (8, 64) and train.patience and train.evaluate_every
    assert (data.stride, data.shuffle, data.packing) == (None, True, "documents")
    sampling = train.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.8, 50, 0.9)
    on_tpu = load("tinystories-transformer").merged("tpu")
    assert on_tpu["train"]["batch"] == 2 * 64
    assert on_tpu["optim"]["learning_rate"] == pytest.approx(1.2 * optim.learning_rate)
    hub = "data.source={kind: hub, name: roneneldan/TinyStories}"  # as its header says
    (part,) = describe("tinystories-transformer", ["device=cpu", hub]).run.data.parts
    assert part.source.name == "roneneldan/TinyStories"


def test_the_reservoir_is_trained_as_its_baseline_and_has_as_many_trainable_parameters():
    names = ("tinystories-transformer", "tinystories-reservoir")
    ours, other = (load(name).merged("tpu") for name in names)
    train = {"layers_per_loop": ours["train"]["layers_per_loop"]}
    assert {**other, "model": None, "train": other["train"] | train} == {**ours, "model": None}
    sizes = [Built(describe(name, ["device=cpu"])).trainable.trained for name in names]
    assert sizes == [597_120, 598_208]  # 0.2% apart


@pytest.mark.parametrize(
    ("name", "trained", "core"),
    [
        ("athena-small", 10_486_786, 9_438_210),
        ("athena-large", 465_965_570, 318_509_570),
        ("trm-sudoku", 5_029_378, 5_017_602),
        ("hrm-sudoku", 27_275_778, 27_264_002),
        ("trm-maze", 6_823_426, 6_816_770),
        ("trm-arc", 416_429_570, 6_816_770),
    ],
)
def test_the_recursive_recipes_have_the_parameters_that_they_say(name, trained, core):
    built = Built(describe(name, ["device=cpu"]))
    assert built.trainable.trained == trained
    tables = ("embedding.", "head.", "prefix.")
    sizes = [x.size for one, x in named(built.abstract) if one.startswith(tables)]
    assert trained - sum(sizes) == core


@pytest.mark.long
@pytest.mark.parametrize("name", ["trm-maze", "trm-arc"])
def test_the_recipes_of_large_puzzles_are_planned_with_their_mesh_left_open(name):
    assert "mesh" not in load(name).merged(None)
    plan = windlass.plan(name, on="v5e-8", rows=3000)
    assert isinstance(plan, Plan) and plan.fits == "yes"


def test_tasks_that_are_not_there_are_named_with_where_to_get_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        windlass.train("trm-arc", ["device=cpu", "device.count=1", "train.microbatch=null"])
    assert str(refused.value) == (
        "data.source.path is ARC-AGI/data/training, which does not exist; it is looked for from "
        f"{tmp_path}; `git clone https://github.com/fchollet/ARC-AGI` has such folders, "
        "data/training and data/evaluation"
    )


def arc_folders(place: Path) -> list[str]:
    """Keys of folders of ARC tasks as small as can be: two to train on, and two to evaluate."""
    tasks = {f"task{n}": arc.task(n, demonstrations=4) for n in range(4)}
    folders = {"path": ("task0", "task1"), "evaluation": ("task2", "task3")}
    written = {
        key: arc.write(place / key, **{name: tasks[name] for name in names})
        for key, names in folders.items()
    }
    return [f"data.source.{key}={folder}" for key, folder in written.items()]


def of_a_layer(d: int, mlp: int, scales: int) -> int:
    """Parameters of a multiscale layer with kernels of 3, but for its residual connections."""
    convolutions = (scales - 1) * (3 * d * d + d)
    queries_and_keys = scales * 2 * (d * d + d)
    values_and_output = 2 * (d * d + d)
    return convolutions + queries_and_keys + values_and_output + 3 * d * mlp + 2 * mlp + d + 2 * d


def of_streams(d: int, n: int) -> int:
    """Parameters of the two connections of a layer: φ, α and biases."""
    return 2 * (n * d * (n * n + 2 * n) + 3 + 2 * n + n * n)


DENSE = "residual={kind: sinkhorn_dense}"
WIDE = "model.vocab=65536"


@pytest.mark.parametrize(
    ("keys", "trained", "billions"),
    [
        ([], 3_083_418_088, 3.08),
        ([WIDE], 3_150_526_952, 3.15),
        ([DENSE], 3_307_402_240, 3.311),
        ([DENSE, WIDE], 3_374_511_104, 3.382),
    ],
)
def test_the_multiscale_recipe_has_the_parameters_of_its_formula(keys, trained, billions):
    """The original counts a table of angles in every layer, which it trains: ours are constants."""
    d, layers, vocab, length = 2048, 28, 49_152, 2048
    if WIDE in keys:
        vocab, length = 65_536, 4096
    residual = 2 * (d * d + d) if DENSE in keys else of_streams(d, 4)
    formula = 2 * vocab * d + d + layers * (of_a_layer(d, 3712, 4) + residual)
    angles = layers * length * 64 if DENSE in keys else 0
    assert formula == trained
    assert (formula + angles) / 1e9 == pytest.approx(billions, abs=5e-4 if angles else 5e-3)
    run = describe("nash-mhc-3b", ["device=cpu", *keys])
    assert Built(run).trainable.trained == trained


def test_the_small_multiscale_recipe_has_the_parameters_that_it_says():
    built = Built(describe("nash-mhc-small", ["device=cpu"]))
    layer = of_a_layer(512, 1024, 3) + of_streams(512, 4)
    assert built.trainable.trained == 2 * 1024 * 512 + 512 + 6 * layer == 33_148_740


def test_the_streaming_recipe_is_planned_without_the_network(monkeypatch):
    """Its corpus and its tokenizer are on the hub, and a plan needs neither."""
    from huggingface_hub import constants

    called = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: called.append(address))
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: called.append(address))
    run = describe("nash-mhc-3b", ["device=cpu"]).run
    (part,) = run.data.parts
    assert part.source.is_streamed and run.train.steps == 100_000
    plan = windlass.plan("nash-mhc-3b", on="v6e-8", overrides=["model.layers=2"])
    assert isinstance(plan, Plan) and plan.fits == "yes" and plan.time is not None
    assert called == []


@pytest.mark.long
def test_a_plan_corrects_what_was_said_of_three_billion_parameters_on_one_chip():
    """Memory of one v6e chip, and 50,000 tokens a second on it, were claimed for the original."""
    one, eight = windlass.plan("nash-mhc-3b", on="v6e-1"), windlass.plan("nash-mhc-3b", on="v6e-8")
    assert isinstance(one, Plan) and isinstance(eight, Plan)
    assert one.target.devices == 1 and one.fits == "no" and eight.fits == "yes"
    assert one.memory.total > 2 * one.memory.limit
    peak = one.target.chip.peak["bfloat16"]
    for parameters in (3.083e9, 3.307e9):
        assert 6 * parameters * 50_000 > peak  # of a model that reads each weight for each token
    assert one.time is not None and eight.time is not None
    tokens = one.settings["batch"] * one.settings["row_tokens"]
    # Coarse scales have fewer positions, so that this one computes less. It still needs more of
    # the peak than any step has, and once more the forward pass, as activations must be remade.
    share = one.time.flops / tokens * 50_000 / peak
    print(f"50k tokens/s: {share:.3f} of the peak, {4 / 3 * share:.3f} with rematerialization")
    assert share > 0.75 and 4 / 3 * share > 1
    assert tokens / one.time.seconds < 25_000


def real(hub: Path) -> None:
    """Give the hub's model of the recipes the config that it has there, and no weights."""
    folder = hub / "models--Qwen--Qwen3-0.6B" / "snapshots" / published.COMMIT
    (folder / "config.json").write_text(QWEN3_0_6B)
    for file in folder.glob("*.safetensors"):
        file.unlink()


@pytest.mark.long
def test_the_commands_of_several_chips_that_the_docs_have_run_reduced(tmp_path, monkeypatch):
    """docs/distillation.md: a cache of another program, and batches of each chip as one of all."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/distillation.md").read_text()
    block = next(one for one in text.split("```sh\n") if "windlass train qwen3-qat" in one)
    commands = shlex.split(block[: block.index("```")].replace("\\\n", " ").replace("\n", " ; "))
    each = [list(some) for is_end, some in groupby(commands, key=";".__eq__) if not is_end]
    assert [words[1:3] for words in each] == [
        ["teach", "--import"],
        ["train", "qwen3-qat"],
        ["teach", "--import"],
        ["train", "recovery-lora"],
    ]
    for words in each:
        if "--import" in words:
            place = Path(words[words.index("--import") + 1])
            write_cache(place)
            windlass.teach(imports=place, out=words[words.index("--out") + 1])
            continue
        recipe, keys = words[2], words[3:]
        whole, parts = (number(keys, f"train.{key}") for key in ("batch", "accumulation"))
        assert whole == {"qwen3-qat": 8, "recovery-lora": 4}[recipe] * parts * CHIPS
        small = [f"train.batch={2 * parts}", "train.steps=2", "data.validation=0.1", "device=cpu"]
        trained = windlass.train(recipe, [*keys, *small, "device.count=2"])
        assert (trained.step, trained.is_finished) == (2, True)
        assert trained.last["validation_loss"] < math.inf


def number(keys: list[str], name: str) -> int:
    return int(next(key for key in keys if key.startswith(f"{name}=")).partition("=")[2])


def write_cache(folder: Path) -> None:
    """A cache as the original system writes it, of random logits."""
    folder.mkdir(parents=True)
    rng, rows, length, candidates = np.random.default_rng(0), 40, 17, 8
    ids = np.argsort(rng.random((rows, length - 1, published.VOCAB)))[..., :candidates]
    logits = -np.sort(-rng.normal(size=ids.shape))
    arrays: dict[str, Any] = {
        "input_ids": rng.integers(published.VOCAB, size=(rows, length)).astype(np.int32),
        "attention_mask": np.ones((rows, length), np.uint8),
        "topk_idx": ids.astype(np.int32),
        "topk_logits": logits.astype(np.float16),
    }
    np.savez(folder / "shard_00000.npz", **arrays)


def reduced(name: str) -> dict:
    """A recipe with the tiny model of its family, and a vocabulary as small as can be learned."""
    recipe = load(name).merged("cpu")
    if recipe["data"]["source"]["kind"] == "hub":  # a corpus that is not here
        recipe["data"]["source"] = {"kind": "stories"}
        recipe["tokenizer"] = {"kind": "bpe", "vocab": VOCAB}
    family = recipe["model"]["family"]
    tiny = importlib.import_module(f"windlass.models.{family}").Config.tiny()
    recipe["model"] = {"family": family, **tree(dataclasses.replace(tiny, vocab=VOCAB))}
    if recipe["tokenizer"]["kind"] == "bpe":
        recipe["tokenizer"]["vocab"] = VOCAB
    return recipe
