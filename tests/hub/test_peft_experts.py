"""LoRA on experts and their router: what `peft` computes from the folder that is exported."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import published, tiny
from tests.hub import peers
from tests.models import reference
from windlass import adapters
from windlass.adapters.lora import Adapter, LoraGroup
from windlass.checkpoint.fingerprint import named
from windlass.config import read
from windlass.errors import UserError
from windlass.hub import peft
from windlass.models import mixtral, qwen3_5_moe, qwen3_moe

TABLES = {
    "mixtral": mixtral.NAMES,
    "qwen3_moe": qwen3_moe.NAMES,
    "qwen3_5_moe": qwen3_5_moe.NAMES,
}
LORA = Adapter(rank=3, alpha=5.0)
families = pytest.mark.parametrize(
    "name", ["mixtral", "qwen3_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.long)]
)


def adapted(family: str):
    """The model of the reference with an adapter, none of whose arrays is zero."""
    config, rough = reference.config(family), tiny.made(reference.config(family), LORA)
    plain = tiny.filled(tiny.abstract(config), TABLES[family], reference.tensors(config))
    model = LORA.adapt(plain, names=TABLES[family], key=jax.random.key(0))
    return eqx.combine(peft.own(rough), model)


def logits(model, config) -> np.ndarray:
    batch = tiny.packed([[text] for text in reference.texts(config.vocab)], 13)
    found = eqx.filter_jit(lambda model: model.head.logits(model(batch)[0]))(model)
    texts = reference.texts(config.vocab)
    return np.concatenate(
        [np.asarray(row)[: len(text) - 1] for row, text in zip(found, texts, strict=True)]
    )


# PEFT looks for the patterns that it makes for fused parameters among modules alone.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.skipif(not peers.HAS_PEFT, reason="peft is what is compared with")
@families
def test_peft_computes_the_same_with_an_adapter_of_experts_and_router(name, tmp_path):
    import peft as theirs
    import torch

    model, config = adapted(name), reference.config(name)
    published.save_adapter(tmp_path, model, LORA, TABLES[name], "owner/base")
    made = theirs.PeftModel.from_pretrained(reference.module(name), str(tmp_path))
    with torch.no_grad():
        texts = [torch.from_numpy(text).long() for text in reference.texts(config.vocab)]
        expected = np.concatenate([made(text[None, :-1]).logits[0].numpy() for text in texts])
    found = logits(model, config)
    gap = np.abs(found - expected).max()
    print(f"{name} with LoRA: logits differ by {gap:.1e}")
    assert gap < 1e-5
    assert np.abs(found - reference.recorded(name).logits).max() > 1e-2


@families
def test_an_adapter_of_experts_comes_back_from_its_folder(name, tmp_path):
    model = adapted(name)
    published.save_adapter(tmp_path, model, LORA, TABLES[name], "owner/base")
    found = peft.load(peft.read(tmp_path), model, LORA, TABLES[name], None)
    own = peft.own(model)
    read = jax.tree.unflatten(jax.tree.structure(own), [found[path] for path in named(own)])
    assert eqx.tree_equal(read, own)


def test_a_shared_expert_and_routed_ones_are_chosen_apart_and_read_as_they_were_written(tmp_path):
    names, config = TABLES["qwen3_5_moe"], reference.config("qwen3_5_moe")
    plain = tiny.abstract(config)
    for number, targets in enumerate((["shared_expert.*"], ["blocks.mlp.experts.*", "gate"])):
        lora = Adapter(rank=3, targets=tuple(targets))
        model = eqx.filter_eval_shape(lora.adapt, plain, names=names, key=jax.random.key(0))
        shapes, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        model = eqx.combine(zeros, static)
        published.save_adapter(tmp_path / str(number), model, lora, names, None)
        found = read(Adapter, peft.read(tmp_path / str(number)).settings)
        assert adapters.chosen(plain, found.targets, names) == adapters.chosen(
            plain, targets, names
        )
        assert not found.groups


def test_adapted_maps_are_counted_by_layer_and_expert():
    counts = adapters.adapted_maps(adapted("mixtral"))
    assert counts["blocks.mlp.router"] == counts["blocks.attention.query"] == 3
    assert counts["blocks.mlp.experts.gate"] == 3 * 8
    assert sum(counts.values()) == 3 * (4 + 1 + 3 * 8)


def test_a_merged_adapter_of_experts_computes_the_same():
    model, config = adapted("mixtral"), reference.config("mixtral")
    merged = eqx.filter_jit(adapters.merged)(model)
    assert np.abs(logits(merged, config) - logits(model, config)).max() < 1e-5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dropout", 0.1),
        ("dora", True),
        ("layers", (1,)),
        ("exclude", ("layers.0.block_sparse_moe.experts.*",)),
        ("groups", (LoraGroup(match="w2", rank=2),)),
    ],
)
def test_what_peft_has_for_no_experts_is_refused(field, value):
    adapter = dataclasses.replace(LORA, targets=("q_proj", "gate", "w2"), **{field: value})
    with pytest.raises(UserError) as refusal:
        adapter.adapt(tiny.model("mixtral"), names=TABLES["mixtral"], key=jax.random.key(0))
    assert str(refusal.value) == (
        f"adapter.{field} cannot be had on experts, which PEFT adapts by target_parameters; "
        "adapter.targets: [blocks.attention.query, blocks.mlp.router] leaves experts out"
        f"{', and adapter.dropout=0 adapts them' if field == 'dropout' else ''}"
    )


def test_experts_may_be_left_out_by_name():
    adapter = dataclasses.replace(LORA, dropout=0.1, exclude=("blocks.mlp.experts.*",))
    model = adapter.adapt(tiny.model("mixtral"), names=TABLES["mixtral"], key=jax.random.key(0))
    assert not {*adapters.adapted_maps(model)} & adapters.in_experts(model)
    assert "blocks.mlp.router" in adapters.adapted_maps(model)
