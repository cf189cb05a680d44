"""A run over a frozen base in 4 bits: loaded, trained beside, resumed, exported."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import windlass
from tests import tiny, trained
from tests.hub import four_bit_files as files
from tests.hub.peers import HAS_PEFT
from tests.training.test_loop import Told
from windlass import adapters
from windlass.checkpoint import archive
from windlass.checkpoint.store import FROZEN, folder_of
from windlass.config.start import FrozenBase
from windlass.data import vocabulary as vocabularies
from windlass.devices.axes import placements
from windlass.errors import UserError
from windlass.hub import config as configs
from windlass.hub import quantized, weights
from windlass.hub.names import to_tensors
from windlass.models import llama, mixtral
from windlass.networks.experts.routing import Router
from windlass.program.built import Built
from windlass.quantization.four_bit_linear import FourBitLinear, frozen
from windlass.starting import frozen_models
from windlass.starting.describe import describe
from windlass.starting.four_bit_weights import BaseWeights

SIZES = dict(vocab=300, embed=64, mlp=128, layers=2, heads=4, kv_heads=2, head_dim=16)
CONFIG = replace(llama.Config.tiny(), **SIZES, scaling=None)
BIASED = replace(CONFIG, attention_bias=True, mlp_bias=True)
KEYS = ("train.steps=2", "checkpoint.every=1", "checkpoint.keep=9", "optim.learning_rate=1e-2")
LORA = {"kind": "lora", "rank": 4, "targets": ["blocks.mlp.*", "q_proj"]}


def model(config=CONFIG):
    return tiny.made(config)


def is_matrix(name: str) -> bool:
    return ".layers." in name and name.endswith("proj.weight")


def names(config) -> dict[str, str]:
    return sys.modules[type(config).__module__].NAMES


def write(folder: Path, kind: str | None = None, config: Any = CONFIG) -> dict[str, np.ndarray]:
    """A small model as it would be downloaded, in numbers or in 4 bits; gives its matrices."""
    folder.mkdir(parents=True)
    stored, held = {}, {}
    about = configs.written(config, length=90, dtype="float32")
    if kind is not None:
        about["quantization_config"] = _settings(kind)
    for name, x in to_tensors(model(config), names(config)).items():
        parts, held[name] = {name: x}, x
        if is_matrix(name) and kind is not None:
            parts, held[name] = _parts(kind, name, x)
        stored |= parts
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(about))
    vocabularies.byte().save(folder)
    return held


def _settings(kind: str) -> dict:
    if kind.startswith("nf4"):
        return files.BITSANDBYTES
    return files.compressed_tensors(32, symmetric=kind == "int4")


def _parts(kind: str, name: str, x: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    if kind.startswith("nf4"):
        return files.normal_float(name, x, nested=kind == "nf4 nested")
    module = name.removesuffix(".weight")
    return files.integers(module, x, 32, symmetric=kind == "int4")


def recipe(**model) -> dict:
    model = {key: x for key, x in ({"path": "source"} | model).items() if x is not None}
    return trained.on_weights(**model) | {"adapter": LORA}


def refused(*keys: str, **model) -> str:
    return trained.refusal(recipe(**model), keys)


def loaded(folder: Path, base: FrozenBase, mesh=None, config: Any = CONFIG):
    """The model of a folder in 4 bits, and what was said of it."""
    made = eqx.filter_eval_shape(lambda: frozen(config.init(jax.random.key(0)), base))
    shapes, static = eqx.partition(made, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    if mesh is not None:
        shapes = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            shapes,
            placements(shapes, mesh),
        )
    reading = BaseWeights(shapes)
    arrays = weights.load(folder, reading.plain, names(config), reading.fill)
    paths = jax.tree_util.tree_leaves_with_path(shapes)
    leaves = [arrays[jax.tree_util.keystr(path, simple=True, separator=".")] for path, _ in paths]
    whole = eqx.combine(jax.tree.unflatten(jax.tree.structure(shapes), leaves), static)
    return whole, reading.facts()


@pytest.fixture
def corpus(here) -> Path:
    trained.write_corpus(here / trained.CORPUS, trained.DOCUMENTS)
    return here


@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "int4", "int4 with zeros"])
def test_files_in_4_bits_are_read_as_they_are(tmp_path, kind):
    held = write(tmp_path / "model", kind, BIASED)
    base = quantized.read(configs.load(tmp_path / "model"))[0]
    assert base is not None and base.kind == kind[:4].rstrip()
    found, facts = loaded(tmp_path / "model", base, config=BIASED)
    assert isinstance(found.blocks.kinds[0].attention.query, FourBitLinear)
    assert facts[0][1].startswith(f"{base.kind}, 14 matrices of ")
    assert facts[0][1].endswith(" bits a weight, as the files have them")
    tensors = to_tensors(eqx.filter_jit(adapters.merged)(found), llama.NAMES)
    assert tensors.keys() == held.keys()
    apart = {name: float(np.abs(tensors[name] - held[name]).max()) for name in held}
    assert max(apart.values()) < 1e-7


@pytest.mark.parametrize("kind", [pytest.param("nf4", marks=pytest.mark.long), "int4 with zeros"])
def test_every_mesh_has_the_same_base(tmp_path, kind):
    held = write(tmp_path / "model", kind)
    base = quantized.read(configs.load(tmp_path / "model"))[0]
    assert base is not None
    with tiny.on((2, 2, 2)) as mesh:
        found, _ = loaded(tmp_path / "model", base, mesh)
        split = found.blocks.kinds[0].mlp.up
        assert tuple(split.codes.sharding.spec) == (None, "fsdp", "tensor")
        merged = eqx.filter_jit(adapters.merged)(found)
        tensors = to_tensors(merged, llama.NAMES)
    assert max(float(np.abs(tensors[name] - held[name]).max()) for name in held) < 1e-7


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int4", marks=pytest.mark.long)])
def test_numbers_are_quantised_on_every_mesh_alike_and_the_error_is_reported(tmp_path, kind):
    held, base = write(tmp_path / "model"), FrozenBase(kind=kind, group=16)
    found = []
    for sizes in ((1, 1, 1), (2, 2, 2)):
        with tiny.on(sizes) as mesh:
            made, ((_, said),) = loaded(tmp_path / "model", base, mesh)
            merged = eqx.filter_jit(adapters.merged)(made)
            found.append((to_tensors(merged, llama.NAMES), said))
    (one, said), (other, _) = found
    assert all(np.array_equal(one[name], other[name]) for name in one)
    matrices = [name for name in held if is_matrix(name)]
    error = sum(np.square(one[name] - held[name]).sum() for name in matrices)
    whole = math.sqrt(error / sum(np.square(held[name]).sum() for name in matrices))
    assert 0.02 < whole < 0.2
    start = f"{kind}, 14 matrices of 5.00 bits a weight, relative error {whole:.4f}, at most "
    assert said.startswith(start)
    assert all(np.array_equal(one[name], held[name]) for name in held if not is_matrix(name))


def test_experts_are_quantised_one_by_one_on_every_mesh_and_a_router_is_not(tmp_path):
    config = replace(mixtral.Config.tiny(), vocab=300, embed=32, mlp=48, head_dim=16)
    base = FrozenBase(kind="nf4", group=16, scales="float32")
    held, found = write(tmp_path / "model", config=config), []
    for sizes, expert in (((1, 1, 1), 1), ((1, 1, 2), 4)):
        with tiny.on(sizes, expert) as mesh:
            made, _ = loaded(tmp_path / "model", base, mesh, config)
            merged = to_tensors(eqx.filter_jit(adapters.merged)(made), names(config))
            _, batch = tiny.placed({}, tiny.rows(300), mesh)
            found.append((merged, float(eqx.filter_jit(tiny.loss)(made, batch))))
    (one, loss), (other, again) = found
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert abs(loss - again) < 1e-5
    layer = made.blocks.kinds[0].mlp
    assert type(layer.router) is Router
    codes = layer.experts.gate.codes
    assert codes.sharding.shard_shape(codes.shape) == (config.layers, 2, 16, 24)
    for name in (name for name in held if ".experts." in name):
        _, expected = files.normal_float(name, held[name], 16, nested=False)
        assert np.abs(one[name] - expected).max() < 1e-7


@pytest.mark.long
def test_a_run_trains_beside_the_base_resumes_and_exports(corpus):
    held = write(Path("source"))
    told = Told("run.dir=mine", *KEYS, recipe=recipe(base="nf4"))
    assert "base         nf4, 14 matrices of " in told.text
    mine = told.trained.folder
    manifest = archive.manifest(folder_of(mine) / FROZEN)["arrays"]
    codes = manifest["model.blocks.kinds.0.mlp.up.base.codes"]
    assert (codes["dtype"], codes["shape"]) == ("uint8", [2, 32, 128])
    assert not any(name.endswith("mlp.up.base.weight") for name in manifest)
    again = Told("run.dir=mine", *KEYS, "train.steps=3", recipe=recipe(base="nf4"))
    assert "resuming from step 2 of 3 in mine" in again.text
    with pytest.raises(UserError, match="base"):
        Told("run.dir=mine", *KEYS, "train.steps=4", recipe=recipe(base="int4"))

    compared = windlass.export("mine", "merged", form="merged", check=HAS_PEFT).comparison
    assert compared is None or compared.good
    merged = load_file("merged/model.safetensors")
    assert merged.keys() == held.keys()
    apart = {name: np.abs(merged[name] - held[name]).max() for name in held}
    assert all((apart[name] > 1e-3) == is_matrix(name) for name in held)
    assert "quantization_config" not in json.loads(Path("merged/config.json").read_text())
    with pytest.raises(UserError, match="^mine has a base in nf4, stored in a run alone"):
        windlass.export("mine", "own", form="own")
    compared = windlass.export("mine", "adapter", check=HAS_PEFT).comparison
    assert compared is None or compared.good
    about = json.loads(Path("adapter/adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == "source"
    ours = windlass.evaluate("mine")["loss"]
    assert ours == pytest.approx(windlass.evaluate("merged", data="mine")["loss"], rel=1e-4)


@pytest.mark.long
def test_another_run_goes_on_with_the_base_or_quantises_what_it_merges(corpus):
    write(Path("source"))
    Told("run.dir=first", *KEYS, recipe=recipe(base="nf4"))
    again = Told("run.dir=next", *KEYS, recipe=recipe(path=None, run="first"))
    before, after = (archive.manifest(folder_of(Path(x)) / FROZEN) for x in ("first", "next"))
    assert before["arrays"] == after["arrays"]
    assert "base  " not in again.text
    wider = recipe(path=None, run="first") | {"adapter": LORA | {"rank": 5}}
    assert "base         nf4, 14 matrices of " in Told("run.dir=wide", *KEYS, recipe=wider).text
    other = Told("run.dir=other", *KEYS, recipe=recipe(path=None, run="first", base="int4"))
    assert "last weights, the adapter merged" in other.text
    assert "base         int4, 14 matrices of " in other.text


@pytest.mark.long
def test_a_run_in_full_is_quantised_by_one_that_starts_from_it(corpus):
    write(Path("source"))
    Told("run.dir=first", *KEYS, "train.steps=1", "adapter=null", recipe=recipe())
    told = Told("run.dir=next", *KEYS, recipe=recipe(path=None, run="first", base="nf4"))
    assert "loaded       all " in told.text
    assert "base         nf4, 14 matrices of " in told.text


@pytest.mark.long
def test_a_model_in_4_bits_is_used_as_it_is_published(corpus):
    held = write(Path("stored"), "nf4 nested")
    Path("full").mkdir()
    save_file(held, "full/model.safetensors", metadata={"format": "pt"})
    about = json.loads(Path("stored/config.json").read_text())
    del about["quantization_config"]
    Path("full/config.json").write_text(json.dumps(about))
    vocabularies.byte().save(Path("full"))
    keys = {"tokens": 6, "temperature": 0.0}
    found, expected = (windlass.generate(name, "Once", **keys) for name in ("stored", "full"))
    assert found == expected


def test_a_teacher_may_have_files_in_4_bits(corpus):
    write(Path("source"))
    held = write(Path("stored"), "int4")
    taught = recipe() | {"objective": {"kind": "distil", "teacher": {"path": "stored"}}}
    described = describe(taught, ["adapter=null"])
    assert described.run.base is None
    with described.scope():
        built = Built(described)
        trees, ((_, said),) = frozen_models.take(built, None)
        (teacher,) = built.joined(trees).values()
        tensors = to_tensors(eqx.filter_jit(adapters.merged)(teacher), llama.NAMES)
    assert teacher.blocks.kinds[0].mlp.up.codes.dtype == "uint8" and "frozen parameters" in said
    assert max(float(np.abs(tensors[name] - held[name]).max()) for name in held) < 1e-7
    with pytest.raises(UserError, match="^objective.teacher.base is nf4; a base in 4 bits is of"):
        taught["objective"]["teacher"] |= {"base": "nf4"}
        describe(taught)


def test_what_makes_no_sense_over_a_base_is_refused(corpus):
    write(Path("source"))
    head = "1 problem in the recipe and the command line:\n  model.base  "
    assert refused("adapter=null", base="nf4") == (
        f"{head}is nf4, in which weights are frozen; adapter=lora trains matrices beside them, and "
        "without model.base all are trained"
    )
    assert refused("adapter.kind=grid", base="int4").startswith(
        f"{head}is int4, in which weights are frozen; adapter grid has codes of its own"
    )
    assert refused(base={"kind": "nf4", "zeros": True}).endswith(
        "model.base.zeros  is true; nf4 has no zero points"
    )
    assert refused(base={"kind": "nf4", "group": 4}).endswith(
        "model.base.group  is 4; it must be even, and 8 or more"
    )
    write(Path("nf4"), "nf4")
    assert refused(path="nf4", base="int4") == (
        "model.base is int4; the files of nf4 are nf4: leave model.base out, or name a model "
        "whose weights are numbers"
    )


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8"])
def test_other_ways_to_quantise_are_refused_by_name(corpus, method):
    write(Path("source"))
    about = json.loads(Path("source/config.json").read_text())
    about["quantization_config"] = {"quant_method": method, "bits": 4}
    Path("source/config.json").write_text(json.dumps(about))
    assert refused() == (
        f'1 problem in source/config.json:\n  quantization_config  is "{method}"; bitsandbytes NF4 '
        "and compressed-tensors int4 are read"
    )
