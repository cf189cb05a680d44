"""GGUF files hold what the run computes, as gguf's reader and transformers read them."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
import pytest
from rich.console import Console
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Library

import tests.strangers  # noqa: F401
import windlass
from tests import tiny
from tests.release import stored
from tests.release.test_export import ours
from windlass import adapters
from windlass.config import tree
from windlass.data import vocabulary as vocabularies
from windlass.errors import UserError
from windlass.evaluation.finished_run import open_on_cpu
from windlass.hub.chat_template import CHATML
from windlass.hub.config import families
from windlass.hub.names import to_tensors
from windlass.layers.rotary import Scaling
from windlass.release import check, gguf_model, gguf_types
from windlass.release.export import Export, Options

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

# But for what llama.cpp does not have: no field has its default.
SIZES = dict(vocab=300, embed=64, mlp=96, heads=4, kv_heads=2, head_dim=10)
YARN = Scaling(kind="yarn", factor=4.0, original_length=7, attention_factor=1.2)
CHANGED: dict[str, dict] = {
    "gemma": SIZES | dict(query_width=None),
    "llama": SIZES,
    "mistral": SIZES | dict(scaling=YARN, window=40),
    "phi3": SIZES | dict(head_dim=16, rotary_share=0.5, window=40),
    "qwen2": SIZES | dict(scaling=YARN, head_dim=16),
    "qwen3": SIZES | dict(scaling=YARN, attention_bias=False),
}
ARCHITECTURES = dict(gemma="gemma3", llama="llama", mistral="llama") | {
    name: name for name in ("phi3", "qwen2", "qwen3")
}
TEXT = "Once upon a time, there was a girl; she had 1234 cats."


def section(family: str, **changes: Any) -> dict:
    config = dataclasses.replace(tiny.config(family), **CHANGED[family] | changes)
    return {"family": family, **tree(config)}


@pytest.fixture(scope="module")
def learned() -> vocabularies.Vocabulary:
    return vocabularies.learn([TEXT] * 3, 280)


@pytest.fixture(scope="module", params=sorted(CHANGED))
def of_family(request, tmp_path_factory, learned) -> tuple[str, Path]:
    """A family, and a run of it."""
    place = tmp_path_factory.mktemp(request.param)
    return request.param, stored.run(place, learned, model=section(request.param))


def opened(folder: Path) -> Any:
    (file,) = folder.glob("*.gguf")
    return gguf.GGUFReader(file)


def theirs(folder: Path, about: dict, tokens: np.ndarray) -> np.ndarray:
    """Logits of transformers; what it does not read from a GGUF file is of config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (file,) = folder.glob("*.gguf")
    config = AutoConfig.from_pretrained(folder, gguf_file=file.name)
    unread = ["head_dim", "attention_bias", "mlp_bias", "query_pre_attn_scalar", "rope_parameters"]
    unread.append("pad_token_id")
    for key in [*unread, *(["layer_types"] if about["model_type"] == "gemma3_text" else [])]:
        if key in about:
            setattr(config, key, about[key])
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file.name, config=config, dtype=torch.float32
    )
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def test_transformers_computes_from_the_file_what_the_run_computes(of_family, tmp_path):
    name, run = of_family
    windlass.export(run, tmp_path / "plain")
    about = json.loads((tmp_path / "plain" / "config.json").read_text())
    tokens = check.random_tokens(300)[:, :40]
    expected = ours(run, tokens)
    done = windlass.export(run, tmp_path / "it", form="gguf", check=True)
    assert done.comparison is not None and done.comparison.good, done.comparison
    assert np.abs(theirs(tmp_path / "it", about, tokens) - expected).max() < 1e-4
    assert np.abs(expected).max() > 0.1
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "it").iterdir()}
    del sizes["windlass.json"]
    assert sizes == done.files
    reader = opened(tmp_path / "it")
    assert reader.get_field("general.architecture").contents() == ARCHITECTURES[name]
    kinds = {tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds == {"F32"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory, learned) -> Path:
    """A Llama with an untied head, whose chats end as no text does."""
    vocabulary = vocabularies.Vocabulary(
        special(learned.text, "<|im_start|>", "<|im_end|>"),
        eos=0,
        bos=0,
        template=CHATML,
        settings={"pad_token": "<|im_end|>"},
    )
    model = section("llama", tied=False, layers=2)
    return stored.run(tmp_path_factory.mktemp("untied"), vocabulary, model=model)


def special(text: str, *tokens: str) -> str:
    library = Library.from_str(text)
    library.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in tokens])
    return library.to_str()


def fields(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def test_a_file_describes_the_model_and_has_the_tokenizer_and_its_chats(llama, tmp_path):
    done = windlass.export(llama, tmp_path / "it", form="gguf", quantize="f16")
    reader = opened(tmp_path / "it")
    found = fields(reader)
    expected = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "it",
        "general.file_type": gguf.LlamaFileType.MOSTLY_F16,
        "llama.context_length": 28,  # the scaled one
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 10,
        "llama.attention.value_length": 10,
        "llama.attention.layer_norm_rms_epsilon": pytest.approx(1e-3),
        "llama.rope.dimension_count": 10,
        "llama.rope.freq_base": 500.0,
        "llama.vocab_size": 300,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 281,
        "tokenizer.ggml.padding_token_id": 281,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": CHATML,
    }
    assert {key: found[key] for key in expected} == expected
    own = vocabularies.load(str(llama / "tokenizer"))
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == 300
    assert tokens[:282] == [own.name(number) for number in range(282)]
    assert tokens[282:] == [f"[PAD{number}]" for number in range(282, 300)]
    kinds = gguf.TokenType
    assert types[:2] == [kinds.CONTROL, kinds.NORMAL]
    assert types[279:283] == [kinds.NORMAL, kinds.CONTROL, kinds.CONTROL, kinds.UNUSED]
    assert rebuilt(found).encode(TEXT).ids == own.encode(TEXT).tolist()

    of_type = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert of_type["token_embd.weight"] == of_type["output.weight"] == "F16"
    assert of_type["blk.1.attn_q.weight"] == "F16"
    norms = ("blk.1.attn_norm.weight", "blk.1.attn_q.bias", "output_norm.weight")
    assert {of_type[name] for name in (*norms, "rope_freqs.weight")} == {"F32"}
    assert done.bits_per_weight is None
    assert (tmp_path / "it" / "Modelfile").read_text() == (
        'FROM ./it.gguf\nPARAMETER stop "<|endoftext|>"\nPARAMETER stop "<|im_end|>"\n'
    )
    card = (tmp_path / "it" / "README.md").read_text()
    assert "llama-cli -m 'it.gguf' -p" in card and "library_name: gguf" in card


def rebuilt(found: dict[str, Any]) -> Library:
    """The tokenizer that merges and tokens of a file make, as llama.cpp's gpt-2 cuts words."""
    vocab = {text: number for number, text in enumerate(found["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in found["tokenizer.ggml.merges"]]
    library = Library(models.BPE(vocab=vocab, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return library


@pytest.mark.parametrize(
    ("quantize", "maps", "ends", "bits"),
    [
        pytest.param("q8_0", "Q8_0", "Q8_0", 8.5, marks=pytest.mark.long),
        ("q4_0", "Q4_0", "Q8_0", 4.5),
        pytest.param("mxfp4", "MXFP4", "Q8_0", 4.25, marks=pytest.mark.long),
    ],
)
def test_a_type_is_that_of_the_maps_and_the_check_compares_its_numbers(
    llama, tmp_path, quantize, maps, ends, bits
):
    done = windlass.export(llama, tmp_path / "it", form="gguf", quantize=quantize, check=True)
    assert done.comparison is not None and done.comparison.good, done.comparison
    reader = opened(tmp_path / "it")
    of_type = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert of_type["blk.0.attn_q.weight"] == of_type["blk.1.ffn_down.weight"] == maps
    assert of_type["token_embd.weight"] == of_type["output.weight"] == ends
    # A row of 40 is no whole number of blocks.
    assert of_type["blk.0.attn_output.weight"] == "F16"
    assert bits < done.bits_per_weight < bits + 2


def test_a_scale_that_llama_cpp_would_not_choose_is_kept():
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, size=(600, 64)).astype(np.float32)
    codes[:300] = codes[:300].clip(-3, 5)  # whose largest is far from the end of the grid
    codes[7] = 0
    scales = rng.normal(size=(600, 2, 1), scale=0.02).astype(np.float16).astype(np.float32)
    x = (codes.reshape(600, 2, 32) * scales).reshape(600, 64)
    plain = gguf_types.quantized(x, "Q4_0", "it")
    assert not np.array_equal(gguf_types.dequantized(plain, "Q4_0"), x)
    kept = gguf_types.quantized(x, "Q4_0", "it", on_grid=True)
    assert kept.shape == plain.shape and np.array_equal(gguf_types.dequantized(kept, "Q4_0"), x)


def test_grids_of_mxfp4_and_tq2_0_are_kept_by_quantizing_again():
    rng = np.random.default_rng(0)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    for exponent in range(-20, 5):
        for most in range(1, 9):
            x = levels[rng.integers(0, most, size=(4, 64))] * rng.choice([-1, 1], size=(4, 64))
            x = (x * 2.0**exponent).astype(np.float32)
            data = gguf_types.quantized(x, "MXFP4", "it")
            assert np.array_equal(gguf_types.dequantized(data, "MXFP4"), x)
    scales = rng.normal(size=(8, 1)).astype(np.float16).astype(np.float32)
    x = rng.integers(-1, 2, size=(8, 256)).astype(np.float32) * scales
    data = gguf_types.quantized(x, "TQ2_0", "it")
    assert np.array_equal(gguf_types.dequantized(data, "TQ2_0"), x)


def permuted(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key as llama.cpp's conversion of llama has them."""
    halves = x.reshape(heads, 2, len(x) // heads // 2, *x.shape[1:])
    return halves.swapaxes(1, 2).reshape(x.shape)


def numbers(reader: Any) -> dict[str, np.ndarray]:
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        for tensor in reader.tensors
    }


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, learned) -> Path:
    adapter = {"kind": "lora", "rank": 3, "alpha": 5.0, "targets": ["q_proj", "blocks.mlp.*"]}
    model = section("llama", layers=2)
    return stored.run(tmp_path_factory.mktemp("lora"), learned, model=model, adapter=adapter)


def test_lora_is_a_file_of_its_own_or_merged_and_both_are_the_same(adapted, tmp_path):
    windlass.export(adapted, tmp_path / "whole", form="gguf")
    done = windlass.export(adapted, tmp_path / "it", form="gguf-adapter")
    assert done.files.keys() == {"it.gguf", "README.md"}
    reader = opened(tmp_path / "it")
    found, whole = numbers(reader), numbers(opened(tmp_path / "whole"))
    about = fields(reader)
    assert about["general.type"] == "adapter" and about["adapter.type"] == "lora"
    assert about["general.architecture"] == "llama" and about["adapter.lora.alpha"] == 5.0
    source = open_on_cpu(adapted, weights="last", step=None)
    with source.scope():
        base = to_tensors(adapters.plain(source.stored_model()[1]), source.names)
    names = {
        "blk.1.attn_q.weight": permuted(base["model.layers.1.self_attn.q_proj.weight"], 4),
        "blk.0.ffn_down.weight": base["model.layers.0.mlp.down_proj.weight"],
    }
    for name, plain in names.items():
        a, b = found[f"{name}.lora_a"], found[f"{name}.lora_b"]
        assert a.shape[0] == b.shape[1] == 3
        assert np.abs(plain + 5 / 3 * b @ a - whole[name]).max() < 1e-6
        assert np.abs(plain - whole[name]).max() > 0.01
    assert len(found) == 2 * 4 * 2


GRIDS: dict[str, tuple[dict, float]] = {
    "Q4_0": ({"format": "q4_0"}, 4.5),
    "Q4_0 learned": ({"format": "q4_0", "scale": "learned"}, 4.5),
    "MXFP4": ({"format": "mxfp4"}, 4.25),
    "TQ2_0": ({"format": "tq2_0"}, 2.0625),
}


@pytest.mark.long
@pytest.mark.parametrize("grid", GRIDS)
def test_what_was_trained_on_a_grid_is_in_the_file_bit_by_bit(grid, learned, tmp_path):
    adapter, bits = GRIDS[grid]
    wide = {"embed": 256, "mlp": 256, "head_dim": 64} if grid == "TQ2_0" else {"head_dim": 8}
    model = section("llama", layers=2, **wide)
    run = stored.run(tmp_path / "run", learned, model=model, adapter={"kind": "grid", **adapter})
    done = windlass.export(run, tmp_path / "it", form="gguf", check=True)
    assert done.comparison is not None and done.comparison.good, done.comparison
    assert done.bits_per_weight == bits
    reader = opened(tmp_path / "it")
    of_type = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert {of_type[name] for name in of_type if is_map(name)} == {grid.split()[0]}
    assert of_type["token_embd.weight"] == "F32"
    source = open_on_cpu(run, weights="last", step=None)
    with source.scope():
        up = eqx.filter_vmap(lambda one: one.merged().weight)(
            source.stored_model()[1].blocks.kinds[0].mlp.up
        )
    assert np.array_equal(numbers(reader)["blk.1.ffn_up.weight"], np.asarray(up)[1].T)


def is_map(name: str) -> bool:
    return name.startswith("blk.") and name.endswith(".weight") and "norm" not in name


def test_what_is_merged_on_top_of_a_grid_leaves_it(tmp_path, learned):
    both = [
        {"kind": "grid", "format": "q4_0"},
        {"kind": "lora", "rank": 2, "targets": ["blocks.mlp.*"]},
    ]
    model = section("llama", layers=1, head_dim=8)
    run = stored.run(tmp_path, learned, model=model, adapter=both)
    source = open_on_cpu(run, weights="last", step=None)
    names = (f"{one}_proj" for one in "qkvo")
    assert gguf_model.on_grids(source) == {
        f"model.layers.0.self_attn.{name}.weight": "Q4_0" for name in names
    }


@pytest.mark.long
def test_a_file_that_was_spoilt_is_found(learned, tmp_path):
    model = section("llama", layers=1, head_dim=8)
    grid = {"kind": "grid", "format": "q4_0"}
    run = stored.run(tmp_path / "run", learned, model=model, adapter=grid)
    made = Export(run, tmp_path / "it", Options(form="gguf"), Console())
    made()
    file = tmp_path / "it" / "it.gguf"
    data = bytearray(file.read_bytes())
    place = next(x for x in opened(tmp_path / "it").tensors if x.name == "blk.0.ffn_up.weight")
    data[place.data_offset + 5] ^= 0x11
    file.write_bytes(data)
    with made.source.scope():
        found = made.compared(made.source.stored_model()[1])
    assert str(found).endswith("; blk.0.ffn_up.weight is not bit by bit what was trained")
    assert not found.good


@pytest.mark.parametrize(
    ("family_name", "changes", "refusal"),
    [
        (
            "qwen2",
            dict(scaling=Scaling(kind="llama3", factor=4.0, original_length=7)),
            "scaling.kind is llama3; llama.cpp has that in llama, not in qwen2",
        ),
        (
            "mistral",
            dict(scaling=dataclasses.replace(YARN, fast=16.0)),
            "scaling has slow 1 and fast 16; llama.cpp has YaRN from 1 to 32 turns, at whole pairs "
            "(truncate)",
        ),
        (
            "gemma",
            dict(query_width=14),
            "query_width is 14; attention scores are divided by the square root of 10 in llama.cpp",
        ),
        (
            "phi3",
            dict(head_dim=12),
            "head_dim is 12; llama.cpp has phi3 with heads of embed / heads, 16",
        ),
        ("gemma", dict(query_width=16, layers=62), None),  # as in the one of 27B
    ],
)
def test_settings_that_llama_cpp_has_no_key_for_are_named(family_name, changes, refusal):
    config = dataclasses.replace(tiny.config(family_name), **CHANGED[family_name] | changes)
    found = gguf_model.problems(config, families()[family_name])
    assert [f"{key} {what}" for key, what in found] == [f"model.{refusal}"] * bool(refusal)


def test_such_settings_are_refused(tmp_path, learned):
    run = stored.run(tmp_path, learned, model=section("qwen3", attention_bias=True))
    with pytest.raises(UserError) as error:
        windlass.export(run, tmp_path / "it", form="gguf")
    assert str(error.value) == (
        f"1 problem in {run}, as a GGUF file:\n"
        "  model.attention_bias  is true; qwen3 has no biases in llama.cpp"
    )


def test_what_no_gguf_file_can_be_made_of_is_refused(llama, adapted, tmp_path, monkeypatch):
    def refused(run: Path, **options) -> str:
        with pytest.raises(UserError) as error:
            windlass.export(run, tmp_path / "it", **options)
        return str(error.value)

    assert refused(llama, form="gguf-adapter") == (
        f"{llama} trained no adapter; --as model and --as gguf are what there is"
    )
    assert refused(llama, quantize="q8_0") == (
        "1 problem in the call:\n  quantize  is of a GGUF file; --as gguf writes one"
    )
    assert refused(llama, form="gguf", quantize="q8_0", dtype="float16") == (
        "1 problem in the call:\n  quantize  is q8_0, and dtype says float16; leave one out"
    )
    assert refused(adapted, form="gguf-adapter", check=True) == (
        "--check compares with transformers, which cannot read --as gguf-adapter; without --check "
        "the export is the same"
    )
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert refused(llama, form="gguf") == (
        "GGUF files are written with the package gguf, which is not installed; "
        "`pip install 'windlass-lm[gguf]'` installs it"
    )


def test_a_family_that_llama_cpp_has_not_is_refused(tmp_path, learned):
    model = {"family": "gru", **tree(tiny.config("gru"))} | {"vocab": 300}
    run = stored.run(tmp_path, learned, model=model)
    with pytest.raises(UserError) as error:
        windlass.export(run, tmp_path / "it", form="gguf")
    assert str(error.value) == (
        "no GGUF file can be made of gru; there are those of gemma, llama, mistral, phi3, "
        "qwen2 and qwen3. Without --as, the files are ones that Windlass reads"
    )


def test_numbers_that_are_not_on_the_grid_that_an_adapter_declares_are_refused():
    x = np.linspace(-1, 1, 256, dtype=np.float32).reshape(2, 128)
    for kind in ("Q4_0", "MXFP4"):
        with pytest.raises(UserError) as error:
            gguf_types.quantized(x, kind, "it", on_grid=True)
        assert str(error.value).startswith(f"it was to be on the grid of {kind}, as its adapter")
        assert str(error.value).endswith("numbers are not; --as merged writes them as they are")


def test_a_number_that_f16_has_none_for_is_refused():
    with pytest.raises(UserError) as error:
        gguf_types.quantized(np.full((2, 32), 1e5, np.float32), "F16", "it")
    assert str(error.value) == (
        "it holds 1e+05, beyond the largest number of F16, 65504; bf16 and f32 have larger ones"
    )
