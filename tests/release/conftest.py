"""Small runs to export: from scratch, and from folders that `transformers` wrote."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

import windlass
from tests import trained
from windlass.data.vocabulary import END, byte
from windlass.hub.chat_template import CHATML

SPECIAL = ("<|im_start|>", "<|im_end|>")
VOCAB = 272  # bytes, the end of a document, special tokens, and some that nothing is
SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """The one run that others look at too; nobody may change it."""
    return trained.only_run(trained.workplace(tmp_path_factory))


@pytest.fixture(scope="session")
def tuned(tmp_path_factory) -> Path:
    """A Qwen2 that shares its head, in bfloat16 and several files, with all its weights trained."""
    return trained_from("Qwen2", "bfloat16", tmp_path_factory.mktemp("tuned"), tied=True)


@pytest.fixture(scope="session")
def adapted(tmp_path_factory) -> Path:
    """A Llama in float32, with an adapter trained beside it on chats, which end as no text does."""
    adapter = {"kind": "lora", "rank": 3, "alpha": 5.0, "targets": ["q_proj", "blocks.mlp.*"]}
    place = tmp_path_factory.mktemp("adapted")
    return trained_from("Llama", "float32", place, tied=False, format="chat", adapter=adapter)


def trained_from(
    kind: str, dtype: str, place: Path, *, tied: bool, format: str = "text", **sections: dict
) -> Path:
    """A run of two steps from a folder that is then gone, as is the corpus."""
    write(kind, dtype, place / "base", tied)
    corpus = place / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row(number)) + "\n" for number in range(16)))
    recipe = {
        "model": {"path": str(place / "base")},
        "data": {"source": {"kind": "jsonl", "path": str(corpus)}, "length": 128, "format": format},
        "optim": {"kind": "adamw", "learning_rate": 1e-2, "schedule": {"shape": "constant"}},
        "train": {"steps": 2, "batch": 2},
        "device": {"kind": "cpu", "count": 1},
        "run": {"dir": str(place / "run")},
        **sections,
    }
    windlass.train(recipe)
    shutil.move(place / "base", place / "elsewhere")
    corpus.unlink()
    return place / "run"


def row(number: int) -> dict:
    """Text, and the same as a chat."""
    question, answer = f"What comes after {number}?", f"{number + 1} does."
    said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"text": f"{question} {answer}", "messages": said}


def write(kind: str, dtype: str, folder: Path, tied: bool) -> None:
    """A model with random weights and a tokenizer that knows chats, as `transformers` writes."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=tied,
        max_position_embeddings=256,
        initializer_range=0.3,
        **SIZES,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=8_000)
    library = Library.from_str(byte().text)
    library.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token=END, chat_template=CHATML
    )
    tokenizer.save_pretrained(folder)
    generation = {"eos_token_id": 256, "temperature": 0.7, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
