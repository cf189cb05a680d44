"""What `transformers` computes for tiny models of each family it has: live, and as recorded.

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
from windlass.hub.names import to_tensors
from windlass.layers.rotary import Scaling

RECORD = Path(__file__).parents[1] / "fixtures" / "parity.npz"
SHORT: dict[str, Any] = dict(
    original_length=7, slow=0.05, fast=0.8
)  # of the longest document, which has 13
# The family of each case, and how it differs from the family's tiny(). No field of those has its
# default; the others have what public configs have.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, untied": ("llama", dict(tied=False, scaling=None, pairing="half")),
    "llama, linear": ("llama", dict(scaling=Scaling(kind="linear", factor=2.0), pairing="half")),
    "mistral": ("mistral", {}),
    "mistral, no window": ("mistral", dict(tied=False, window=None, scaling=None, pairing="half")),
    "qwen2": ("qwen2", {}),
    "qwen2, untied": ("qwen2", dict(tied=False, scaling=None, pairing="half")),
    "qwen2, whole pairs": ("qwen2", dict(scaling=Scaling(kind="yarn", factor=4.0, **SHORT))),
    "qwen3": ("qwen3", {}),
    "qwen3, tied": ("qwen3", dict(tied=True, scaling=None, pairing="half")),
    "qwen3, usual yarn": (
        "qwen3",
        dict(scaling=Scaling(kind="yarn", factor=4.0, original_length=8), pairing="half"),
    ),
    "gemma": ("gemma", {}),
    "gemma, five to one": (
        "gemma",
        dict(layers=7, global_every=6, query_width=None, scaling=None, pairing="half"),
    ),
}
FAMILIES = sorted({family for family, _ in CASES.values()})
HAS_TORCH = importlib.util.find_spec("torch") is not None


class Answers(NamedTuple):
    logits: np.ndarray  # of every position, one document after the other
    gradients: dict[str, np.ndarray]  # of the mean loss over all targets, by the reference's name


def config(case: str):
    family, changes = CASES[case]
    tiny = importlib.import_module(f"windlass.models.{family}").Config.tiny()
    return dataclasses.replace(tiny, **changes)


def texts(vocab: int) -> list[np.ndarray]:
    return documents(vocab, [9, 4, 14, 2, 6])


def tensors(config) -> dict[str, np.ndarray]:
    """Random weights in the reference's layout: logits of size 1, no norm or bias as it starts."""
    family = importlib.import_module(type(config).__module__)
    blank = to_tensors(eqx.filter_jit(config.init)(jax.random.key(0)), family.NAMES)
    rng = np.random.default_rng(1)

    def draw(start: np.ndarray) -> np.ndarray:
        x = rng.normal(size=start.shape)
        x = x / np.sqrt(start.shape[1]) if start.ndim == 2 else start + 0.3 * x
        return x.astype(np.float32)

    return {name: draw(blank[name]) for name in sorted(blank)}


def module(case: str) -> Any:
    """The reference's model with the weights of a case."""
    import torch

    c = config(case)
    model, weights = _module(CASES[case][0], c), tensors(c)
    state = {name: torch.from_numpy(x) for name, x in weights.items()}
    missing, unknown = model.load_state_dict(state, strict=False)
    assert not unknown and missing == ([] if "lm_head.weight" in weights else ["lm_head.weight"])
    return model


def computed(case: str) -> Answers:
    """Each document by itself, so that nothing of the reference's masking is relied upon."""
    import torch

    c, model = config(case), module(case)
    logits, total, count = [], torch.zeros(()), 0
    for text in texts(c.vocab):
        tokens = torch.from_numpy(text).long()
        seen = model(tokens[None, :-1]).logits[0]
        logits.append(seen.detach().numpy())
        total = total + torch.nn.functional.cross_entropy(seen, tokens[1:], reduction="sum")
        count += len(text) - 1
    (total / count).backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return Answers(np.concatenate(logits), gradients)


def sketched(answers: Answers) -> Answers:
    """The same with eight random sums of each gradient in its place, to be small in a file."""

    def sketch(gradient: np.ndarray) -> np.ndarray:
        directions = np.random.default_rng(2).normal(size=(8, gradient.size))
        return (directions @ gradient.ravel()).astype(np.float32)

    return answers._replace(gradients={k: sketch(g) for k, g in answers.gradients.items()})


def recorded(case: str) -> Answers:
    with np.load(RECORD) as held:
        written, now = str(held[case]), _written(case)
        if json.loads(written) != json.loads(now):
            raise ValueError(
                f"the record of {case} is of {written}, and it is now {now}: run "
                "python -m tests.models.reference where torch is installed"
            )
        names = sorted(tensors(config(case)))
        gradients = dict(zip(names, held[f"{case}/gradients"], strict=True))
        return Answers(held[f"{case}/logits"], gradients)


def record() -> None:
    held = {}
    for case in CASES:
        held[case] = np.array(_written(case))
        answers = sketched(computed(case))
        held[f"{case}/logits"] = answers.logits
        names = sorted(answers.gradients)
        held[f"{case}/gradients"] = np.stack([answers.gradients[name] for name in names])
    np.savez_compressed(RECORD, **held)


def _written(case: str) -> str:
    return json.dumps(tree(config(case)))


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
        rope_parameters=rope_parameters(c.theta, c.scaling),
        rms_norm_eps=c.eps,
    )
    match family:
        case "llama":
            kind, own = "Llama", dict(attention_bias=c.attention_bias, mlp_bias=c.mlp_bias)
        case "mistral":
            kind, own = "Mistral", dict(sliding_window=c.window)
        case "qwen2":
            kind, own = "Qwen2", {}
        case "qwen3":
            kind, own = "Qwen3", dict(attention_bias=c.attention_bias)
        case "gemma":
            near = rope_parameters(c.local_theta, None)
            both = {"full_attention": common["rope_parameters"], "sliding_attention": near}
            common |= dict(
                rope_parameters=both,
                sliding_window=c.window,
                sliding_window_pattern=c.global_every,
                query_pre_attn_scalar=c.query_width or c.head_dim,
                pad_token_id=None,  # else the embedding of token 0 has no gradient there
            )
            return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**common))
        case _:
            raise ValueError(f"no reference for {family}")
    config = getattr(transformers, f"{kind}Config")(**common, tie_word_embeddings=c.tied, **own)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def rope_parameters(theta: float, scaling: Scaling | None) -> dict[str, Any]:
    """The same in the words of `transformers`."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    slow, fast = {
        "linear": ("", ""),
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_slow", "beta_fast"),
    }[scaling.kind]
    usual = {"llama3": (1.0, 4.0)}.get(scaling.kind, (None, None))  # it has no defaults for them
    words = {
        "rope_type": scaling.kind,
        "rope_theta": theta,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_length,
        slow: scaling.slow or usual[0],
        fast: scaling.fast or usual[1],
        "attention_factor": scaling.attention_factor,
        "truncate": scaling.truncate,
    }
    return {name: value for name, value in words.items() if value is not None}


if __name__ == "__main__":
    record()
