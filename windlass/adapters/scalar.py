"""Quantisation-aware training with a learned scale: each weight is one of a few levels of it.

Ŵ = s (c + z) as `windlass.quantization.levels` has it. In the grid `balanced` the scale is
s = f max|W| / 2^(bits − 1) with f = softplus(p) + 1e−8, p learned and the maximum a constant; in
the others it is learned itself, its gradient multiplied by 1 / sqrt(n high) for n weights (LSQ,
Esser et al. 2020).
"""

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.adapters import (
    BaseAdapter,
    RoundedMap,
    TrainsOfRounded,
    refuse_cut,
    replaced,
    trained_fields,
)
from windlass.config import section
from windlass.layers.linear import LinearMap
from windlass.quantization.clip import best_scales
from windlass.quantization.groups import grouped, scale_axes, ungrouped
from windlass.quantization.levels import Levels, quantized

Model = TypeVar("Model")

LEAST_FACTOR = 1e-8  # of the maximum
LEAST_SCALE = 1e-8
SCALE_BITS = 16  # of a scale that is stored


@section
class Adapter(BaseAdapter):
    """Quantisation-aware training with learned scales: LSQ, stretched or balanced levels."""

    bits: Literal[2, 3, 4, "ternary"] = 4  # of a weight; ternary: three levels
    # lsq: whole numbers; stretched: levels in the middle of cells of one width, as ParetoQ's, at 2
    # bits ±0.5 and ±1.5; balanced: the same, the scale learned as a share of the largest weight;
    # null: lsq at 3 and 4 bits, stretched at 2 and ternary
    grid: Literal["lsq", "stretched", "balanced"] | None = None
    # scales: one a matrix, one an output, or one for so many consecutive inputs of each output
    granularity: Literal["tensor", "channel"] | int = "channel"
    trains: TrainsOfRounded = "weights"  # weights and scales, scales alone, or none
    # patterns of linear maps, such as blocks.mlp.*, or Hugging Face names, such as down_proj
    targets: tuple[str, ...] = ("*",)

    free: ClassVar[tuple[str, ...]] = ("trains",)

    def __post_init__(self):
        wrong = []
        if self.grid == "balanced" and self.bits == "ternary":
            wrong.append("grid is balanced, which has no level at 0; bits: 2 is the least it has")
        if isinstance(self.granularity, int) and self.granularity < 2:
            wrong.append(f"granularity is {self.granularity}; a group has 2 inputs or more")
        if not self.targets:
            wrong.append("targets is empty; it must choose a linear map")
        if wrong:
            raise ValueError(*wrong)

    @property
    def chosen_grid(self) -> str:
        return self.grid or ("lsq" if self.bits in (3, 4) else "stretched")

    @property
    def levels(self) -> Levels:
        margin = 0.0 if self.chosen_grid == "lsq" else 0.5
        if self.bits == "ternary":
            return Levels(-1, 1, 0.0, margin)
        half = 2 ** (self.bits - 1)
        return Levels(-half, half - 1, margin, margin)

    def adapt(self, model: Model, *, names: Mapping[str, str], key: PRNGKeyArray) -> Model:
        def make(base: LinearMap, stack: tuple[int, ...], key: PRNGKeyArray) -> Scalar:
            return Scalar(base, self)

        if isinstance(self.granularity, int):
            refuse_cut(model, self.targets, names, self.granularity, "adapter.granularity")
        return replaced(model, self.targets, make, names=names, key=key)

    def fit(self, weight: np.ndarray, reads: int) -> dict[str, np.ndarray]:
        """The matrix itself, and scales at their least squared error."""
        inputs, outputs = math.prod(weight.shape[:reads]), weight.shape[reads:]
        if self.granularity == "tensor":
            rows, shape = weight.reshape(1, -1), (1,)
        else:
            size = inputs if self.granularity == "channel" else self.granularity
            rows = np.moveaxis(weight.reshape(-1, size, *outputs), 1, -1).reshape(-1, size)
            shape = outputs if self.granularity == "channel" else (-1, *outputs)
        scale = best_scales(rows, self.levels)
        if self.chosen_grid == "balanced":
            largest = np.maximum(np.abs(rows).max(1), LEAST_SCALE)
            factor = scale * (self.levels.high + 1) / largest - LEAST_FACTOR
            scale = np.log(np.expm1(np.maximum(factor, LEAST_FACTOR)))
        return {"latent": weight, "scale": scale.astype(np.float32).reshape(shape)}


class Scalar(RoundedMap):
    """A linear map of a few levels of learned scales."""

    levels: Levels = eqx.field(static=True)
    is_balanced: bool = eqx.field(static=True)
    granularity: str | int = eqx.field(static=True)

    def __init__(self, base: LinearMap, config: Adapter):
        plain = base.merged()
        self.latent, self.bias = plain.weight.astype(jnp.float32), plain.bias
        self.reads, self.writes, self.base = plain.reads, plain.writes, None
        self.trains, self.granularity = trained_fields(config.trains), config.granularity
        self.levels, self.is_balanced = config.levels, config.chosen_grid == "balanced"
        largest = self._largest(self._grouped()).squeeze(self._shared)
        # Until they are fitted the largest weight is the outermost level.
        start = jnp.zeros_like(largest) if self.is_balanced else largest / self.levels.largest
        self.scale = jnp.atleast_1d(start)

    @property
    def scale_axes(self) -> tuple[str, ...]:
        if self.granularity == "tensor":
            return ("",)
        return self.writes if self.granularity == "channel" else scale_axes(self.reads, self.writes)

    @property
    def bits_per_weight(self) -> float:
        assert self.scale is not None
        scales = SCALE_BITS * self.scale.size / self.latent.size
        return math.log2(self.levels.count) + scales

    def dequantized(self) -> Float[Array, "..."]:
        weight = self._grouped()
        scale = self._step(weight)
        weights = weight.size // scale.size
        gain = 1.0 if self.is_balanced else (weights * self.levels.high) ** -0.5
        found: Array = quantized(weight, scale, self.levels, gain)
        if not isinstance(self.granularity, int):
            return found
        return ungrouped(found, self.reads, self.writes, self.latent.shape)

    def _grouped(self) -> Float[Array, "..."]:
        """The weights, with axes of groups and of what is in them where scales are of groups."""
        if not isinstance(self.granularity, int):
            return self.latent
        return grouped(self.latent, self.reads, self.writes, self.granularity)

    @property
    def _shared(self) -> tuple[int, ...]:
        """Axes, of the weights as they are grouped, along which a scale is the same."""
        if isinstance(self.granularity, int):
            return (1,)
        read, axes = len(self.reads), len(self.reads + self.writes)
        return tuple(range(read if self.granularity == "channel" else axes))

    def _step(self, weight: Float[Array, "..."]) -> Float[Array, "..."]:
        """s, with an axis for each of the weight's."""
        assert self.scale is not None
        scale = self.scale[0] if self.granularity == "tensor" else self.scale
        scale = jnp.expand_dims(scale, self._shared)
        if not self.is_balanced:
            return jnp.maximum(jnp.abs(scale), LEAST_SCALE)
        largest = jax.lax.stop_gradient(self._largest(weight))
        return (jax.nn.softplus(scale) + LEAST_FACTOR) * largest / (self.levels.high + 1)

    def _largest(self, weight: Float[Array, "..."]) -> Float[Array, "..."]:
        """The largest magnitude of the weights that share a scale."""
        return jnp.max(jnp.abs(weight), axis=self._shared, keepdims=True)
