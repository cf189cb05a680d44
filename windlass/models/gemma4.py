"""Gemma 4, text: layers that see a window and layers that see all, with heads of their own each.

Beside Gemma 3's, values are normed and may be the keys, RoPE rotates a part of the pairs in global
layers, layers have inputs of their own (per-layer embeddings), the last of them share the keys and
values of earlier ones, each is scaled as a whole, and logits are soft-capped.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from windlass.config import section
from windlass.devices.axes import Placed
from windlass.layers.auxiliary import Report, added
from windlass.layers.context import enter
from windlass.layers.embedding import Embedding
from windlass.layers.head import Head
from windlass.layers.kv_cache import KVCache, SharedKV
from windlass.layers.mlp import Gated
from windlass.layers.norm import RMSNorm
from windlass.layers.residual import Connection, NormedBranch, Plain
from windlass.layers.rotary import Rotary
from windlass.layers.stack import Stack, stacked
from windlass.models import HuggingFace, Multimodal, Spelling, llama
from windlass.networks.per_layer import PerLayerGate, PerLayerInputs
from windlass.networks.shared_attention import NormedValueAttention, SharedKVAttention

LAYER = "model.layers.{layer}"
STACKS = ("blocks", "kv_source_blocks", "kv_shared_blocks")
NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer.embedding.weight": "model.embed_tokens_per_layer.weight",
    "per_layer.projection": "model.per_layer_model_projection",
    "per_layer.norm.scale": "model.per_layer_projection_norm.weight",
} | {
    f"{stack}.{ours}": f"{LAYER}.{name}"
    for stack in STACKS
    for ours, name in {
        "attention_norm.scale": "input_layernorm.weight",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "attention.query_norm.scale": "self_attn.q_norm.weight",
        "attention.key_norm.scale": "self_attn.k_norm.weight",
        "mixed_norm.scale": "post_attention_layernorm.weight",
        "mlp_norm.scale": "pre_feedforward_layernorm.weight",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "written_norm.scale": "post_feedforward_layernorm.weight",
        "per_layer.gate": "per_layer_input_gate",
        "per_layer.projection": "per_layer_projection",
        "per_layer.norm.scale": "post_per_layer_input_norm.weight",
        "scalar.factor": "layer_scalar",
    }.items()
}
SHARED_LAYERS = "num_kv_shared_layers"
FULL, SLIDING = "full_attention", "sliding_attention"
ROPE, SHARE, BY_LAYER = "rope_parameters", "partial_rotary_factor", "per_layer_config"
# Keys that are read, and those of RoPE in a spelling that is older than the family.
FORMER = (BY_LAYER, SHARE, "rope_theta", "rope_local_base_freq", "rope_scaling")
PER_LAYER, KV_HEADS = "hidden_size_per_layer_input", "num_global_key_value_heads"


def _read(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """A config.json in which each field has a key, and what is wrong with it."""
    found, problems = dict(config), []
    # A release has sizes of global layers by the number of each.
    by_layer = found.pop(BY_LAYER, None)
    if by_layer and isinstance(by_layer, Mapping):
        types = found.get("layer_types") or []
        of_global = {f"{number}" for number, kind in enumerate(types) if kind == FULL}
        sizes = [dict(one) for one in by_layer.values() if isinstance(one, Mapping)]
        own, *others = sizes or [{}]
        known = {"head_dim": "global_head_dim", "num_key_value_heads": KV_HEADS}
        if (
            {*map(str, by_layer)} == of_global
            and all(one == own for one in others)
            and (own.keys() <= known.keys())
        ):
            found["global_head_dim"] = own.get("head_dim", found.get("head_dim"))
            found[KV_HEADS] = own.get("num_key_value_heads")
        else:
            what = "is not head_dim and num_key_value_heads, the same for every global layer"
            problems.append((BY_LAYER, f"{what}, which are all that differs by layer here"))
    is_tied = found.get("attention_k_eq_v")
    heads = found.get(KV_HEADS) or found.get("num_key_value_heads")
    found[KV_HEADS] = heads if is_tied else None
    found[PER_LAYER] = found.get(PER_LAYER, 256) or None
    tables = [found.get(key) for key in ("vocab_size", "vocab_size_per_layer_input")]
    if found[PER_LAYER] and tables[1] not in (None, tables[0]):
        what = f"is {tables[1]}; it must be vocab_size ({tables[0]})"
        problems.append(("vocab_size_per_layer_input", what))
    return _rope(found, problems), problems


def _rope(config: dict[str, Any], problems: list[tuple[str, str]]) -> dict[str, Any]:
    """RoPE of global layers as one of all pairs, and the share of them that are rotated."""
    both = config.get(ROPE)
    whole = both.get(FULL) if isinstance(both, Mapping) else None
    if not isinstance(both, Mapping) or not isinstance(whole, Mapping):
        return config
    kind, factor = whole.get("rope_type", "default"), whole.get("factor") or 1
    if kind not in ("default", "proportional"):
        what = f'is "{kind}"; there are default and proportional'
        problems.append((f"{ROPE}.{FULL}.rope_type", what))
    elif factor != 1:
        problems.append((f"{ROPE}.{FULL}.factor", f"is {factor}; only 1 is computed here"))
    share = whole.get(SHARE, 1.0) if kind == "proportional" else 1.0
    plain = {"rope_type": "default", "rope_theta": whole.get("rope_theta")}
    return config | {ROPE: {**both, FULL: plain}, SHARE: share}


def _written(config: "Config") -> dict[str, Any]:
    """The keys of a config.json that are no field's."""
    whole = {"rope_type": "proportional", SHARE: config.rotary_share, "rope_theta": config.theta}
    near = {"rope_type": "default", "rope_theta": config.local_theta}
    return {
        ROPE: {FULL: whole, SLIDING: near},
        PER_LAYER: config.per_layer or 0,
        "vocab_size_per_layer_input": config.vocab,
        "attention_k_eq_v": config.global_kv_heads is not None,
    }


def _unused(config: Mapping[str, Any]) -> dict[str, str]:
    """Tensors for keys and values, by their prefixes, of layers that share those of others."""
    layers, shared = (config.get(key) or 0 for key in ("num_hidden_layers", SHARED_LAYERS))
    return {
        f"{LAYER.format(layer=layer)}.self_attn.{one}_": "layers that share keys and values"
        for layer in range(layers - shared, layers)
        for one in "kv"
    }


HUGGING_FACE = HuggingFace(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    fields={name: key for name, key in llama.FIELDS.items() if name != "tied"}
    | {
        "global_head_dim": "global_head_dim",
        "global_kv_heads": KV_HEADS,
        "window": "sliding_window",
        "per_layer": PER_LAYER,
        "kv_shared_layers": SHARED_LAYERS,
        "double_wide_mlp": "use_double_wide_mlp",
        "logit_cap": "final_logit_softcapping",
        "rotary_share": SHARE,
    },
    absent={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        KV_HEADS: None,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        PER_LAYER: 256,
        SHARED_LAYERS: 0,
        "use_double_wide_mlp": False,
        "final_logit_softcapping": None,
        SHARE: 0.25,
    },
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "tie_word_embeddings": (True,),
        "attention_bias": (False,),
        "enable_moe_block": (False,),
        # Of images it says more, which are not computed here.
        "use_bidirectional_attention": (None, "vision"),
    },
    by_layer=True,
    spelling=Spelling(read=_read, written=_written, former=FORMER),
    multimodal=Multimodal(
        architecture="Gemma4ForConditionalGeneration",
        model_type="gemma4",
        prefix="model.language_model.",
    ),
    beside={
        "model.vision_tower.": "the vision tower",
        "model.embed_vision.": "the projection of images",
        "model.audio_tower.": "the audio tower",
        "model.embed_audio.": "the projection of audio",
    },
    unused=_unused,
)


@section
class Config:
    """A Gemma 4 text model from scratch."""

    vocab: int  # vocabulary size; at least that of the tokenizer
    embed: int  # hidden size
    mlp: int  # hidden size of the MLP
    layers: int  # number of transformer blocks, a multiple of global_every
    heads: int  # query heads per layer
    kv_heads: int  # key-value heads per layer (grouped-query attention)
    head_dim: int  # size of a head in sliding-window layers
    global_head_dim: int  # size of a head in global layers
    theta: float  # RoPE base in global layers
    local_theta: float  # RoPE base in sliding-window layers
    window: int  # sliding window, own position included
    global_every: int = 6  # every n-th layer has global attention
    # key-value heads of global layers, in which values are the keys, too (attention_k_eq_v
    # elsewhere); null: kv_heads, and values of their own
    global_kv_heads: int | None = None
    # share of the pairs of a head, the first, that RoPE rotates in global layers; elsewhere
    # partial_rotary_factor of a proportional RoPE
    rotary_share: float = 0.25
    # features of a further input that each layer has for each token (per-layer embeddings,
    # hidden_size_per_layer_input elsewhere); null: there is none
    per_layer: int | None = None
    kv_shared_layers: int = 0  # last layers, which use keys and values of the layers before them
    double_wide_mlp: bool = False  # whether the MLP of those layers has twice the hidden size
    logit_cap: float | None = None  # soft cap of logits, cap · tanh(logits / cap); null: none
    eps: float = 1e-6  # epsilon of the norms

    causal = True

    def __post_init__(self):
        llama.check(self)
        for name in ("global_head_dim", "global_every", "global_kv_heads", "per_layer"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise ValueError(f"{name} is {size}; it must be 1 or more")
        if self.global_head_dim % 2:
            raise ValueError(
                f"global_head_dim is {self.global_head_dim}; rotary positions need an even one"
            )
        if self.global_kv_heads is not None and self.heads % self.global_kv_heads:
            raise ValueError(
                f"global_kv_heads is {self.global_kv_heads}; it must divide heads ({self.heads})"
            )
        if self.local_theta <= 1:
            raise ValueError(f"local_theta is {self.local_theta}; it must be above 1")
        if self.logit_cap is not None and self.logit_cap <= 0:
            raise ValueError(f"logit_cap is {self.logit_cap}; it must be above 0")
        if not 0 < self.rotary_share <= 1:
            raise ValueError(
                f"rotary_share is {self.rotary_share}; it must be a share, above 0 and up to 1"
            )
        if self.layers % self.global_every:
            raise ValueError(
                f"layers is {self.layers}; it must be a multiple of global_every "
                f"({self.global_every}): the last layer has global attention"
            )
        if not 0 <= self.kv_shared_layers <= self.layers - self.global_every:
            raise ValueError(
                f"kv_shared_layers is {self.kv_shared_layers}; it must be 0 to "
                f"{self.layers - self.global_every}: the first {self.global_every} layers have "
                "the keys and values that others share"
            )

    @property
    def sizes(self) -> dict[str, int]:
        own = {"global_kv_heads": self.global_kv_heads, "per_layer": self.per_layer}
        return llama.axis_sizes(self) | {name: x for name, x in own.items() if x is not None}

    def init(self, key: PRNGKeyArray) -> "Gemma4":
        return Gemma4(self, key=key)

    def norm(self, over: str) -> RMSNorm:
        return RMSNorm(over, self.sizes, eps=self.eps)

    def other(self, field: str) -> Any:
        value = getattr(self, field)
        if field == "global_every":
            return 1
        return not value if isinstance(value, bool) else 2 * value

    @classmethod
    def tiny(cls) -> "Config":
        return cls(
            **llama.SIZES | dict(layers=4),
            global_head_dim=12,
            theta=500.0,
            local_theta=50.0,
            window=4,
            global_every=2,
            global_kv_heads=1,
            rotary_share=0.4,
            per_layer=16,
            kv_shared_layers=1,
            double_wide_mlp=True,
            logit_cap=3.0,
            eps=0.5,
        )


class LayerScalar(Placed):
    """A number that scales all that leaves a layer; part of the architecture, never trained."""

    factor: Float[Array, "*layers 1"]
    matrices: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[tuple[str, ...]] = ("factor",)

    def __init__(self):
        self.factor = jnp.ones(1)

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"factor": ("",)}

    def __call__(self, x: PyTree) -> PyTree:
        factor = jax.lax.stop_gradient(self.factor)
        return jax.tree.map(lambda one: one * factor.astype(one.dtype), x)


class PerLayerInputBlock(eqx.Module):
    """Attention, an MLP and what the layer's own input adds, then a scale of all of it."""

    attention_norm: RMSNorm
    attention: NormedValueAttention | SharedKVAttention
    mixed_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: Gated
    written_norm: RMSNorm
    per_layer: PerLayerGate | None
    scalar: LayerScalar
    attention_residual: Connection
    mlp_residual: Connection
    per_layer_residual: Connection | None

    def __init__(self, config: Config, *, is_global: bool, shares: bool, key: PRNGKeyArray):
        c, (attention, mlp, gate) = config, jax.random.split(key, 3)
        self.attention_norm, self.mixed_norm = c.norm("embed"), c.norm("embed")
        self.attention = _attention(c, is_global=is_global, shares=shares, key=attention)
        self.mlp_norm, self.written_norm = c.norm("embed"), c.norm("embed")
        width = c.mlp * (2 if shares and c.double_wide_mlp else 1)
        self.mlp = Gated(c.sizes | {"mlp": width}, activation=jax.nn.gelu, key=mlp)
        self.scalar = LayerScalar()
        self.attention_residual = self.mlp_residual = Plain()
        self.per_layer = self.per_layer_residual = None
        if c.per_layer is not None:
            self.per_layer = PerLayerGate(c.sizes, norm=c.norm("embed"), key=gate)
            self.per_layer_residual = Plain()

    def __call__(self, x: PyTree, context, own: Array | None = None) -> PyTree:
        def attended(x):
            return self.mixed_norm(self.attention(x, context))

        def fed(x):
            return self.written_norm(self.mlp(x))

        x = self.attention_residual(x, NormedBranch(self.attention_norm, attended), context)
        x = self.mlp_residual(x, NormedBranch(self.mlp_norm, fed), context)
        if self.per_layer is not None and self.per_layer_residual is not None:
            assert own is not None  # a model with such layers has their inputs
            branch = functools.partial(self.per_layer, own=own)
            x = self.per_layer_residual(x, branch, context)
        return self.scalar(x)


def _attention(
    config: Config, *, is_global: bool, shares: bool, key: PRNGKeyArray
) -> NormedValueAttention | SharedKVAttention:
    sizes, rotary, window = config.sizes, Rotary(config.local_theta), config.window
    if is_global:
        kv_heads = config.global_kv_heads or config.kv_heads
        sizes |= {"head_dim": config.global_head_dim, "kv_heads": kv_heads}
        rotary, window = Rotary(config.theta, proportion=config.rotary_share), None
    how: dict[str, Any] = dict(
        rotary=rotary,
        norm=lambda over: RMSNorm(over, sizes, eps=config.eps),
        window=window,
        scale=1.0,  # norms of queries and keys are all that sizes their scores
        key=key,
    )
    if shares:
        return SharedKVAttention(sizes, **how)
    keys_are_values = is_global and config.global_kv_heads is not None
    return NormedValueAttention(sizes, keys_are_values=keys_are_values, eps=config.eps, **how)


class Gemma4(eqx.Module):
    """A causal language model whose last layers may share keys and values of those before them.

    Those are of the last layer of each kind that has its own, so that a round of the pattern is
    apart: its layers leave theirs.
    """

    embedding: Embedding
    per_layer: PerLayerInputs | None
    blocks: Stack | None  # None: there are none before those that others share keys and values of
    kv_source_blocks: Stack | None  # None: no layer shares any
    kv_shared_blocks: Stack | None
    norm: RMSNorm
    output: Head | None  # None: the head shares the embedding's weight
    logit_cap: float | None = eqx.field(static=True)
    windows: tuple[int | None, ...] = eqx.field(static=True)  # of a round; None: a global layer

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (embedding, per_layer, blocks) = config, jax.random.split(key, 3)
        self.embedding = Embedding(c.sizes, scale=math.sqrt(c.embed), key=embedding)
        self.per_layer = None
        if c.per_layer is not None:
            self.per_layer = PerLayerInputs(c.sizes, c.layers, eps=c.eps, key=per_layer)
        self.norm, self.output, self.logit_cap = c.norm("embed"), None, c.logit_cap
        self.windows = (*[c.window] * (c.global_every - 1), None)

        def stack(first: int, last: int, key: PRNGKeyArray, shares: bool = False) -> Stack | None:
            def maker(window: int | None):
                how = dict(is_global=window is None, shares=shares)
                return lambda key, layer: PerLayerInputBlock(c, **how, key=key)

            pattern = [maker(window) for window in self._windows(first)]
            return stacked(pattern, last - first, first=first, key=key) if last > first else None

        own = c.layers - c.kv_shared_layers
        plain = own - c.global_every if c.kv_shared_layers else own
        one, two, three = jax.random.split(blocks, 3)
        self.blocks = stack(0, plain, one)
        self.kv_source_blocks = stack(plain, own, two)
        self.kv_shared_blocks = stack(own, c.layers, three, shares=True)

    @property
    def head(self) -> Head:
        if self.output is not None:
            return self.output
        return Head(self.embedding.weight, cap=self.logit_cap)

    def __call__(
        self, batch: dict[str, Array], cache: KVCache | None = None
    ) -> tuple[Float[Array, "batch seq embed"], Report, PyTree]:
        context = enter(batch, cache)
        x = self.embedding(batch["tokens"])
        inputs = None if self.per_layer is None else self.per_layer(batch["tokens"], x)
        past = (None,) * len(STACKS) if cache is None or cache.layers is None else cache.layers
        x, own, report = _through(self.blocks, x, context, past[0], inputs)
        leaving = context.leaving_kv()
        x, sources, more = _through(self.kv_source_blocks, x, leaving, past[1], inputs)
        report = added(report, more)
        sharing = context.sharing(self._last(sources))
        x, shared, more = _through(self.kv_shared_blocks, x, sharing, past[2], inputs)
        return self.norm(x), added(report, more), context.finish((own, sources, shared))

    def _windows(self, first: int) -> list[int | None]:
        """Windows of a round of layers, from the layer of this number on."""
        start = first % len(self.windows)
        return [*self.windows[start:], *self.windows[:start]]

    def _last(self, left: PyTree) -> SharedKV:
        """Keys and values of the last layer of each kind, of what one round of layers left."""
        if self.kv_source_blocks is None:
            return {}
        windows, (rounds, _) = self._windows(self.kv_source_blocks.first), left
        return {
            window: jax.tree.map(lambda x: x[0], one)
            for window, (one,) in zip(windows, rounds, strict=True)
        }


def _through(
    stack: Stack | None, x: Array, context, cache: PyTree, inputs: Array | None
) -> tuple[Array, PyTree, Report]:
    """Hidden states after a stack, with the inputs of its layers among those of all."""
    if stack is None:
        return x, None, {}
    own = None if inputs is None else inputs[stack.first : stack.first + stack.layers]
    return stack(x, context, cache, own)
