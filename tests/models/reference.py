"""What `transformers` computes for tiny models of each family it has: live, and as recorded.

`python -m tests.models.reference` records it anew, where torch is installed; with names of cases,
those alone.
"""

import dataclasses
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from tests.tiny import documents
from windlass.config import tree
from windlass.hub.names import to_tensors
from windlass.hub.weights import in_order
from windlass.layers.rotary import Scaling

RECORD = Path(__file__).parents[1] / "fixtures" / "parity.npz"
SHORT: dict[str, Any] = dict(
    original_length=7, slow=0.05, fast=0.8
)  # of the longest document, which has 13
# The family of each case, and how it differs from the family's tiny(). No field of those has its
# default; the others have what public configs have.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granite", {}),
    "granite, untied": (
        "granite",
        dict(tied=False, scaling=None, pairing="half", attention_bias=False, mlp_bias=False),
    ),
    "llama": ("llama", {}),
    "llama, untied": ("llama", dict(tied=False, scaling=None, pairing="half")),
    "llama, linear": ("llama", dict(scaling=Scaling(kind="linear", factor=2.0), pairing="half")),
    "mistral": ("mistral", {}),
    "mistral, no window": ("mistral", dict(tied=False, window=None, scaling=None, pairing="half")),
    "olmo2": ("olmo2", {}),
    "olmo2, untied": (
        "olmo2",
        dict(tied=False, scaling=None, pairing="half", attention_bias=False),
    ),
    "olmo3": ("olmo3", {}),
    "olmo3, three to one": (
        "olmo3",
        dict(tied=False, layers=5, global_every=4, pairing="half", attention_bias=False),
    ),
    "phi3": ("phi3", {}),
    "phi3, whole heads": (
        "phi3",
        dict(tied=False, rotary_share=1.0, window=None, pairing="half"),
    ),
    "qwen2": ("qwen2", {}),
    "qwen2, untied": ("qwen2", dict(tied=False, scaling=None, pairing="half")),
    "qwen2, whole pairs": ("qwen2", dict(scaling=Scaling(kind="yarn", factor=4.0, **SHORT))),
    "qwen3": ("qwen3", {}),
    "qwen3, tied": ("qwen3", dict(tied=True, scaling=None, pairing="half")),
    "qwen3, usual yarn": (
        "qwen3",
        dict(scaling=Scaling(kind="yarn", factor=4.0, original_length=8), pairing="half"),
    ),
    "mixtral": ("mixtral", {}),
    "mixtral, no window": ("mixtral", dict(tied=False, window=None, scaling=None, pairing="half")),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, normalized": (
        "qwen3_moe",
        dict(normalized=True, tied=False, scaling=None, pairing="half"),
    ),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5, three to one": (
        "qwen3_5",
        dict(
            layers=5,
            attention_every=4,
            taps=4,
            value_heads=2,
            scaling=None,
            tied=False,
            attention_bias=False,
        ),
    ),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "qwen3_5_moe, three to one": (
        "qwen3_5_moe",
        dict(
            layers=5,
            attention_every=4,
            taps=4,
            value_heads=2,
            shared_mlp=12,
            scaling=None,
            tied=False,
            attention_bias=False,
        ),
    ),
    "smollm3": ("smollm3", {}),
    "smollm3, tied": (
        "smollm3",
        dict(tied=True, no_rope_every=4, scaling=None, pairing="half", attention_bias=False),
    ),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, alternating": (
        "gpt_oss",
        dict(global_every=2, alpha=1.702, tied=False, attention_bias=True, pairing="half"),
    ),
    "gemma4": ("gemma4", {}),
    "gemma4, all keys and values": (
        "gemma4",
        dict(
            layers=4,
            global_every=4,
            global_kv_heads=2,
            kv_shared_layers=0,
            per_layer=None,
            rotary_share=0.25,
            logit_cap=None,
        ),
    ),
    "gemma4, four to one": (
        "gemma4",
        dict(
            layers=10,
            global_every=5,
            global_kv_heads=None,
            kv_shared_layers=5,
            double_wide_mlp=False,
            rotary_share=1.0,
        ),
    ),
    "gemma": ("gemma", {}),
    "gemma, five to one": (
        "gemma",
        dict(layers=7, global_every=6, query_width=None, scaling=None, pairing="half"),
    ),
}
EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.weight")
PLACES = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0, 2)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1, 2)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", 0, 1)),
}
SECOND = {"gate_proj": "up_proj", "w1": "w3"}
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
    # Slow decay: of heads that forget all at once hardly anything has a gradient.
    blank |= {name: 0 * x - 1 for name, x in blank.items() if name.endswith("A_log")}
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
    state = {name: torch.from_numpy(x) for name, x in fused(weights).items()}
    missing, unknown = model.load_state_dict(state, strict=False)
    assert not unknown and missing == ([] if "lm_head.weight" in weights else ["lm_head.weight"])
    return model


def computed(case: str, *, exact: bool = False) -> Answers:
    """Each document by itself, so that nothing of the reference's masking is relied upon.

    Exact are float64's: in float32 it is as far from those as what is held against it, and not
    on every machine the same.
    """
    import torch

    c, model = config(case), module(case)
    if exact:
        model.double().set_experts_implementation("eager")  # no other takes float64
    logits, total, count = [], torch.zeros(()), 0
    for text in texts(c.vocab):
        tokens = torch.from_numpy(text).long()
        seen = model(tokens[None, :-1]).logits[0]
        logits.append(seen.detach().numpy())
        total = total + torch.nn.functional.cross_entropy(seen, tokens[1:], reduction="sum")
        count += len(text) - 1
    (total / count).backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    gradients |= {name: 0 * x.numpy() for name, x in model.named_buffers()}  # never trained
    return Answers(np.concatenate(logits), separate(gradients, sorted(tensors(c))))


def fused(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights by the names of the module: separate experts in one tensor, gate above up."""
    experts: dict[str, list[np.ndarray]] = {}
    state = {}
    for name in sorted(weights, key=in_order):
        match = EXPERT.fullmatch(name)
        if match is None:
            state[name.replace(".block_sparse_moe.", ".mlp.")] = weights[name]
        elif (place := PLACES[match[3]])[1] == 0:
            other = name.replace(f".{match[3]}.", f".{SECOND.get(match[3])}.")
            both = [weights[name], *([weights[other]] if other in weights else [])]
            before = match[1].replace(".block_sparse_moe", ".mlp")
            experts.setdefault(f"{before}.experts.{place[0]}", []).append(np.concatenate(both))
    return state | {name: np.stack(each) for name, each in experts.items()}


def separate(state: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
    """The same by the names of a checkpoint, the inverse of `fused`."""

    def one(name: str) -> np.ndarray:
        inside = name.replace(".block_sparse_moe.", ".mlp.")
        match = EXPERT.fullmatch(inside)
        if match is None:
            return state[inside]
        whole, part, parts = PLACES[match[3]]
        return np.split(state[f"{match[1]}.experts.{whole}"][int(match[2])], parts)[part]

    return {name: one(name) for name in names}


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


def record(*cases: str) -> None:
    """Record these cases anew, and keep the others; without any, all of them."""
    with np.load(RECORD) as before:
        held = {name: before[name] for name in before.files if name.partition("/")[0] in CASES}
    for case in cases or CASES:
        held[case] = np.array(_written(case))
        answers = sketched(computed(case, exact=True))
        held[f"{case}/logits"] = answers.logits.astype(np.float32)
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
        rope_parameters=rope_parameters(c.theta, getattr(c, "scaling", None)),
        rms_norm_eps=c.eps,
    )
    match family:
        case "granite":
            names = "attention_bias mlp_bias attention_multiplier embedding_multiplier "
            names += "residual_multiplier logits_scaling"
            kind, own = "Granite", {name: getattr(c, name) for name in names.split()}
        case "llama":
            kind, own = "Llama", dict(attention_bias=c.attention_bias, mlp_bias=c.mlp_bias)
        case "mistral":
            kind, own = "Mistral", dict(sliding_window=c.window)
        case "qwen2":
            kind, own = "Qwen2", {}
        case "qwen3":
            kind, own = "Qwen3", dict(attention_bias=c.attention_bias)
        case "mixtral":
            kind = "Mixtral"
            own = dict(
                sliding_window=c.window,
                num_local_experts=c.experts,
                num_experts_per_tok=c.experts_per_token,
                router_aux_loss_coef=c.balance,
            )
        case "qwen3_moe":
            kind = "Qwen3Moe"
            own = dict(
                attention_bias=c.attention_bias,
                moe_intermediate_size=c.mlp,
                num_experts=c.experts,
                num_experts_per_tok=c.experts_per_token,
                norm_topk_prob=c.normalized,
                router_aux_loss_coef=c.balance,
            )
        case "qwen3_5":
            share = {"partial_rotary_factor": c.rotary_share}
            common |= dict(rope_parameters=common["rope_parameters"] | share)
            kind, own = "Qwen3_5", dict(attention_bias=c.attention_bias, **_deltanet(c))
        case "qwen3_5_moe":
            share = {"partial_rotary_factor": c.rotary_share}
            common |= dict(rope_parameters=common["rope_parameters"] | share)
            kind, own = "Qwen3_5Moe", dict(attention_bias=c.attention_bias, **_deltanet(c))
            own |= dict(
                moe_intermediate_size=c.mlp,
                shared_expert_intermediate_size=c.shared_mlp,
                num_experts=c.experts,
                num_experts_per_tok=c.experts_per_token,
                router_aux_loss_coef=c.balance,
            )
        case "smollm3":
            biases = dict(attention_bias=c.attention_bias, mlp_bias=c.mlp_bias, pad_token_id=None)
            kind, own = "SmolLM3", dict(no_rope_layer_interval=c.no_rope_every, **biases)
        case "phi3":
            common["rope_parameters"]["partial_rotary_factor"] = c.rotary_share
            kind, own = "Phi3", dict(sliding_window=c.window, pad_token_id=None)
        case "olmo2":
            kind, own = "Olmo2", dict(attention_bias=c.attention_bias, pad_token_id=None)
        case "olmo3":
            kind, own = "Olmo3", dict(attention_bias=c.attention_bias, pad_token_id=None)
            near = rope_parameters(c.theta, None)
            kinds = ["sliding_attention", "full_attention"]
            own |= dict(
                sliding_window=c.window,
                layer_types=[kinds[(i + 1) % c.global_every == 0] for i in range(c.layers)],
            )
            common["rope_parameters"] = {
                "full_attention": common["rope_parameters"],
                "sliding_attention": near,
            }
        case "gpt_oss":
            kind = "GptOss"
            types = ("full_attention", "sliding_attention")
            own = dict(
                attention_bias=c.attention_bias,
                sliding_window=c.window,
                layer_types=[types[(i + 1) % c.global_every != 0] for i in range(c.layers)],
                swiglu_alpha=c.alpha,
                swiglu_limit=c.limit,
                num_local_experts=c.experts,
                num_experts_per_tok=c.experts_per_token,
                router_aux_loss_coef=c.balance,
            )
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
        case "gemma4":
            kinds = ["sliding_attention", "full_attention"]
            share = dict(rope_type="proportional", partial_rotary_factor=c.rotary_share)
            both = {
                "full_attention": common["rope_parameters"] | share,
                "sliding_attention": rope_parameters(c.local_theta, None),
            }
            common |= dict(
                rope_parameters=both,
                layer_types=[kinds[(i + 1) % c.global_every == 0] for i in range(c.layers)],
                sliding_window=c.window,
                global_head_dim=c.global_head_dim,
                num_global_key_value_heads=c.global_kv_heads,
                attention_k_eq_v=c.global_kv_heads is not None,
                hidden_size_per_layer_input=c.per_layer or 0,
                vocab_size_per_layer_input=c.vocab,
                num_kv_shared_layers=c.kv_shared_layers,
                use_double_wide_mlp=c.double_wide_mlp,
                final_logit_softcapping=c.logit_cap,
                pad_token_id=None,
            )
            return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**common))
        case _:
            raise ValueError(f"no reference for {family}")
    names = (f"{kind}TextConfig", f"{kind}Config")  # the first of those with images too
    section = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    config = section(**common, tie_word_embeddings=c.tied, **own)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def _deltanet(c) -> dict[str, Any]:
    return dict(
        layer_types=[
            "linear_attention" if (layer + 1) % c.attention_every else "full_attention"
            for layer in range(c.layers)
        ],
        linear_num_key_heads=c.key_heads,
        linear_num_value_heads=c.value_heads,
        linear_key_head_dim=c.key_dim,
        linear_value_head_dim=c.value_dim,
        linear_conv_kernel_dim=c.taps,
    )


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
    record(*sys.argv[1:])
