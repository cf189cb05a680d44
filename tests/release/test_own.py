"""Models that only Windlass computes: exported, and read back with the same bits."""

import json
from pathlib import Path

import equinox as eqx
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

import windlass
from tests import strangers
from windlass import adapters, seal
from windlass.checkpoint.fingerprint import measure, named
from windlass.errors import UserError
from windlass.evaluation.finished_run import open_on_cpu
from windlass.program.built import Built
from windlass.program.programs import Programs
from windlass.starting import origin
from windlass.starting.describe import describe
from windlass.training.train import train

ALONE = ["device.kind=cpu", "device.count=1", "train.steps=1"]


def recipe(name: str) -> dict:
    return yaml.safe_load((strangers.HERE / "recipes" / f"{name}.yaml").read_text())


def trained(name: str, factory) -> Path:
    run = factory.mktemp(name) / "run"
    train(recipe(name), [f"run.dir={run}", *ALONE])
    return run


@pytest.fixture(scope="module")
def codebook(tmp_path_factory) -> Path:
    return trained("codebook", tmp_path_factory)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory) -> Path:
    return trained("frozen", tmp_path_factory)


def stored(run: Path):
    """The model of a run as its checkpoint has it."""
    source = open_on_cpu(run, weights="last", step=None)
    with source.scope():
        return source.stored_model()[1]


def begun(whole: dict, *keys: str) -> tuple[Built, dict, list]:
    """The model that a recipe starts with, its arrays by path, and the facts of its start."""
    described = describe(whole, [*ALONE, *keys])
    with described.scope():
        built = Built(described)
        taken = origin.take(built, "", print)
        state, frozen = Programs(built, 1).init(taken.arrays)
    return built, named(eqx.combine(state.weights, frozen.model)), taken.facts


def without(name: str, folder: Path) -> dict:
    """A recipe that leaves model and adapters to a folder."""
    rest = {key: x for key, x in recipe(name).items() if key != "adapter"}
    return rest | {"model": {"path": str(folder)}}


@pytest.mark.long
def test_codes_tables_and_lora_travel_as_they_are_and_go_on(codebook, tmp_path):
    done = windlass.export(codebook, tmp_path / "it", form="own")
    assert done.form == "own"
    about = json.loads((tmp_path / "it" / "config.json").read_text())
    assert about["model_type"] == "windlass-llama"
    assert [one["kind"] for one in about["windlass"]["adapter"]] == ["codebook", "lora"]
    tensors = load_file(tmp_path / "it" / "model.safetensors")
    assert tensors["blocks.1.mlp.up.base.codes"].dtype == np.uint8
    assert tensors["blocks.1.mlp.up.base.codes"].shape == (32, 48)
    assert {"model.embed_tokens.weight", "blocks.0.mlp.up.down.weight"} <= tensors.keys()

    built, arrays, facts = begun(without("codebook", tmp_path / "it"))
    assert built.run.adapter == open_on_cpu(codebook, weights="last", step=None).run.adapter
    whole = stored(codebook)
    assert measure(arrays) == measure(named(eqx.filter(whole, eqx.is_array)))
    size = sum(x.size for x in arrays.values())
    assert facts == [("start", str(tmp_path / "it")), ("loaded", f"all {size:,} parameters")]


@pytest.mark.long
def test_adapters_that_a_recipe_has_not_are_merged_and_those_it_has_first_go_on(codebook, tmp_path):
    windlass.export(codebook, tmp_path / "it", form="own")
    whole = without("codebook", tmp_path / "it")
    built, arrays, facts = begun(whole, "adapter=null")
    source = open_on_cpu(codebook, weights="last", step=None)
    with source.scope():
        plain = eqx.filter_jit(adapters.merged)(source.stored_model()[1])
    expected = named(eqx.filter(plain, eqx.is_array))
    assert built.run.adapter == () and arrays.keys() == expected.keys()
    assert facts[0] == ("start", f"{tmp_path / 'it'}, the adapter merged")
    for path, x in expected.items():
        assert np.abs(np.asarray(arrays[path]) - np.asarray(x)).max() < 1e-6

    more = [*recipe("codebook")["adapter"], {"kind": "lora", "rank": 2}]
    built, arrays, _ = begun(whole | {"adapter": more})
    theirs = measure(named(eqx.filter(stored(codebook), eqx.is_array)))
    query = "blocks.kinds.0.attention.query"
    mine = measure({path: x for path, x in arrays.items() if path.startswith(f"{query}.base.")})
    assert mine == {
        path.replace(query, f"{query}.base"): x
        for path, x in theirs.items()
        if path.startswith(query + ".")
    }
    assert len(built.stages) == 4


@pytest.mark.long
def test_a_list_merges_for_others_and_is_no_peft_folder(codebook, tmp_path):
    pytest.importorskip("torch")
    found = windlass.export(codebook, tmp_path / "it", form="merged", check=True)
    assert found.comparison is not None and found.comparison.good, found.comparison
    refusals = {
        "adapter": f"{codebook} trained codebook and lora, and PEFT has one adapter a folder; "
        "--as merged has it all",
        "model": f"{codebook} trained an adapter; --as adapter exports it alone, --as merged the "
        "model with it, --as own both as they are, for Windlass alone",
    }
    for form, text in refusals.items():
        with pytest.raises(UserError) as refusal:
            windlass.export(codebook, tmp_path / "other", form=form)
        assert str(refusal.value) == text
    with pytest.raises(UserError) as refusal:
        windlass.export(codebook, tmp_path / "other", form="own", check=True)
    assert str(refusal.value) == (
        "--check compares with transformers, which cannot read --as own; "
        "without --check the export is the same"
    )


@pytest.mark.long
def test_a_fixed_array_is_exported_as_it_is_whatever_the_rest_is_cast_to(frozen, tmp_path):
    windlass.export(frozen, tmp_path / "it", dtype="bfloat16")
    tensors = load_file(tmp_path / "it" / "model.safetensors")
    whole = stored(frozen).blocks.kinds[0]
    found = tensors["blocks.1.reservoir.weight"]
    assert found.dtype == np.float32 and (found == np.asarray(whole.reservoir.weight[1])).all()
    assert tensors["blocks.1.reads.weight"].dtype.name == "bfloat16"


def test_a_family_of_its_own_is_read_back_bit_by_bit(frozen, tmp_path):
    windlass.export(frozen, tmp_path / "it")
    _, arrays, _ = begun(without("frozen", tmp_path / "it"), "train.seed=77")
    assert measure(arrays) == measure(named(eqx.filter(stored(frozen), eqx.is_array)))


@pytest.mark.long
def test_what_is_no_config_of_ours_and_integers_of_another_kind_are_refused(codebook, tmp_path):
    windlass.export(codebook, tmp_path / "it")
    config = tmp_path / "it" / "config.json"
    about = json.loads(config.read_text())
    (tmp_path / "it" / seal.EXPORT).unlink()  # as whoever changes an export on purpose does
    config.write_text(json.dumps(about | {"windlass": [1]}))
    with pytest.raises(UserError) as refusal:
        begun(without("codebook", tmp_path / "it"))
    assert str(refusal.value) == f"{config} has windlass [1]; it must be a mapping with model"
    config.write_text(json.dumps(about))
    file = tmp_path / "it" / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"dtype":"U8"', b'"dtype":"I8"', 1))
    with pytest.raises(UserError) as refusal:
        begun(without("codebook", tmp_path / "it"))
    assert str(refusal.value).endswith("is of I8; it is of U8 here")
