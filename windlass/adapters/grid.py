"""Grids that llama.cpp loads: training with exactly the numbers that a GGUF file will hold.

Ŵ = d c with codes c and scales d as `windlass.quantization.blocks` has them; the gradient reaches
the float32 weights as if they had not been rounded (straight-through estimator).
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, TypeVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, PRNGKeyArray

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
from windlass.quantization.blocks import FORMATS, BlockFormat
from windlass.quantization.clip import best_scales
from windlass.quantization.groups import grouped, scale_axes, ungrouped

Model = TypeVar("Model")


@section
class Adapter(BaseAdapter):
    """Quantisation-aware training on a grid of GGUF: Q4_0, MXFP4 or TQ2_0."""

    format: Literal["q4_0", "mxfp4", "tq2_0"] = "q4_0"  # 4.5, 4.25 or 2.06 bits a weight
    # of a group: max follows from its largest weight as in llama.cpp, learned starts at the least
    # squared error and is trained; null: learned for tq2_0, max for the others
    scale: Literal["max", "learned"] | None = None
    trains: TrainsOfRounded = "weights"  # weights and learned scales, scales alone, or none
    # patterns of linear maps, such as blocks.mlp.*, or Hugging Face names, such as down_proj
    targets: tuple[str, ...] = ("*",)

    free: ClassVar[tuple[str, ...]] = ("trains",)

    def __post_init__(self):
        wrong = []
        if self.scale == "learned" and self.blocks.levels is None:
            wrong.append(f"scale is learned; of {self.format} it is a power of two: use max")
        if self.trains == "scales" and not self.learns_scale:
            wrong.append("trains is scales, which scale: max does not learn; use scale: learned")
        if not self.targets:
            wrong.append("targets is empty; it must choose a linear map")
        if wrong:
            raise ValueError(*wrong)

    @property
    def blocks(self) -> BlockFormat:
        return FORMATS[self.format]

    @property
    def learns_scale(self) -> bool:
        return (self.scale or ("learned" if self.format == "tq2_0" else "max")) == "learned"

    @property
    def gguf(self) -> str:
        """The GGML type that holds its maps exactly."""
        return self.blocks.gguf

    def adapt(self, model: Model, *, names: Mapping[str, str], key: PRNGKeyArray) -> Model:
        def make(base: LinearMap, stack: tuple[int, ...], key: PRNGKeyArray) -> Grid:
            return Grid(base, self)

        refuse_cut(model, self.targets, names, self.blocks.size, self.format)
        return replaced(model, self.targets, make, names=names, key=key)

    def fit(self, weight: np.ndarray, reads: int) -> dict[str, np.ndarray]:
        """The matrix itself, and learned scales at their least squared error, in float16."""
        levels = self.blocks.levels
        if not self.learns_scale or levels is None:
            return {"latent": weight}
        outputs = weight.shape[reads:]
        blocks = weight.reshape(-1, self.blocks.size, *outputs)
        rows = np.moveaxis(blocks, 1, -1).reshape(-1, self.blocks.size)
        found = (
            best_scales(rows, levels, signed=levels.low + levels.high < 0)
            .astype(np.float16)
            .astype(np.float32)
        )
        return {"latent": weight, "scale": found.reshape(-1, *outputs)}


class Grid(RoundedMap):
    """A linear map on a grid of GGUF."""

    format: str = eqx.field(static=True)

    def __init__(self, base: LinearMap, config: Adapter):
        plain = base.merged()
        self.latent, self.bias = plain.weight.astype(jnp.float32), plain.bias
        self.reads, self.writes, self.base = plain.reads, plain.writes, None
        self.trains, self.format = trained_fields(config.trains), config.format
        self.scale = self.blocks.quantize(self._grouped())[1][:, 0] if config.learns_scale else None

    @property
    def scale_axes(self) -> tuple[str, ...]:
        return scale_axes(self.reads, self.writes)

    @property
    def blocks(self) -> BlockFormat:
        return FORMATS[self.format]

    @property
    def bits_per_weight(self) -> float:
        return self.blocks.bits_per_weight

    def dequantized(self) -> Float[Array, "..."]:
        blocks, scale = self._grouped(), self.scale
        if scale is None:
            found = self.blocks.rounded(blocks)
        else:
            found = self.blocks.scaled(blocks, scale[:, None])
        return ungrouped(found, self.reads, self.writes, self.latent.shape)

    def coded(self) -> tuple[Int8[Array, "..."], Float[Array, "groups ..."]]:
        """Codes, of the shape of the matrix, and the scales of its groups: Ŵ = d c.

        For whoever writes them as they are: of learned scales the quantiser of a file knows none.
        """
        scale = None if self.scale is None else self.scale[:, None]
        codes, scales = self.blocks.coded(self._grouped(), scale)
        whole = ungrouped(codes, self.reads, self.writes, self.latent.shape)
        return whole.astype(jnp.int8), scales[:, 0]

    def _grouped(self) -> Float[Array, "groups size ..."]:
        return grouped(self.latent, self.reads, self.writes, self.blocks.size)
