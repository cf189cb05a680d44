"""LoRA: beside each linear map the product of two of low rank, and only these are trained.

y = x W + s (x A) B, with s = α / r, or α / √r in rsLoRA. DoRA trains the norm of each column of
W + s A B by itself: y = x (W + s A B) m / ‖W + s A B‖.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.adapters import Adapted, Peft, replaced
from windlass.config import Problem, section
from windlass.config.reading import show
from windlass.devices.axes import gathered
from windlass.layers.dropout import Dropout
from windlass.layers.initializers import small, uniform, zeros
from windlass.layers.linear import Linear, LinearMap, LowRank

Model = TypeVar("Model")
INITIALIZERS = {"peft": uniform, "normal": small}  # of the first matrix, by `init`

# How an adapter of PEFT's may have begun; the others change the weights it is added to as well.
BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


@section
class Adapter(Peft):
    """LoRA: two matrices of low rank beside each linear map, as PEFT has them."""

    rank: int = 16  # of the product of the two (r)
    alpha: float | None = None  # the product is scaled by alpha / rank; null: alpha is 2 × rank
    scaling: Literal["plain", "rslora"] = "plain"  # rslora: by alpha / sqrt(rank)
    dropout: float = 0.0  # on the adapter's input, in training
    # patterns of linear maps, such as blocks.attention.*, or PEFT's names, such as q_proj
    targets: tuple[str, ...] = ("*",)
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
        if wrong:
            raise ValueError(*wrong)

    @property
    def scale(self) -> float:
        """Scale of the product of the two matrices: alpha / rank, or alpha / sqrt(rank)."""
        alpha = 2 * self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.scaling == "rslora" else self.rank)

    def adapt(self, model: Model, *, names: Mapping[str, str], key: PRNGKeyArray) -> Model:
        def make(base: LinearMap, stack: tuple[int, ...], key: PRNGKeyArray) -> Lora:
            return Lora(base, self, stack, key=key)

        return replaced(model, self.targets, make, names=names, key=key)

    def to_peft(self) -> dict[str, Any]:
        alpha = 2 * self.rank if self.alpha is None else self.alpha
        return {
            "r": self.rank,
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.scaling == "rslora",
            "use_dora": self.dora,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": "gaussian" if self.init == "normal" else True,
        }

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
        settings = {
            "rank": config.get("r"),
            "alpha": numbers["lora_alpha"],
            "scaling": "rslora" if config.get("use_rslora") else "plain",
            "dropout": numbers["lora_dropout"],
            "dora": bool(config.get("use_dora")),
        }
        return settings, problems

    def vllm_flags(self) -> str | None:
        # The least room that vLLM offers which is enough.
        room = next((size for size in RANKS if size >= self.rank), RANKS[-1])
        return None if self.dora else f"--enable-lora --max-lora-rank {room}"


class Lora(Adapted):
    """A linear map, and beside it a product of low rank."""

    base: LinearMap
    down: Linear
    up: Linear
    magnitude: Float[Array, "..."] | None  # of DoRA: the norm of each column
    dropout: Dropout
    scale: float = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ()
    trains: ClassVar[tuple[str, ...]] = ("down", "up", "magnitude")

    def __init__(
        self, base: LinearMap, config: Adapter, stack: tuple[int, ...], *, key: PRNGKeyArray
    ):
        reads, writes = " ".join(base.reads), " ".join(base.writes)
        sizes = base.sizes | {"rank": config.rank}
        self.base = base
        self.down = Linear(reads, "rank", sizes, initializer=INITIALIZERS[config.init], key=key)
        self.up = Linear("rank", writes, sizes, initializer=zeros, key=key)
        self.dropout, self.scale = Dropout(config.dropout, stack), config.scale
        self.magnitude = self._norms(_float32(base.merged())) if config.dora else None

    @property
    def reads(self) -> tuple[str, ...]:
        return self.base.reads

    @property
    def writes(self) -> tuple[str, ...]:
        return self.base.writes

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"magnitude": self.writes}

    def merged(self) -> Linear:
        base, weight = self.base.merged(), self._sum()
        if self.magnitude is not None:
            weight = weight * (self.magnitude / self._norms(weight))
        return eqx.tree_at(lambda one: one.weight, base, weight)

    @property
    def low_rank(self) -> LowRank | None:
        if self.magnitude is not None or self.dropout.key is not None:
            return None
        down = eqx.tree_at(lambda one: one.weight, self.down, self.down.weight * self.scale)
        return LowRank(self.base, down, self.up)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self._beside(self.base, x)

    def product(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self._beside(self.base.product, x)

    def _beside(self, base: Callable, x: Float[Array, "..."]) -> Float[Array, "..."]:
        leading = ("batch", "seq", "")[: x.ndim - len(self.reads)]
        dropped = self.dropout(x, leading + self.reads)
        added = self.up(self.down(dropped)) * self.scale
        if self.magnitude is None:
            return base(x) + added
        # As PEFT: the norms are constants to the gradient, and the bias is not scaled.
        norms = jax.lax.stop_gradient(self._norms(self._sum()))
        ratio = gathered(self.magnitude / norms, self.writes).astype(x.dtype)
        return base(x) + (ratio - 1) * self.base.product(dropped) + ratio * added

    def _sum(self) -> Float[Array, "..."]:
        base, down, up = map(_float32, (self.base.merged(), self.down, self.up))
        return base + self.scale * jnp.tensordot(down, up, axes=1)

    def _norms(self, weight: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.sqrt(jnp.sum(weight**2, axis=tuple(range(len(self.reads)))))


def _float32(linear: Linear) -> Float[Array, "..."]:
    return linear.weight.astype(jnp.float32)
