"""LoRA: to each linear map the product of two thin ones is added, and only these are trained."""

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.adapters import Adapted, chosen, depth
from windlass.config import section
from windlass.devices.axes import gathered
from windlass.layers.dropout import Dropout, number
from windlass.layers.initializers import small, uniform, zeros
from windlass.layers.linear import Linear
from windlass.layers.names import name

Model = TypeVar("Model")
DRAWS = {"peft": uniform, "normal": small}  # of the first matrix, by `init`


@section
class Adapter:
    """Two thin matrices beside each linear map, as PEFT has them."""

    rank: int = 16  # the width between the two
    alpha: float | None = None  # what they add is times alpha / rank; null: alpha is 2 × rank
    scaling: Literal["plain", "rslora"] = "plain"  # rslora: times alpha / sqrt(rank)
    dropout: float = 0.0  # the share of the adapter's input that is zero, in training
    # patterns of linear maps, such as blocks.attention.*, or PEFT's names, such as q_proj
    targets: tuple[str, ...] = ("*",)
    dora: bool = False  # the length of what each output reads is learned by itself
    init: Literal["peft", "normal"] = "peft"  # of the first matrix: uniform, or normal of 0.02
    path: str | None = None  # the folder of a PEFT adapter to start from: the rest is as it says

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
        """What the product of the two matrices is multiplied with."""
        alpha = 2 * self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.scaling == "rslora" else self.rank)

    def adapt(self, model: Model, *, names: Mapping[str, str], key: PRNGKeyArray) -> Model:
        targets = chosen(model, self.targets, names)

        def visit(path, node):
            if not isinstance(node, Linear) or name(path) not in targets:
                return node
            return self._around(node, jax.random.fold_in(key, number(path)))

        return jax.tree_util.tree_map_with_path(
            visit, model, is_leaf=lambda node: isinstance(node, Linear)
        )

    def _around(self, base: Linear, key: PRNGKeyArray) -> "Lora":
        stack = base.weight.shape[: depth(base)]

        def make(base, key):
            return Lora(base, self, stack, key=key)

        for _ in stack:
            make = eqx.filter_vmap(make)
        return make(base, jax.random.split(key, stack) if stack else key)


class Lora(Adapted):
    """A linear map, and a detour from what it reads over a few numbers to what it writes."""

    base: Linear
    down: Linear
    up: Linear
    magnitude: Float[Array, "..."] | None  # of DoRA: the length of what each output reads
    dropout: Dropout
    scale: float = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ()

    def __init__(self, base: Linear, config: Adapter, stack: tuple[int, ...], *, key: PRNGKeyArray):
        reads, writes = " ".join(base.reads), " ".join(base.writes)
        sizes = dict(zip(base.axes["weight"], base.weight.shape, strict=True))
        sizes |= {"rank": config.rank}
        self.base = base
        self.down = Linear(reads, "rank", sizes, draw=DRAWS[config.init], key=key)
        self.up = Linear("rank", writes, sizes, draw=zeros, key=key)
        self.dropout, self.scale = Dropout(config.dropout, stack), config.scale
        self.magnitude = self._lengths(base.weight.astype(jnp.float32)) if config.dora else None

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"magnitude": self.base.writes}

    @property
    def weight(self) -> Float[Array, "..."]:
        """The matrix of the one map that computes the same, in float32."""
        whole = self._sum()
        return whole if self.magnitude is None else whole * (self.magnitude / self._lengths(whole))

    def merged(self) -> Linear:
        return eqx.tree_at(lambda one: one.weight, self.base, self.weight)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        leading = ("batch", "seq", "")[: x.ndim - len(self.base.reads)]
        dropped = self.dropout(x, leading + self.base.reads)
        added = self.up(self.down(dropped)) * self.scale
        if self.magnitude is None:
            return self.base(x) + added
        # As PEFT: the lengths are constants to the gradient, and the bias is not made longer.
        lengths = jax.lax.stop_gradient(self._lengths(self._sum()))
        ratio = gathered(self.magnitude / lengths, self.base.writes).astype(x.dtype)
        return self.base(x) + (ratio - 1) * self.base.product(dropped) + ratio * added

    def _sum(self) -> Float[Array, "..."]:
        base, down, up = (
            part.weight.astype(jnp.float32) for part in (self.base, self.down, self.up)
        )
        return base + self.scale * jnp.tensordot(down, up, axes=1)

    def _lengths(self, weight: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.sqrt(jnp.sum(weight**2, axis=tuple(range(len(self.base.reads)))))
