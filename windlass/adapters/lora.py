"""LoRA: beside each linear map the product of two of low rank, and only these are trained.

y = x W + s (x A) B, with s = α / r, or α / √r in rsLoRA. DoRA trains the norm of each column of
W + s A B by itself: y = x (W + s A B) m / ‖W + s A B‖.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.adapters import Adapted, Peft, Site, chosen, in_experts, replaced, sites
from windlass.config import Problem, listing, section
from windlass.config.reading import show
from windlass.devices.axes import gathered
from windlass.errors import UserError
from windlass.layers.dropout import Dropout
from windlass.layers.embedding import TokenTable
from windlass.layers.initializers import small, uniform, zeros
from windlass.layers.linear import Linear, LinearMap, LowRank
from windlass.layers.names import first_match

Model = TypeVar("Model")
INITIALIZERS = {"peft": uniform, "normal": small}  # of the first matrix, by `init`

# How an adapter of PEFT's may have begun; the others change the weights it is added to as well.
BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
TOKENS = "trainable_token_indices"
TABLES = {"embed_tokens": "tokens", "lm_head": "head_tokens"}  # modules there to our keys
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


@section
class LoraGroup:
    """Linear maps, by name, with a rank or an alpha of their own."""

    # the end of a map's name, ours or PEFT's, as a regular expression: q_proj, layers.0.mlp.up_proj
    match: str
    rank: int | None = None  # null: that of the rest
    alpha: float | None = None  # null: that of the rest

    def __post_init__(self):
        wrong = []
        if self.rank is None and self.alpha is None:
            wrong.append(f"says nothing of {self.match}: rank or alpha would")
        if self.rank is not None and self.rank < 1:
            wrong.append(f"rank is {self.rank}; it must be 1 or more")
        if self.alpha is not None and self.alpha <= 0:
            wrong.append(f"alpha is {self.alpha}; it must be above 0")
        try:
            re.compile(self.match)
        except re.error as error:
            wrong.append(f"match is {self.match}, which is no regular expression: {error}")
        if wrong:
            raise ValueError(*wrong)


@section
class Adapter(Peft):
    """LoRA: two matrices of low rank beside each linear map, as PEFT has them."""

    rank: int = 16  # of the product of the two (r)
    alpha: float | None = None  # the product is scaled by alpha / rank; null: alpha is 2 × rank
    scaling: Literal["plain", "rslora"] = "plain"  # rslora: by alpha / sqrt(rank)
    dropout: float = 0.0  # on the adapter's input, in training
    # patterns of linear maps, such as blocks.attention.*, or PEFT's names, such as q_proj
    targets: tuple[str, ...] = ("*",)
    # ranks and alphas of their own (rank_pattern, alpha_pattern); of each the first match counts
    groups: tuple[LoraGroup, ...] = ()
    layers: tuple[int, ...] = ()  # only maps of these layers, from 0; empty: all
    # maps to leave out, as targets names them, or of one layer: layers.0.self_attn.q_proj
    exclude: tuple[str, ...] = ()
    # weights that are trained whole beside it (modules_to_save): patterns, such as embedding.*, or
    # PEFT's names of modules, such as embed_tokens and lm_head
    whole: tuple[str, ...] = ()
    # token ids whose rows of the embedding, and of a tied head, are trained beside it
    # (trainable_token_indices); all others stay as they are
    tokens: tuple[int, ...] = ()
    head_tokens: tuple[int, ...] = ()  # the same of a head that is not tied
    dora: bool = False  # use DoRA: the norm of each column is trained by itself
    init: Literal["peft", "normal"] = "peft"  # of the first matrix: uniform, or normal of 0.02
    path: str | None = None  # the folder of a PEFT adapter to start from: the rest is as it says

    free: ClassVar[tuple[str, ...]] = ("path", "dropout", "init")
    peft_type: ClassVar[str] = "LORA"
    peft_parts: ClassVar[Mapping[str, str]] = {
        "down": "lora_A",
        "up": "lora_B",
        "magnitude": "lora_magnitude_vector",
    }
    peft_keys: ClassVar[tuple[str, ...]] = (
        *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights"),
        *("layers_pattern", "megatron_core", "qalora_group_size", "eva_config"),
        *("rank_pattern", "alpha_pattern", "layers_to_transform", TOKENS),
    )

    def __post_init__(self):
        wrong = []
        if self.rank < 1:
            wrong.append(f"rank is {self.rank}; it must be 1 or more")
        if self.alpha is not None and self.alpha <= 0:
            wrong.append(f"alpha is {self.alpha}; it must be above 0")
        if not 0 <= self.dropout < 1:
            wrong.append(f"dropout is {self.dropout}; it is a share, 0 or more and below 1")
        if not self.targets:
            wrong.append("targets is empty; it must choose a linear map")
        if min(self.layers, default=0) < 0:
            wrong.append(f"layers is {[*self.layers]}; it is a list of numbers, 0 or more")
        for key in ("tokens", "head_tokens"):
            ids = getattr(self, key)
            if min(ids, default=0) < 0 or len({*ids}) < len(ids):
                what = "it is a list of token ids, 0 or more, each of them once"
                wrong.append(f"{key} is {[*ids]}; {what}")
        if wrong:
            raise ValueError(*wrong)

    @property
    def scale(self) -> float:
        """Scale of the product of the two matrices: alpha / rank, or alpha / sqrt(rank)."""
        return self._scale(self.rank, self._alpha)

    @property
    def _alpha(self) -> float:
        return 2.0 * self.rank if self.alpha is None else self.alpha

    def _scale(self, rank: int, alpha: float) -> float:
        return alpha / (math.sqrt(rank) if self.scaling == "rslora" else rank)

    @property
    def is_even(self) -> bool:
        """Test that every map has the same rank and scale in every layer."""
        return not (self.groups or self.layers or self.exclude)

    def rank_of(self, called: Sequence[str]) -> int:
        if self._is_left_out(called):
            return 0
        own = (one.rank for one in self.groups if one.rank is not None and _is_called(one, called))
        return next(own, self.rank)

    def _settings(self, called: Sequence[str]) -> tuple[int, float]:
        """Rank and alpha of a map of a layer, by its names."""
        every = (one for one in self.groups if _is_called(one, called))
        alphas = (one.alpha for one in every if one.alpha is not None)
        return self.rank_of(called), next(alphas, self._alpha)

    def scale_of(self, called: Sequence[str]) -> float:
        """Scale of a map of a layer, by its names."""
        rank, alpha = self._settings(called)
        return self._scale(rank or 1, alpha)

    def _is_left_out(self, called: Sequence[str]) -> bool:
        numbers = [int(word) for one in called for word in one.split(".") if word.isdigit()]
        if self.layers and not {*numbers} & {*self.layers}:
            return True
        without = [re.sub(r"\.\d+\.", ".", one) for one in called]
        ends = [one[i:] for one in called for i in _starts(one)]
        every = [*ends, *(one[i:] for one in without for i in _starts(one))]
        return any(first_match(one, self.exclude) is not None for one in every)

    def adapt(self, model: Model, *, names: Mapping[str, str], key: PRNGKeyArray) -> Model:
        self._check_experts(model, names)
        return self._with_tokens(self._with_products(model, names, key))

    def _with_tokens(self, model: Model) -> Model:
        """The model with rows of their own for the tokens that are trained."""
        for key, field in (("tokens", "embedding"), ("head_tokens", "output")):
            if not (ids := getattr(self, key)):
                continue
            table = getattr(model, field, None)
            if not isinstance(table, TokenTable):
                why = "the head is the embedding (tied), whose rows are adapter.tokens"
                why = why if key == "head_tokens" else "this model has no embedding of tokens"
                raise UserError(f"adapter.{key} is {[*ids]}; {why}")
            if table.tuned is not None:
                raise UserError(f"adapter.{key} is {[*ids]}; another adapter has trained rows too")
            if (most := max(ids)) >= (vocab := len(table.weight)):
                raise UserError(
                    f"adapter.{key} has {most}; the ids of this model are 0 to {vocab - 1}, and a "
                    "larger model.vocab adds some"
                )
            model = eqx.tree_at(lambda x, f=field: getattr(x, f), model, table.with_rows(ids))
        return model

    def _with_products(self, model: Model, names: Mapping[str, str], key: PRNGKeyArray) -> Model:
        def maker(rank: int) -> Callable[..., Lora]:
            return lambda base, stack, key: Lora(base, self, stack, rank, key=key)

        if self.is_even:
            return replaced(model, self.targets, maker(self.rank), names=names, key=key)
        places = sites(model, chosen(model, self.targets, names), names)
        self._refuse(places)
        ranks: dict[str, int] = {}
        for site in (one for each in places.values() for one in each):
            ranks[site.name] = max(ranks.get(site.name, 0), self.rank_of(site.called))
        for rank in sorted({*ranks.values()} - {0}):
            maps = [one for one, its in ranks.items() if its == rank]
            model = replaced(model, maps, maker(rank), names=names, key=key)
        adapted = {path: one for path, one in places.items() if ranks[one[0].name]}
        return self._scaled(model, adapted)

    def _check_experts(self, model: Any, names: Mapping[str, str]) -> None:
        """Refuse what PEFT has for no parameters of experts, which are no linear layers there."""
        targets, experts = chosen(model, self.targets, names), in_experts(model)
        others = [one for one in targets if one not in experts]
        places = sites(model, [one for one in targets if one in experts], names)
        own = {self._settings(site.called) for each in places.values() for site in each}
        keys = ["dropout"] * bool(self.dropout) + ["dora"] * self.dora
        if own != {(self.rank, self._alpha)}:
            keys += [key for key in ("groups", "layers", "exclude") if getattr(self, key)]
        if keys and any(rank for rank, _ in own):
            wrong = listing([f"adapter.{key}" for key in keys], "and")
            raise UserError(
                f"{wrong} cannot be had on experts, which PEFT adapts by target_parameters; "
                f"adapter.targets: [{', '.join(others)}] leaves experts out"
                f"{', and adapter.dropout=0 adapts them' * (keys == ['dropout'])}"
            )

    def _scaled(self, model: Model, places: dict[str, list[Site]]) -> Model:
        """The model with the scale of each map of each layer, along its rank."""

        def visit(path, node):
            if (own := places.get(jax.tree_util.keystr(path))) is None:
                return node
            shape = node.factors.shape
            rows = [self._factors(site.called, shape[-1]) for site in own]
            factors = jnp.asarray(np.reshape(rows, shape), jnp.float32)
            return eqx.tree_at(lambda one: one.factors, node, factors)

        is_map = lambda node: isinstance(node, LinearMap)  # noqa: E731
        return jax.tree_util.tree_map_with_path(visit, model, is_leaf=is_map)

    def _factors(self, called: Sequence[str], widest: int) -> np.ndarray:
        return np.where(np.arange(widest) < self.rank_of(called), self.scale_of(called), 0.0)

    def _refuse(self, places: dict[str, list[Site]]) -> None:
        """Refuse groups, layers and exclusions that choose nothing."""
        every = [site for each in places.values() for site in each]
        if not any(self.rank_of(site.called) for site in every):
            raise UserError("adapter.exclude and adapter.layers leave no linear map to adapt")
        layers = {site.layer for site in every if site.layer is not None}
        if strange := sorted({*self.layers} - layers):
            raise UserError(
                f"adapter.layers has {', '.join(map(str, strange))}; the layers of the model are "
                f"0 to {max(layers, default=0)}"
            )
        for group in self.groups:
            if not any(_is_called(group, site.called) for site in every):
                some = listing([one.called[-1] for one in every[:3]], "and")
                raise UserError(
                    f"adapter.groups: {group.match} matches the end of no linear map that is "
                    f"adapted; there are {some}, for instance"
                )

    def to_peft(self, places: Sequence[Site]) -> dict[str, Any]:
        ranks = {one.match: one.rank for one in self.groups if one.rank is not None}
        alphas = {one.match: one.alpha for one in self.groups if one.alpha is not None}
        # Names of ours are nobody else's: then each map of each layer is written out.
        elsewhere = [site for site in places if self.rank_of(site.called)]
        if any(self._settings(one.called) != self._settings(one.called[1:]) for one in elsewhere):
            ranks = {re.escape(x.called[-1]): self.rank_of(x.called) for x in elsewhere}
            alphas = {re.escape(x.called[-1]): self._settings(x.called)[1] for x in elsewhere}
        return {
            "r": self.rank,
            "lora_alpha": _whole(self._alpha),
            "rank_pattern": ranks,
            "alpha_pattern": {match: _whole(alpha) for match, alpha in alphas.items()},
            "layers_to_transform": [*self.layers] or None,
            **self._tokens_to_peft(),
            "lora_dropout": self.dropout,
            "use_rslora": self.scaling == "rslora",
            "use_dora": self.dora,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": "gaussian" if self.init == "normal" else True,
        }

    def _tokens_to_peft(self) -> dict[str, Any]:
        every = {there: [*getattr(self, key)] for there, key in TABLES.items()}
        own = {there: ids for there, ids in every.items() if ids}
        return {TOKENS: own} if own else {}

    @classmethod
    def from_peft(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        problems = []
        if (begun := config.get("init_lora_weights")) not in BEGINNINGS:
            what = "it changes the weights of the model too, which are not here"
            problems.append(("init_lora_weights", f"is {show(begun)}; {what}"))
        if not isinstance(config.get("r"), int):
            problems.append(("r", f"is {show(config.get('r'))}; it must be a whole number"))
        numbers = {"lora_alpha": 8.0, "lora_dropout": 0.0}
        for key in numbers:
            value = config.get(key, numbers[key])
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers[key] = float(value)
            else:
                problems.append((key, f"is {show(value)}; it must be a number"))
        groups = [*_groups(config, "rank_pattern", problems)]
        groups += _groups(config, "alpha_pattern", problems)
        settings = {
            "rank": config.get("r"),
            "alpha": numbers["lora_alpha"],
            "scaling": "rslora" if config.get("use_rslora") else "plain",
            "dropout": numbers["lora_dropout"],
            "dora": bool(config.get("use_dora")),
            **({"groups": groups} if groups else {}),
            **_tokens(config, problems),
        }
        return settings, problems

    def vllm_flags(self) -> str | None:
        # The least room that vLLM offers which is enough.
        widest = max([self.rank, *(one.rank or 0 for one in self.groups)])
        room = next((size for size in RANKS if size >= widest), RANKS[-1])
        is_alone = not (self.dora or self.tokens or self.head_tokens)
        return None if not is_alone else f"--enable-lora --max-lora-rank {room}"


class Lora(Adapted):
    """A linear map, and beside it a product of low rank."""

    base: LinearMap
    down: Linear
    up: Linear
    magnitude: Float[Array, "..."] | None  # of DoRA: the norm of each column
    dropout: Dropout
    # Where layers differ, the scale along the rank: 0 beyond that of the layer, whose weights there
    # have no effect and no gradient. None: `scale` is that of all.
    factors: Float[Array, " rank"] | None
    scale: float = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[tuple[str, ...]] = ("factors",)
    trains: ClassVar[tuple[str, ...]] = ("down", "up", "magnitude")

    def __init__(
        self,
        base: LinearMap,
        config: Adapter,
        stack: tuple[int, ...],
        rank: int,
        *,
        key: PRNGKeyArray,
    ):
        reads, writes = " ".join(base.reads), " ".join(base.writes)
        sizes = base.sizes | {"rank": rank}
        self.base = base
        self.down = Linear(reads, "rank", sizes, initializer=INITIALIZERS[config.init], key=key)
        self.up = Linear("rank", writes, sizes, initializer=zeros, key=key)
        self.dropout = Dropout(config.dropout, stack)
        self.scale = config.scale if config.is_even else 1.0
        self.factors = None if config.is_even else jnp.zeros(rank)
        self.magnitude = self._norms(_float32(base.merged())) if config.dora else None

    @property
    def reads(self) -> tuple[str, ...]:
        return self.base.reads

    @property
    def writes(self) -> tuple[str, ...]:
        return self.base.writes

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"magnitude": self.writes, "factors": ("rank",)}

    def merged(self) -> Linear:
        base, weight = self.base.merged(), self._sum()
        if self.magnitude is not None:
            weight = weight * self._ratio(self._norms(weight))
        return eqx.tree_at(lambda one: one.weight, base, weight)

    @property
    def low_rank(self) -> LowRank | None:
        if self.magnitude is not None or self.dropout.key is not None:
            return None
        down = eqx.tree_at(lambda one: one.weight, self.down, self._scaled_down())
        return LowRank(self.base, down, self.up)

    def _scaled_down(self) -> Float[Array, "... rank"]:
        down = self.down.weight
        return down * (self.scale if self.factors is None else self.factors.astype(down.dtype))

    def _scaled_up(self, up: Float[Array, "rank ..."]) -> Float[Array, "rank ..."]:
        if self.factors is None:
            return up * self.scale
        return up * self.factors.astype(up.dtype).reshape(-1, *[1] * (up.ndim - 1))

    def _ratio(self, norms: Float[Array, "..."]) -> Float[Array, "..."]:
        """Trained norms of DoRA over those of the sum; 1 in a layer that is left out."""
        assert self.magnitude is not None
        ratio = self.magnitude / norms
        return ratio if self.factors is None else jnp.where(self.factors[0] > 0, ratio, 1.0)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self._beside(self.base, x)

    def product(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self._beside(self.base.product, x)

    def _beside(self, base: Callable, x: Float[Array, "..."]) -> Float[Array, "..."]:
        leading = ("batch", "seq", "")[: x.ndim - len(self.reads)]
        dropped = self.dropout(x, leading + self.reads)
        inner = self.down(dropped)
        if self.factors is None:
            added = self.up(inner) * self.scale
        else:
            added = self.up(inner * self.factors.astype(inner.dtype))
        if self.magnitude is None:
            return base(x) + added
        # As PEFT: the norms are constants to the gradient, and the bias is not scaled.
        norms = jax.lax.stop_gradient(self._norms(self._sum()))
        ratio = gathered(self._ratio(norms), self.writes).astype(x.dtype)
        return base(x) + (ratio - 1) * self.base.product(dropped) + ratio * added

    def _sum(self) -> Float[Array, "..."]:
        base, down, up = map(_float32, (self.base.merged(), self.down, self.up))
        return base + jnp.tensordot(down, self._scaled_up(up), axes=1)

    def _norms(self, weight: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.sqrt(jnp.sum(weight**2, axis=tuple(range(len(self.reads)))))


def _groups(
    config: Mapping[str, Any], key: str, problems: list[Problem]
) -> Iterator[dict[str, Any]]:
    """The groups of a pattern of PEFT's, in which the first match counts too."""
    pattern, field = config.get(key) or {}, key.removesuffix("_pattern")
    numbers = int if field == "rank" else (int, float)
    if not isinstance(pattern, Mapping) or not all(
        isinstance(x, numbers) and not isinstance(x, bool) for x in pattern.values()
    ):
        problems.append((key, f"is {show(pattern)}; it must be a mapping of names to numbers"))
        return
    for match, value in pattern.items():
        yield {"match": match, field: value if field == "rank" else float(value)}


def _tokens(config: Mapping[str, Any], problems: list[Problem]) -> dict[str, list[int]]:
    """Rows that are trained, of a list for the embedding or of lists by the names of modules."""
    given = config.get(TOKENS) or {}
    tables = given if isinstance(given, Mapping) else {"embed_tokens": given}
    found = {TABLES.get(module.rpartition(".")[2]): ids for module, ids in tables.items()}
    if None in found or not all(
        isinstance(ids, list) and all(type(x) is int for x in ids) for ids in found.values()
    ):
        what = "it must be a list of token ids, or such lists of embed_tokens and lm_head"
        problems.append((TOKENS, f"is {show(given)}; {what}"))
        return {}
    return {key: ids for key, ids in found.items() if key is not None}


def _is_called(group: LoraGroup, called: Sequence[str]) -> bool:
    return any(re.match(rf"(.*\.)?({group.match})$", one) for one in called)


def _starts(name: str) -> list[int]:
    """Places where a word of a name begins."""
    return [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]


def _whole(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _float32(linear: Linear) -> Float[Array, "..."]:
    return linear.weight.astype(jnp.float32)
