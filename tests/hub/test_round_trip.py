"""A model of transformers that a recipe takes is the same model, and so is what is written."""

import json
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests import published, tiny
from tests.hub import folders
from tests.models import reference
from tests.models.test_parity import apart
from windlass.hub import config as configs
from windlass.program.built import Built
from windlass.starting import origin
from windlass.starting.describe import describe

MESHES = {"alone": (1, 1, 1), "2x2x2": (2, 2, 2)}
cases = pytest.mark.parametrize("case", folders.CASES)


def built(folder: Path, sizes: tuple[int, int, int]) -> Built:
    """The model that a recipe with this folder describes, on a mesh."""
    data, fsdp, tensor = sizes
    recipe = {
        "model": {"path": str(folder)},
        "tokenizer": "byte",
        "data": {"source": {"kind": "stories", "count": 10}, "length": 14},
        "optim": {"kind": "adamw", "learning_rate": 1e-3},
        "train": {"steps": 1, "batch": 4},
        "device": {"kind": "cpu", "count": data * fsdp * tensor},
        "mesh": {"data": data, "fsdp": fsdp, "tensor": tensor},
    }
    return Built(describe(recipe))


def taken(built: Built):
    """The model with the weights that it starts from."""
    arrays = origin.take(built, "", print).arrays[0]
    leaves = jax.tree.structure(built.abstract).unflatten(list(arrays.values()))
    return eqx.combine(leaves, built.static)


def logits(model, config) -> np.ndarray:
    """Those of all documents, one after the other, in four rows."""
    a, b, c, d, e = reference.texts(config.vocab)
    batch = tiny.packed([[a, b, d], [c], [e], []], length=14)
    found = eqx.filter_jit(lambda model: model.head.logits(model(batch)[0]))(model)
    return apart(found, config)


def answers(folder: Path, config) -> np.ndarray:
    """What transformers computes with a folder, for each document by itself."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        texts = [torch.from_numpy(text).long() for text in reference.texts(config.vocab)]
        return np.concatenate([model(text[None, :-1]).logits[0].numpy() for text in texts])


def export(model, built: Built, folder: Path, **how) -> Path:
    folder.mkdir()
    published.save_weights(folder, model, built.names, **how)
    came = configs.load(Path(built.run.start.path))  # pyright: ignore
    dtype = how.get("dtype", "float32")
    config = configs.written(built.run.model, length=14, dtype=dtype, like=came)
    (folder / configs.FILE).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("qwen3", MESHES["2x2x2"]),
        ("gemma", MESHES["alone"]),
        *(
            pytest.param(case, MESHES["2x2x2"], marks=pytest.mark.long)
            for case in folders.CASES
            if case != "qwen3"
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "x".join(map(str, x)),
)
def test_logits_are_those_of_transformers_on_the_way_in_and_out(case, sizes, tmp_path):
    folder = folders.write(case, tmp_path / "came")
    assert len(list(folder.glob("*.safetensors"))) > 2
    config, expected = reference.config(case), reference.recorded(case).logits
    here = built(folder, sizes)
    with here.described.scope():
        model = taken(here)
        gap = np.abs(logits(model, config) - expected).max()
        print(f"{case} on {sizes}: logits differ by {gap:.1e}")
        assert gap < 1e-5
        out = export(model, here, tmp_path / "out", shard_bytes=30_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    before, after = folders.contents(folder), folders.contents(out)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    again = configs.read(configs.load(out), "out")
    assert again == configs.read(configs.load(folder), "came")
    if reference.HAS_TORCH:
        assert np.abs(answers(out, config) - expected).max() < 1e-5


@cases
def test_files_of_bfloat16_are_read_into_the_type_of_the_model_and_written_back_bit_for_bit(
    case, tmp_path
):
    folder = folders.write(case, tmp_path / "came", "bfloat16", shard_bytes=10**9)
    here = built(folder, (2, 2, 2))
    with here.described.scope():
        model = taken(here)
        assert {x.dtype.name for x in jax.tree.leaves(eqx.filter(model, eqx.is_array))} == {
            "float32"
        }
        out = export(model, here, tmp_path / "out", dtype="bfloat16")
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]
    before, after = folders.contents(folder), folders.contents(out)
    assert {x.dtype.name for x in after.values()} == {"bfloat16"}
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    if reference.HAS_TORCH and case == "qwen2":
        config = reference.config(case)
        assert np.array_equal(answers(out, config), answers(folder, config))


@pytest.mark.parametrize(
    "case", ["mixtral", "qwen3_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.long)]
)
def test_experts_in_one_tensor_are_read_as_those_in_one_each(case, tmp_path):
    folder = folders.write(case, tmp_path / "came", shard_bytes=10**9)
    weights = reference.fused(reference.tensors(reference.config(case)))
    assert any(name.endswith("experts.gate_up_proj") for name in weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    here = built(folder, (2, 2, 2))
    with here.described.scope():
        gap = np.abs(logits(taken(here), reference.config(case)) - reference.recorded(case).logits)
    assert gap.max() < 1e-5
