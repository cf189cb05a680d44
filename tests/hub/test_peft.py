"""Adapters go to `peft` and come back: the same logits, losses and gradients."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

from tests import published, tiny
from tests.hub import peers
from tests.models import reference
from windlass import adapters
from windlass.adapters.lora import Adapter
from windlass.checkpoint.fingerprint import named
from windlass.errors import UserError
from windlass.hub import peft
from windlass.hub.names import to_tensors
from windlass.models import phi3

# The scale of rslora is held in tests/adapters, the rest is that of plain; the others compile long.
LONG = ("rslora", "deltanet", "shared keys")
cases = pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=pytest.mark.long) if x in LONG else x for x in peers.CASES],
)
live = pytest.mark.skipif(not peers.HAS_PEFT, reason="then the record is what there is")


@functools.cache
def _answers(case: str):
    batch = peers.batch(case)

    @eqx.filter_jit
    def run(model):
        own, rest = eqx.partition(model, adapters.own(model))

        def loss(own):
            return tiny.loss(eqx.combine(own, rest), batch)

        return model.head.logits(model(batch)[0]), jax.value_and_grad(loss)(own)

    return run


def ours(case: str, model: Any) -> tuple[float, reference.Answers]:
    """What this package computes for the three documents in one row."""
    logits, (loss, gradient) = _answers(case)(model)
    return float(loss), reference.Answers(
        np.asarray(logits)[0, :24], peers.tensors(case, eqx.combine(gradient, model))
    )


def logits(case: str, model: Any) -> np.ndarray:
    return ours(case, model)[1].logits


def differences(found, expected) -> tuple[float, float, float]:
    """Of the loss, of the logits, and of the gradients, relative to the largest of each array."""
    gap = np.abs(found[1].logits - expected[1].logits).max()
    return abs(found[0] - expected[0]), gap, tiny.apart(found[1].gradients, expected[1].gradients)


@live
@cases
def test_logits_loss_and_gradients_of_packed_documents_are_those_of_peft_unpacked(case):
    found = differences(ours(case, peers.adapted(case)), peers.computed(case))
    print(f"{case}: loss, logits and gradients differ by", *(f"{gap:.1e}" for gap in found))
    assert max(found) < 1e-5


@cases
def test_logits_loss_and_gradients_are_those_recorded_of_peft(case):
    loss, answers = ours(case, peers.adapted(case))
    found = differences((loss, reference.sketched(answers)), peers.recorded(case))
    assert max(found) < 1e-5


@live
@cases
def test_a_merged_model_gives_transformers_the_same_logits(case):
    import torch

    model = peers.adapted(case)
    merged = to_tensors(eqx.filter_jit(adapters.merged)(model), peers.table(case))
    theirs = reference.module(peers.CASES[case][0])
    theirs.load_state_dict({name: torch.tensor(x) for name, x in merged.items()}, strict=False)
    found = [theirs(torch.from_numpy(text[None, :-1]).long()).logits for text in peers.texts(case)]
    seen = np.concatenate([x[0].detach().numpy() for x in found])
    assert np.abs(seen - logits(case, model)).max() < 1e-5


@live
@cases
def test_an_adapter_that_peft_made_is_read_with_all_it_is(case, tmp_path):
    import peft as theirs
    import torch

    of, adapter = peers.CASES[case]
    words: dict[str, Any] = peft.described(peers.adapted(case), adapter, peers.table(case), None)
    made = theirs.get_peft_model(
        reference.module(of), theirs.LoraConfig(**{**words, "inference_mode": False})
    )
    torch.manual_seed(0)
    for name, weight in made.named_parameters():
        if "lora_" in name:
            weight.data += 0.1 * torch.randn_like(weight)
    made.save_pretrained(tmp_path)
    stored = peft.read(tmp_path)
    alpha = {"plain": 5.0, "rslora": 2.5, "dora": 4.0, "deltanet": 4.0, "shared keys": 1.5}[case]
    assert stored.settings == {
        "rank": adapter.rank,
        "alpha": alpha,
        "scaling": adapter.scaling,
        "dropout": 0.0,
        "targets": words["target_modules"],
        "dora": adapter.dora,
    }
    model = peers.adapted(case)
    found = peft.load(stored, model, adapter, peers.table(case), None)
    own = peft.own(model)
    read = jax.tree.unflatten(jax.tree.structure(own), [found[path] for path in named(own)])
    expected = peers.answers(made, peers.texts(case))
    assert np.abs(logits(case, eqx.combine(read, model)) - expected[1].logits).max() < 1e-5


def test_an_adapter_for_another_model_is_refused_with_both_names_and_every_shape(tmp_path):
    model, table = peers.adapted("dora"), peers.table("dora")
    published.save_adapter(tmp_path, model, peers.CASES["dora"][1], table, "owner/other")
    wider = dataclasses.replace(peers.config("dora"), mlp=50, layers=1)
    adapter = Adapter(rank=2, dora=True, targets=("gate_proj", "q_proj"))
    shapes = eqx.filter_eval_shape(
        lambda key: adapter.adapt(wider.init(key), names=table, key=key), jax.random.key(0)
    )
    with pytest.raises(UserError) as refusal:
        peft.load(peft.read(tmp_path), shapes, adapter, table, "owner/this")
    first, *lines = str(refusal.value).splitlines()
    assert first == (
        f"59 problems in the adapter in {tmp_path}, made for owner/other, beside owner/this:"
    )
    before = "  base_model.model.model.layers"
    gate = f"{before}.0.mlp.gate_proj"
    assert [" ".join(line.split()) for line in lines if line.startswith(gate)] == [
        f"{gate[2:]}.lora_B.weight is [48, 2]; this model's is [50, 2]",
        f"{gate[2:]}.lora_magnitude_vector is [48]; this model's is [50]",
    ]
    others = [line for line in lines if not line.startswith(gate)]
    assert all(line.endswith("  is nothing of this model's") for line in others)
    assert {line.split(".")[4] for line in others} == {"0", "1", "2"}


def test_what_an_adapter_says_and_cannot_be_had_is_refused_by_name(tmp_path):
    published.save_adapter(
        tmp_path, peers.adapted("dora"), peers.CASES["dora"][1], peers.table("dora"), None
    )
    about = json.loads((tmp_path / peft.CONFIG).read_text())
    about |= {"rank_pattern": {"q_proj": "8"}, "bias": "all", "init_lora_weights": "pissa"}
    about |= {
        "trainable_token_indices": ["3"],
        "alpha_pattern": ["q_proj"],
        "layer_replication": [0],
    }
    about |= {"target_parameters": ["experts"], "lora_bias": True}
    (tmp_path / peft.CONFIG).write_text(json.dumps(about))
    assert refused(tmp_path) == (
        f"8 problems in the adapter in {tmp_path}:\n"
        '  init_lora_weights        is "pissa"; it changes the weights of the model too, which are '
        "not here\n"
        "  rank_pattern             is a mapping; it must be a mapping of names to numbers\n"
        '  alpha_pattern            is ["q_proj"]; it must be a mapping of names to numbers\n'
        '  trainable_token_indices  is ["3"]; it must be a list of token ids, or such lists of '
        "embed_tokens and lm_head\n"
        '  bias                     is "all"; an adapter with it cannot be read\n'
        "  layer_replication        is [0]; an adapter with it cannot be read\n"
        '  target_parameters        is ["experts"]; an adapter with it cannot be read\n'
        "  lora_bias                is true; an adapter with it cannot be read"
    )
    (tmp_path / peft.CONFIG).write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": ["x"]}')
    assert refused(tmp_path) == (
        f'1 problem in the adapter in {tmp_path}:\n  lora_alpha  is ["x"]; it must be a number'
    )
    (tmp_path / peft.CONFIG).write_text('{"peft_type": "IA3", "r": null}')
    assert refused(tmp_path) == (
        f'1 problem in the adapter in {tmp_path}:\n  peft_type  is "IA3"; only LORA can be read'
    )
    (tmp_path / peft.CONFIG).write_text("{")
    assert refused(tmp_path) == (
        f"{tmp_path / peft.CONFIG} is not JSON: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)"
    )


def test_an_adapter_of_a_part_of_a_tensor_is_refused():
    adapter, table = Adapter(targets=("qkv_proj",)), phi3.NAMES
    model = adapter.adapt(tiny.model("phi3"), names=table, key=jax.random.key(0))
    with pytest.raises(UserError) as error:
        peft.names(model, adapter, table)
    assert str(error.value) == (
        "blocks.attention.query is a part of qkv_proj elsewhere, of which PEFT adapts the whole; "
        "--as merged writes a model with the adapter in it"
    )


def test_a_folder_that_is_no_adapter_is_refused(tmp_path):
    assert refused(tmp_path) == (
        f"adapter.path is {tmp_path}; a PEFT adapter is a folder with adapter_config.json"
    )
    (tmp_path / peft.CONFIG).write_text("[]")
    assert refused(tmp_path) == f"{tmp_path / peft.CONFIG} holds []; it must be a mapping"
    (tmp_path / peft.CONFIG).write_text("{}")
    without = f"adapter.path is {tmp_path}, which has no adapter_model.safetensors"
    assert refused(tmp_path) == without
    (tmp_path / peft.PICKLE).touch()
    assert refused(tmp_path) == (
        f"{without}; adapter_model.bin is not read, since to read it is to run it"
    )
    (tmp_path / peft.TENSORS).write_bytes(b"no header")
    assert refused(tmp_path).startswith(f"{tmp_path / peft.TENSORS} cannot be read: ")


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as refusal:
        peft.read(folder)
    return str(refusal.value)
