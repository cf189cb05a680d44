"""A quantized model takes the bits that it was made for, and computes the same when read back."""

import importlib
import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import tests.strangers  # noqa: F401
import windlass
from tests.release import stored
from tests.release.test_own import begun, without
from windlass import seal
from windlass.checkpoint.fingerprint import named
from windlass.data import vocabulary as vocabularies
from windlass.errors import UserError
from windlass.evaluation.finished_run import open_on_cpu
from windlass.evaluation.published_model import open_model
from windlass.release import check

codebook = importlib.import_module("windlass.adapters.codebook")
SIZES = dict(vocab=257, embed=32, mlp=48, layers=2, heads=4, kv_heads=2, head_dim=8, theta=1e4)
ADAPTERS = [{"kind": "codebook", "trained": True}, {"kind": "lora", "rank": 4}]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    model = {"family": "llama", **SIZES}
    place = tmp_path_factory.mktemp("codes")
    return stored.run(place, vocabularies.byte(), model=model, adapter=ADAPTERS)


def rounded(model):
    """The tables as float16 has them; nothing else is changed."""

    def visit(node):
        if not isinstance(node, codebook.Codebook):
            return node
        table = node.table.astype(jnp.float16).astype(jnp.float32)
        return eqx.tree_at(lambda one: one.table, node, table)

    return jax.tree.map(visit, model, is_leaf=lambda node: isinstance(node, codebook.Codebook))


def test_packed_codes_and_tables_in_float16_compute_the_same_when_read_back(run, tmp_path):
    windlass.export(run, tmp_path / "it", form="low-bit")
    tensors = load_file(tmp_path / "it" / "model.safetensors")
    up = tensors["blocks.1.mlp.up.base.codes.4bit"]
    assert up.dtype == np.uint8 and up.shape == (32 * 48 // 2,)
    assert tensors["blocks.1.mlp.up.base.table"].dtype == np.float16
    assert tensors["blocks.1.mlp.up.down.weight"].dtype == np.float32  # LoRA's, on top
    about = json.loads((tmp_path / "it" / "config.json").read_text())
    assert [one["kind"] for one in about["windlass"]["adapter"]] == ["codebook", "lora"]

    source = open_on_cpu(run, weights="last", step=None)
    tokens = check.random_tokens(257)
    with source.scope():
        whole = rounded(source.stored_model()[1])
        expected = check.logits(whole, tokens)
    back = open_model(tmp_path / "it", ["device.kind=cpu", "device.count=1"])
    with back.scope():
        loaded, found = back.stored_model()
        arrays = named(eqx.filter(found, eqx.is_array))
        for path, x in named(eqx.filter(whole, eqx.is_array)).items():
            assert np.array_equal(np.asarray(arrays[path]), np.asarray(x)), path
        assert np.abs(check.logits(found, tokens) - expected).max() == 0


def test_bits_per_weight_count_codes_and_tables(run, tmp_path):
    done = windlass.export(run, tmp_path / "it", form="low-bit", dry_run=True)
    weights = tables = 0
    for reads, writes in [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]:
        weights += reads * writes
        tables += writes // 4 * 16
    assert done.bits_per_weight == pytest.approx((4 * weights + 16 * tables) / weights)


def test_codes_of_another_width_are_refused(run, tmp_path, monkeypatch):
    windlass.export(run, tmp_path / "it", form="low-bit")
    (tmp_path / "it" / seal.EXPORT).unlink()  # as whoever changes an export on purpose does
    monkeypatch.setattr(codebook.Codebook, "code_bits", {"codes": 3})
    with pytest.raises(UserError) as error:
        begun(without("codebook", tmp_path / "it"))
    assert str(error.value).endswith("  has codes of 4 bits; this model's have 3")
    assert "blocks.0.attention.key.base.codes " in str(error.value)


def test_adapters_without_codes_are_refused(tmp_path):
    model = {"family": "llama", **SIZES}
    run = stored.run(tmp_path, vocabularies.byte(), model=model, adapter={"kind": "lora"})
    with pytest.raises(UserError) as error:
        windlass.export(run, tmp_path / "it", form="low-bit")
    assert str(error.value) == (
        f"{run} trained lora, without codes of a few bits to pack; --as own writes all arrays as "
        "they are"
    )


def test_float16_is_what_is_merged_and_rounded_and_too_large_a_number_is_refused(run, tmp_path):
    windlass.export(run, tmp_path / "it", form="merged", dtype="float16")
    tensors = load_file(tmp_path / "it" / "model.safetensors")
    assert {x.dtype.name for x in tensors.values()} == {"float16"}
    windlass.export(run, tmp_path / "whole", form="merged", dtype="float32")
    for name, x in load_file(tmp_path / "whole" / "model.safetensors").items():
        assert np.array_equal(tensors[name], x.astype(np.float16))

    def large(model):
        value = jax.device_put(
            np.full_like(model.embedding.weight, 1e5), model.embedding.weight.sharding
        )
        return eqx.tree_at(lambda one: one.embedding.weight, model, value)

    model = {"family": "llama", **SIZES}
    other = stored.run(tmp_path, vocabularies.byte(), large, model=model)
    with pytest.raises(UserError) as error:
        windlass.export(other, tmp_path / "other", dtype="float16")
    assert str(error.value) == (
        "model.embed_tokens.weight holds 1e+05, and the largest number of float16 is 65504; "
        "--dtype bfloat16 and --dtype float32 have larger ones"
    )
    assert not (tmp_path / "other").exists()
