"""Weights are read from the files of a folder a part at a time, and what does not fit is said."""

import dataclasses
import json
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests import published, tiny
from tests.hub import folders
from windlass.devices.axes import placements
from windlass.errors import UserError
from windlass.hub import weights
from windlass.hub.names import to_tensors
from windlass.models.llama import NAMES

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tensors() -> dict[str, np.ndarray]:
    return to_tensors(tiny.model("llama"), NAMES)


def stored(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def loaded(folder: Path) -> dict[str, jax.Array]:
    return weights.load(folder, tiny.abstract(tiny.config("llama")), NAMES)


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as refusal:
        loaded(folder)
    return str(refusal.value)


class Watched:
    """A tensor that tells how much of it was read."""

    def __init__(self, value: np.ndarray):
        self.value, self.read = value, 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def __getitem__(self, index):
        part = self.value[index]
        self.read += part.size
        return part


def test_each_part_is_read_once_however_many_devices_hold_it():
    model = tiny.model("llama")
    watched = {name: Watched(x) for name, x in to_tensors(model, NAMES).items()}
    with tiny.on((2, 2, 2)) as mesh:
        arrays, static = eqx.partition(model, eqx.is_array)
        shapes = jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
            arrays,
            placements(arrays, mesh),
        )
        filled = tiny.filled(eqx.combine(shapes, static), NAMES, watched)
    assert eqx.tree_equal(jax.tree.map(np.asarray, filled), jax.tree.map(np.asarray, model))
    assert {name: one.read for name, one in watched.items()} == {
        name: one.value.size for name, one in watched.items()
    }


def test_a_billion_layers_are_refused_before_any_is_looked_for(tmp_path):
    config = dataclasses.replace(tiny.config("llama"), layers=10**9)
    held = tensors()
    with pytest.raises(UserError) as refusal:
        weights.load(stored(tmp_path, held), tiny.abstract(config), NAMES)
    assert str(refusal.value) == (
        f"the weights in {tmp_path} are {len(held)} tensors, too few for the 1,000,000,000 layers "
        "that config.json says the model has, each with its own"
    )


def test_what_is_missing_too_much_or_of_another_shape_is_refused_all_at_once(tmp_path):
    held = tensors()
    del held["model.norm.weight"]
    held["model.layers.3.mlp.up_proj.weight"] = held["model.layers.2.mlp.up_proj.weight"]
    held["model.layers.0.mlp.gate_proj.weight"] = np.zeros((3, 4), np.float32)
    assert refused(stored(tmp_path, held)) == (
        f"3 problems in the weights in {tmp_path}:\n"
        "  model.layers.0.mlp.gate_proj.weight  is [3, 4]; this model's is [48, 32]\n"
        "  model.norm.weight                    is missing\n"
        "  model.layers.3.mlp.up_proj.weight    is nothing of this model's"
    )


def test_a_head_that_is_the_embedding_may_be_stored_and_no_other(tmp_path):
    held = tensors()
    plain = loaded(stored(tmp_path, held))
    both = loaded(stored(tmp_path, held | {HEAD: held[EMBEDDING].copy()}))
    assert plain.keys() == both.keys()
    assert all(np.array_equal(plain[path], both[path]) for path in plain)
    other = held[EMBEDDING].copy()
    other[-1, -1] += 1
    assert refused(stored(tmp_path, held | {HEAD: other})) == (
        f"1 problem in the weights in {tmp_path}:\n"
        "  lm_head.weight  differs from model.embed_tokens.weight, and tie_word_embeddings says "
        "that they are one; model.tied=false takes both as they are"
    )


def test_what_follows_from_the_config_may_be_stored_beside(tmp_path):
    angles = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(5, np.float32)}
    assert loaded(stored(tmp_path, tensors() | angles))


def test_numbers_of_another_type_are_refused(tmp_path):
    held = tensors()
    held["model.norm.weight"] = held["model.norm.weight"].astype(np.int8)
    assert refused(stored(tmp_path, held)) == (
        f"1 problem in the weights in {tmp_path}:\n"
        "  model.norm.weight  is of I8; weights are of F32, F16, BF16 here"
    )


def test_a_folder_whose_weights_cannot_be_read_is_refused_with_what_would_do(tmp_path):
    would = (
        "they are read from model.safetensors, or from several such files with "
        "model.safetensors.index.json. Pickled files are not read, since that can run any program. "
        "In a place that may run it, "
        "AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER) of transformers writes "
        "the folder that model.path can name"
    )
    assert refused(tmp_path) == f"{tmp_path} has no weights; {would}"
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert refused(tmp_path) == f"{tmp_path} has its weights in pytorch_model.bin; {would}"

    index = tmp_path / "model.safetensors.index.json"
    not_one = f"{index} is not the index of safetensors files: its weight_map is"
    must = "and must be a mapping of the name of each tensor to its file"
    for content, shown in (("{}", "null"), ('{"weight_map": ["a"]}', '["a"]')):
        index.write_text(content)
        assert refused(tmp_path) == f"{not_one} {shown}, {must}"
    index.write_text('{"weight_map": {"a": 1}}')
    assert refused(tmp_path) == f"{not_one} a mapping, {must}"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "../two"}}))
    assert refused(tmp_path) == (f"{index} names files that are not there: one.safetensors, two")
    index.unlink()
    whole = stored(tmp_path, tensors()) / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-5])
    assert refused(tmp_path).startswith(f"{whole} is not a whole safetensors file: ")


def test_a_tensor_in_two_files_is_refused(tmp_path):
    every = tensors()
    save_file(every, tmp_path / "one.safetensors")
    save_file({EMBEDDING: every[EMBEDDING] + 1}, tmp_path / "two.safetensors")
    places = dict.fromkeys(every, "one.safetensors") | {"other": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert refused(tmp_path) == (
        f"{tmp_path / 'two.safetensors'} has the tensor {EMBEDDING}, which another file of "
        f"{tmp_path} has too; which one is meant is not known, so none is read"
    )


def test_without_a_table_of_names_a_model_is_written_under_its_own_paths(tmp_path):
    model = tiny.model("gru")
    published.save_weights(tmp_path, model, {})
    found, expected = folders.contents(tmp_path), to_tensors(model, {})
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
