"""A look-up-table quantiser: indices into a small table, times scales of low rank.

W = Q ∘ S, where Q is the table's value at each index. With A [r, out], B [in, r] and gains g [r],
and with  the rows of A and B̂ the columns of B divided by their norms, the scales are

    ranks     S = B̂ diag(g) Â, so that x W = Σₖ gₖ aₖ ∘ ((bₖ ∘ x) Q)
    baked     S = B A, the gains multiplied into the factors
    product   S = max(B A, 1e-8)

Indices are frozen, and A, B and g are trained; the matrix itself is dropped. With straight-through
indices it is kept and trained instead: the nearest entries are chosen anew in each step, and the
gradient goes to the matrix as if nothing had been rounded.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, UInt8

from windlass.adapters import Adapted, BaseAdapter, replaced
from windlass.config import section
from windlass.devices.axes import gathered
from windlass.layers.linear import Linear, LinearMap
from windlass.quantization import scales as host
from windlass.quantization import tables
from windlass.quantization.four_bit import looked_up
from windlass.quantization.scales import LEAST, NOISE, Factors

Model = TypeVar("Model")
# Table size and rank of the maps of MLPs, and of those of attention.
PRESETS = {
    "q2a2": ((4, 32), (4, 32)),
    "q2a4": ((4, 32), (16, 8)),
    "q4a4": ((16, 4), (16, 4)),
    "q4a4_r32": ((16, 32), (16, 32)),
    "q4_r32": ((16, 32), (16, 32)),
}
HEADS = {"heads", "kv_heads"}  # axes by which a map is one of attention
LEVELS, RANK = 16, 32
MOST = 16  # values of a table: more of them are slow to select from
FLOOR = 1e-8  # of the scales of a product
FACTOR_BITS = 16  # of a factor once deployed


@section
class Adapter(BaseAdapter):
    """Indices into a small table, times scales of low rank, in place of a matrix."""

    # table size and rank by name, which differ between MLP and attention: see docs/quantization.md
    preset: Literal["q2a2", "q2a4", "q4a4", "q4a4_r32", "q4_r32"] | None = None
    levels: int | None = None  # values in the table, 4 for 2 bits; null: 16, or the preset's
    # rank of the scales, 0: a scale for each group and output; null: 32, or the preset's
    rank: int | None = None
    group: int = 32  # inputs whose largest magnitude is the scale that the run starts from
    # ranks: unit vectors and gains; baked: a product of factors; product: the same, above 1e-8
    scales: Literal["ranks", "baked", "product"] = "ranks"
    zero: bool = False  # a table with a zero, which evenly spaced values of even number lack
    # of factors and gains: their magnitude, or softplus; it costs accuracy at the start
    positive: Literal["none", "abs", "softplus"] = "none"
    half: bool = False  # compute with factors and weights rounded to fp16, as they are deployed
    codebook: int | None = None  # values that the factors may have, 64 or 256, frozen; null: any
    indices: Literal["frozen", "straight_through"] = "frozen"  # straight_through: weights train
    table: Literal["fixed", "learned"] = "fixed"
    trains: Literal["scales", "gains", "none"] = "scales"  # of what is left to be trained
    targets: tuple[str, ...] = ("*",)  # patterns of linear maps, such as blocks.mlp.*

    exports: ClassVar = "own"
    free: ClassVar[tuple[str, ...]] = ("half", "table", "trains")

    def __post_init__(self):
        wrong = []
        if self.preset is not None:
            given = [name for name in ("levels", "rank") if getattr(self, name) is not None]
            wrong += [
                f"{name} is {getattr(self, name)}, and preset {self.preset} sets it; leave one of "
                "them out"
                for name in given
            ]
        if self.levels is not None and not 2 <= self.levels <= MOST:
            wrong.append(f"levels is {self.levels}; a table has 2 to {MOST} values")
        if self.rank is not None and self.rank < 0:
            wrong.append(f"rank is {self.rank}; it must be 0 or more")
        if self.group < 1:
            wrong.append(f"group is {self.group}; it must be 1 or more")
        if self.codebook is not None and not 2 <= self.codebook <= 256:
            wrong.append(f"codebook is {self.codebook}; it can be 2 to 256, or null")
        if self.codebook is not None and not self._has_gains:
            wrong.append("codebook is of unit vectors, which scales ranks of rank 1 or more has")
        if self.codebook is not None and self.positive != "none":
            wrong.append(f"codebook is of factors as they are, and positive is {self.positive}")
        if self.trains == "gains" and not self._has_gains:
            wrong.append("trains is gains, which only scales ranks of rank 1 or more has")
        if not self.targets:
            wrong.append("targets is empty; it must choose a linear map")
        if wrong:
            raise ValueError(*wrong)

    @property
    def _has_gains(self) -> bool:
        return self.scales == "ranks" and self.rank != 0

    def at(self, linear: LinearMap) -> "Adapter":
        """The settings of one map, with nothing left to a preset."""
        levels, rank = self.levels, self.rank
        if self.preset is not None:
            mlp, attention = PRESETS[self.preset]
            is_attention = bool(HEADS & {*linear.reads, *linear.writes})
            levels, rank = attention if is_attention else mlp
        levels = LEVELS if levels is None else levels
        return replace(self, preset=None, levels=levels, rank=RANK if rank is None else rank)

    def adapt(self, model: Model, *, names: Mapping[str, str], key: PRNGKeyArray) -> Model:
        def make(base: LinearMap, stack: tuple[int, ...], key: PRNGKeyArray) -> Lookup:
            return Lookup(base, self.at(base))

        return replaced(model, self.targets, make, names=names, key=key)

    def fit(self, weight: np.ndarray, reads: int) -> dict[str, np.ndarray]:
        """Scales by the SVD of the largest magnitudes of groups, and the nearest indices."""
        assert self.levels is not None and self.rank is not None
        matrix = weight.reshape(math.prod(weight.shape[:reads]), -1)
        table = tables.even(self.levels, self.zero)
        if not self.rank:
            return self._of_groups(host.largest(matrix, self.group), table, weight, reads)
        return self._fields(host.factored(matrix, self.group, self.rank), table, weight, reads)

    def convert(self, there: Adapted, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        """Scales and table of another look-up table, and the nearest indices in these.

        A rank that is larger is filled up with noise, and a table that is smaller is the centres
        of a k-means of the other's entries, by how often they occur. With everything as it was this
        merges what else that run trained, such as LoRA, into the indices.
        """
        if not isinstance(there, Lookup) or there.in_scales is None or not self.rank:
            return None
        assert self.levels is not None
        table, factors = np.sort(there.table), there.factors()
        if len(table) < self.levels:
            return None
        if len(table) > self.levels:
            table = tables.kmeans(np.asarray(there.table), self.levels, there.counts())
        least = min(factors.gains[factors.gains > 0], default=0.0)
        factors = host.padded(factors, self.rank, gain=NOISE * float(least))
        return self._fields(factors, table, weight, len(there.reads))

    def _of_groups(
        self, scales: np.ndarray, table: np.ndarray, weight: np.ndarray, reads: int
    ) -> dict[str, np.ndarray]:
        """The fields with a scale for each group and output."""
        inputs = math.prod(weight.shape[:reads])
        floored = np.maximum(scales, FLOOR) if self.scales == "product" else scales
        matrix = host.spread(self._rounded(floored), inputs, self.group)
        raw = self._raw(scales).reshape(-1, *weight.shape[reads:])
        return {"out_scales": raw} | self._indexed(matrix, table, weight)

    def _fields(
        self, factors: Factors, table: np.ndarray, weight: np.ndarray, reads: int
    ) -> dict[str, np.ndarray]:
        """The fields with scales of low rank."""
        inputs, gains, outputs = factors
        if self.positive != "none":
            inputs, outputs = np.abs(inputs), np.abs(outputs)
        if self.codebook is not None:
            inputs, outputs = (_coded(x, self.codebook) for x in (inputs, outputs))
        if not self._has_gains:
            root = np.sqrt(gains)
            # Of a rank without gain one factor is zero: of two, neither had a gradient.
            outputs, inputs = outputs * root[:, None], inputs * np.where(root > 0, root, root.max())
            gains = np.ones_like(gains)
        matrix = self._rounded(inputs) @ self._rounded(outputs * gains[:, None])
        matrix = np.maximum(matrix, FLOOR) if self.scales == "product" else matrix
        shape = weight.shape
        fields = {
            "in_scales": self._raw(inputs).reshape(*shape[:reads], -1),
            "out_scales": self._raw(outputs).reshape(-1, *shape[reads:]),
        }
        fields |= {"gains": self._raw(gains)} if self._has_gains else {}
        return fields | self._indexed(matrix, table, weight)

    def _indexed(
        self, scales: np.ndarray, table: np.ndarray, weight: np.ndarray
    ) -> dict[str, np.ndarray]:
        if self.indices == "straight_through":
            return {"table": table, "latent": weight}
        ratio = weight.reshape(scales.shape) / np.where(scales == 0, 1, scales)
        return {"table": table, "indices": tables.nearest(ratio, table).reshape(weight.shape)}

    def _raw(self, values: np.ndarray) -> np.ndarray:
        """Parameters whose positive values these are."""
        if self.positive == "softplus":
            values = np.maximum(np.abs(values), FLOOR)
            return (values + np.log(-np.expm1(-values))).astype(np.float32)
        return values.astype(np.float32)

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        return values.astype(np.float16).astype(np.float32) if self.half else values


class Lookup(Adapted):
    """Indices into a table, and the factors of their scales."""

    indices: UInt8[Array, "..."] | None  # None: the nearest to `latent`
    latent: Float[Array, "..."] | None  # the matrix, where it is what is trained
    table: Float[Array, " levels"]
    in_scales: Float[Array, "..."] | None  # B; None: of each group
    out_scales: Float[Array, "..."]  # A
    gains: Float[Array, " rank"] | None  # g
    bias: Float[Array, "..."] | None
    config: Adapter = eqx.field(static=True)
    reads: tuple[str, ...] = eqx.field(static=True)
    writes: tuple[str, ...] = eqx.field(static=True)
    base: None = None
    matrices: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[tuple[str, ...]] = ("indices",)

    def __init__(self, base: LinearMap, config: Adapter):
        """Zeros, which the arrays that are fitted replace."""
        assert config.levels is not None and config.rank is not None
        plain = base.merged()
        self.config, self.reads, self.writes = config, plain.reads, plain.writes
        self.bias, shape = plain.bias, plain.weight.shape
        read, written = shape[: len(self.reads)], shape[len(self.reads) :]
        rank, is_frozen = config.rank, config.indices == "frozen"
        self.indices = jnp.zeros(shape, jnp.uint8) if is_frozen else None
        self.latent = None if is_frozen else jnp.zeros(shape)
        self.table = jnp.zeros(config.levels)
        groups = -(-math.prod(read) // config.group)
        self.in_scales = jnp.zeros((*read, rank)) if rank else None
        self.out_scales = jnp.zeros((rank or groups, *written))
        self.gains = jnp.zeros(rank) if config._has_gains else None

    @property
    def trains(self) -> tuple[str, ...]:
        config = self.config
        if config.indices == "straight_through":
            return ("latent",)
        factors = () if config.codebook else ("in_scales", "out_scales")
        scales = {"scales": (*factors, "gains"), "gains": ("gains",), "none": ()}[config.trains]
        return (*scales, "table") if config.table == "learned" else scales

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        whole = self.reads + self.writes
        return {
            "indices": whole,
            "latent": whole,
            "table": ("levels",),
            "in_scales": (*self.reads, "rank"),
            "out_scales": ("rank", *self.writes),
            "gains": ("rank",),
            "bias": self.writes,
        }

    @property
    def maps(self) -> dict[str, int]:
        read = len(self.reads)
        return {"indices": read, "latent": read, "in_scales": read, "out_scales": 1}

    @property
    def code_bits(self) -> dict[str, int]:
        assert self.config.levels is not None
        return {} if self.indices is None else {"indices": _bits(self.config.levels)}

    @property
    def bits_per_weight(self) -> float:
        entries = FACTOR_BITS if self.config.codebook is None else _bits(self.config.codebook)
        factors = [x.size for x in (self.in_scales, self.out_scales) if x is not None]
        gains = 0 if self.gains is None else self.gains.size
        beside = entries * sum(factors) + FACTOR_BITS * gains
        assert self.config.levels is not None
        return _bits(self.config.levels) + beside / self._codes.size

    def merged(self) -> Linear:
        return Linear.of(self.reads, self.writes, self._matrix(), self.bias)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.merged()(x)

    def product(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.merged().product(x)

    def factors(self) -> Factors:
        """The scales on the host, of one layer: unit vectors, and gains that are theirs."""
        positive = {"none": np.asarray, "abs": np.abs, "softplus": lambda x: np.logaddexp(0, x)}
        inputs, outputs, gains = (
            x if x is None else positive[self.config.positive](x)
            for x in (self.in_scales, self.out_scales, self.gains)
        )
        assert inputs is not None and outputs is not None
        inputs, outputs = inputs.reshape(-1, len(outputs)), outputs.reshape(len(outputs), -1)
        if gains is None:
            return host.normalised(inputs, outputs)
        if self.config.codebook is None:
            inputs, _, outputs = host.normalised(inputs, outputs)
        return host.normalised(inputs, outputs * gains[:, None])

    def counts(self) -> np.ndarray | None:
        """Occurrences of each entry of the table, on the host, in one layer; None: not known."""
        if self.indices is None:
            return None
        return np.bincount(np.asarray(self.indices).ravel(), minlength=len(self.table))

    def _matrix(self) -> Float[Array, "..."]:
        scales, indices = self._scales(), self._gathered("indices")
        table = self._gathered("table")
        if indices is None:
            scales = jax.lax.stop_gradient(scales)
            ratio = self._gathered("latent") / jnp.where(scales == 0, 1, scales)
            indices = _nearest(ratio, table)
        weight = looked_up(table, indices) * scales
        weight = _as_half(weight) if self.config.half else weight
        if self.latent is None:
            return weight
        latent = self._gathered("latent")
        return latent + jax.lax.stop_gradient(weight - latent)

    def _scales(self) -> Float[Array, "..."]:
        # As precise as the factors are: what is trained is what is deployed.
        inputs, outputs = self._factors()
        scales = jnp.tensordot(inputs, outputs, axes=1, precision=jax.lax.Precision.HIGHEST)
        return jnp.maximum(scales, FLOOR) if self.config.scales == "product" else scales

    def _factors(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """B and g ∘ A, as they are multiplied."""
        inputs, outputs = self._positive("in_scales"), self._positive("out_scales")
        if inputs is None:
            inputs = self._members()
        elif self.gains is not None:
            if self.config.codebook is None:
                inputs, outputs = _unit(inputs, of=-1), _unit(outputs, of=0)
            gains = self._positive("gains")
            outputs = outputs * gains.reshape(-1, *[1] * len(self.writes))
        return (_as_half(inputs), _as_half(outputs)) if self.config.half else (inputs, outputs)

    def _members(self) -> Float[Array, "..."]:
        """B of rank 0: 1 where an input is of a group."""
        read = self._codes.shape[: len(self.reads)]
        group = jnp.arange(math.prod(read)) // self.config.group
        members = group[:, None] == jnp.arange(len(self.out_scales))
        return gathered(members.astype(jnp.float32).reshape(*read, -1), (*self.reads, "rank"))

    @property
    def _codes(self) -> Any:
        """An array of the matrix's shape."""
        return self.indices if self.latent is None else self.latent

    def _positive(self, name: str) -> Any:
        value, positive = self._gathered(name), self.config.positive
        if value is None or positive == "none":
            return value
        return jnp.abs(value) if positive == "abs" else jax.nn.softplus(value)

    def _gathered(self, name: str) -> Any:
        value = getattr(self, name)
        return None if value is None else gathered(value, self.axes[name])


def _nearest(values: Float[Array, "..."], table: Float[Array, " levels"]) -> UInt8[Array, "..."]:
    """The index of the entry of an ascending table that is nearest to each value."""
    borders = (table[1:] + table[:-1]) / 2
    above = [(values > borders[i]).astype(jnp.uint8) for i in range(len(borders))]
    return sum(above[1:], above[0])


def _as_half(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x + stop_gradient(fp16(x) − x), straight-through.

    A compiler may leave out a conversion to fp16 and back, so that x is rounded as such: below
    2⁻¹⁴ numbers of fp16 are 2⁻²⁴ apart, and above they have 10 bits of mantissa.
    """
    small = jnp.round(x * 2.0**24) * 2.0**-24
    rounded = jnp.where(jnp.abs(x) < 2.0**-14, small, jax.lax.reduce_precision(x, 5, 10))
    return x + jax.lax.stop_gradient(rounded - x)


def _unit(x: Float[Array, "..."], of: int) -> Float[Array, "..."]:
    """Vectors along the other axes, divided by their norms."""
    others = tuple(axis for axis in range(x.ndim) if axis != of % x.ndim)
    squares = jnp.sum(x**2, axis=others, keepdims=True)
    return x / jnp.sqrt(jnp.maximum(squares, LEAST**2))


def _coded(values: np.ndarray, count: int) -> np.ndarray:
    """Values of a codebook in the place of any."""
    centres = tables.kmeans(values, count)
    borders = (centres[1:] + centres[:-1]) / 2
    return centres[np.searchsorted(borders, values)]


def _bits(values: int) -> int:
    return math.ceil(math.log2(values))
