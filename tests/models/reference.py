"""What `transformers` computes for a tiny model of each family it has: live, and as recorded.

`python -m tests.models.reference` records it anew, where torch is installed.
"""

import dataclasses
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from tests.tiny import documents
from windlass.config import tree
from windlass.export.names import to_tensors

RECORD = Path(__file__).parents[1] / "fixtures" / "parity.npz"
CASES = [(family, tied) for family in ("llama", "qwen3") for tied in (True, False)]
HAS_TORCH = importlib.util.find_spec("torch") is not None


class Answers(NamedTuple):
    logits: dict[str, np.ndarray]  # of each document, by its number
    gradients: dict[str, np.ndarray]  # of the mean loss over all targets, by the reference's name


def config(family: str, tied: bool):
    tiny = importlib.import_module(f"windlass.models.{family}").Config.tiny()
    return dataclasses.replace(tiny, tied=tied)


def texts(vocab: int) -> list[np.ndarray]:
    return documents(vocab, [9, 4, 14, 2, 6])


def tensors(config) -> dict[str, np.ndarray]:
    """Random weights in the reference's layout: logits of size 1, no norm 1, no bias 0."""
    family = importlib.import_module(type(config).__module__)
    blank = to_tensors(eqx.filter_jit(config.init)(jax.random.key(0)), family.NAMES)
    rng = np.random.default_rng(1)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        x = rng.normal(size=shape)
        if len(shape) == 1:
            x = 0.3 * x + (1 if "norm" in name else 0)
        else:
            x = x / np.sqrt(shape[1])
        return x.astype(np.float32)

    return {name: draw(name, blank[name].shape) for name in sorted(blank)}


def computed(family: str, tied: bool) -> Answers:
    """Each document by itself, so that nothing of the reference's masking is relied upon."""
    import torch

    c = config(family, tied)
    model = _module(family, c)
    state = {name: torch.from_numpy(x) for name, x in tensors(c).items()}
    missing, unknown = model.load_state_dict(state, strict=False)
    assert not unknown and missing == (["lm_head.weight"] if tied else [])

    logits, total, count = {}, torch.zeros(()), 0
    for number, text in enumerate(texts(c.vocab)):
        tokens = torch.from_numpy(text).long()
        seen = model(tokens[None, :-1]).logits[0]
        logits[str(number)] = seen.detach().numpy()
        total = total + torch.nn.functional.cross_entropy(seen, tokens[1:], reduction="sum")
        count += len(text) - 1
    (total / count).backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return Answers(logits, gradients)


def sketched(answers: Answers) -> Answers:
    """The same with eight random sums of each gradient in its place, to be small in a file."""

    def sketch(gradient: np.ndarray) -> np.ndarray:
        directions = np.random.default_rng(2).normal(size=(8, gradient.size))
        return (directions @ gradient.ravel()).astype(np.float32)

    return answers._replace(gradients={k: sketch(g) for k, g in answers.gradients.items()})


def recorded(family: str, tied: bool) -> Answers:
    case, parts = _case(family, tied), {name: {} for name in Answers._fields}
    with np.load(RECORD) as held:
        written, now = str(held[case]), _written(family, tied)
        if written != now:
            raise ValueError(
                f"the record of {case} is of {written}, and its tiny() is now {now}: run "
                "python -m tests.models.reference where torch is installed"
            )
        for key in held:
            if key.startswith(f"{case}/"):
                _, part, name = key.split("/")
                parts[part][name] = held[key]
    return Answers(**parts)


def record() -> None:
    held = {}
    for family, tied in CASES:
        case = _case(family, tied)
        held[case] = np.array(_written(family, tied))
        for part, values in sketched(computed(family, tied))._asdict().items():
            held |= {f"{case}/{part}/{name}": value for name, value in values.items()}
    np.savez_compressed(RECORD, **held)


def _case(family: str, tied: bool) -> str:
    return f"{family}-{'tied' if tied else 'untied'}"


def _written(family: str, tied: bool) -> str:
    return json.dumps(tree(config(family, tied)))


def _module(family: str, c) -> Any:
    import transformers

    common: dict[str, Any] = dict(
        vocab_size=c.vocab,
        hidden_size=c.embed,
        intermediate_size=c.mlp,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": c.theta},
        rms_norm_eps=c.eps,
        tie_word_embeddings=c.tied,
        attention_bias=c.attention_bias,
    )
    match family:
        case "llama":
            return transformers.LlamaForCausalLM(
                transformers.LlamaConfig(**common, mlp_bias=c.mlp_bias)
            )
        case "qwen3":
            return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common))
    raise ValueError(f"no reference for {family}")


if __name__ == "__main__":
    record()
