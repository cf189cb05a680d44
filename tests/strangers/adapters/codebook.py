"""A look-up-table quantiser: each weight is a code of four bits into a table of its output group.

W[i, o] = T[g(o), c[i, o]]. The matrix itself is dropped: codes and tables stand for it.
"""

import math
from collections.abc import Mapping
from typing import ClassVar, TypeVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, UInt8

from windlass.adapters import Adapted, BaseAdapter, replaced
from windlass.config import section
from windlass.devices.axes import gathered
from windlass.layers.linear import Linear, LinearMap

Model = TypeVar("Model")
LEVELS = 16


@section
class Adapter(BaseAdapter):
    """Codes of four bits and a table for each group of outputs, in place of a matrix."""

    group: int = 4  # outputs that share a table
    targets: tuple[str, ...] = ("*",)
    trained: bool = False  # the tables are trained, the codes never

    exports: ClassVar = "own"

    def adapt(self, model: Model, *, names: Mapping[str, str], key: PRNGKeyArray) -> Model:
        def make(base: LinearMap, stack: tuple[int, ...], key: PRNGKeyArray) -> Codebook:
            return Codebook(base, self)

        return replaced(model, self.targets, make, names=names, key=key)

    def fit(self, weight: np.ndarray, reads: int) -> dict[str, np.ndarray]:
        outputs = math.prod(weight.shape[reads:])
        grouped = weight.reshape(-1, outputs // self.group, self.group)
        largest = np.abs(grouped).max((0, 2))[:, None]
        codes = np.round((grouped / largest + 1) * (LEVELS - 1) / 2).astype(np.uint8)
        table = largest * np.linspace(-1, 1, LEVELS, dtype=np.float32)
        return {"codes": codes.reshape(weight.shape), "table": table}


class Codebook(Adapted):
    codes: UInt8[Array, "..."]
    table: Float[Array, "groups levels"]
    bias: Float[Array, "..."] | None
    reads: tuple[str, ...] = eqx.field(static=True)
    writes: tuple[str, ...] = eqx.field(static=True)
    trains: tuple[str, ...] = eqx.field(static=True)
    base: None = None
    matrices: ClassVar[tuple[str, ...]] = ("table",)
    fixed: ClassVar[tuple[str, ...]] = ("codes",)

    def __init__(self, base: LinearMap, config: Adapter):
        plain = base.merged()
        shape = plain.weight.shape
        self.reads, self.writes, self.bias = plain.reads, plain.writes, plain.bias
        self.trains = ("table", "bias") if config.trained else ()
        groups = math.prod(shape[len(self.reads) :]) // config.group
        self.codes, self.table = jnp.zeros(shape, jnp.uint8), jnp.zeros((groups, LEVELS))

    @property
    def code_bits(self) -> dict[str, int]:
        return {"codes": 4}

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {
            "codes": self.reads + self.writes,
            "table": ("groups", "levels"),
            "bias": self.writes,
        }

    def merged(self) -> Linear:
        groups, shape = len(self.table), self.codes.shape
        outputs = math.prod(shape[len(self.reads) :])
        codes = gathered(self.codes, ("",) * len(shape)).reshape(-1, groups, outputs // groups)
        table = gathered(self.table, self.axes["table"])
        # A comparison and no look-up: as a product it has a gradient without scattered sums.
        chosen = codes[..., None] == jnp.arange(LEVELS, dtype=jnp.uint8)
        weight = jnp.einsum("igml,gl->igm", chosen.astype(table.dtype), table)
        return Linear.of(self.reads, self.writes, weight.reshape(shape), self.bias)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.merged()(x)

    def product(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.merged().product(x)
