"""Expert layer: gated MLPs side by side, of which a router gives each token a few.

Tokens are sorted by expert and multiplied in groups (`ragged_dot`): none is dropped, however
uneven the routing. On a mesh with an axis `expert` each device has some of the experts. It then
all-gathers the tokens of the devices along that axis, computes those of its own experts, and the
sums are reduce-scattered: of n devices each receives n - 1 times its own tokens and sends as many
sums, and has room for all of them going to one device.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from windlass.devices.axes import Stacked, annotate, in_use, layout
from windlass.layers.auxiliary import AuxiliaryLosses
from windlass.layers.linear import Linear, LinearMap
from windlass.layers.mlp import Gated
from windlass.layers.norm import Fork, reads
from windlass.networks.experts import balance
from windlass.networks.experts.dispatch import (
    Groups,
    combined,
    dispatched,
    grouped,
    ragged_dot,
)
from windlass.networks.experts.routing import Router, Routing, route


class ExpertFactors(NamedTuple):
    """A map of all experts as it is multiplied: y = base(x) + (x A) B."""

    base: "Linear | ExpertFactors"
    down: Linear  # A
    up: Linear  # B, scaled


Parts = Linear | ExpertFactors


class Experts(Stacked):
    """MLPs side by side: every array of theirs has an axis of experts in front."""

    along: ClassVar[str] = "experts"

    @property
    @abstractmethod
    def maps(self) -> tuple[LinearMap, ...]:
        """Its maps, in the order in which `hidden` takes them; the last one writes the output."""

    @abstractmethod
    def hidden(self, *read: Float[Array, "rows ..."]) -> Float[Array, "rows mlp"]:
        """Input of the last map, of what the others wrote."""


class GatedExperts(Experts):
    """Gated linear units: down_e(activation(gate_e(x)) · up_e(x))."""

    gate: Linear
    up: Linear
    down: Linear
    activation: Callable = eqx.field(static=True)

    def __init__(
        self,
        sizes: dict[str, int],
        *,
        activation: Callable = jax.nn.silu,
        key: PRNGKeyArray,
    ):
        gate, up, down = jax.random.split(key, 3)
        self.gate = side_by_side("embed", "mlp", sizes, key=gate)
        self.up = side_by_side("embed", "mlp", sizes, key=up)
        self.down = side_by_side("mlp", "embed", sizes, key=down)
        self.activation = activation

    @property
    def maps(self) -> tuple[LinearMap, ...]:
        return self.gate, self.up, self.down

    def hidden(
        self, gate: Float[Array, "rows mlp"], up: Float[Array, "rows mlp"]
    ) -> Float[Array, "rows mlp"]:
        return self.activation(gate) * up


def side_by_side(
    reads: str, writes: str, sizes: dict[str, int], *, bias: bool = False, key: PRNGKeyArray
) -> Linear:
    """A linear map of each expert."""

    def one(key: PRNGKeyArray) -> Linear:
        return Linear(reads, writes, sizes, bias=bias, key=key)

    return eqx.filter_vmap(one)(jax.random.split(key, sizes["experts"]))


class SharedExpert(eqx.Module):
    """An MLP that every token has, scaled by a gate: σ(x g) · mlp(x)."""

    mlp: Gated
    gate: Linear

    def __init__(self, sizes: dict[str, int], *, key: PRNGKeyArray):
        mlp, gate = jax.random.split(key)
        self.mlp = Gated(sizes, key=mlp)
        self.gate = Linear("embed", "one", sizes | {"one": 1}, key=gate)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return jax.nn.sigmoid(self.gate(x)) * self.mlp(x)


class ExpertLayer(AuxiliaryLosses):
    """A mixture of experts: y = Σ_e w_e expert_e(x) over the `active` experts of each token."""

    router: Router
    experts: Experts
    shared: SharedExpert | None
    count: int = eqx.field(static=True)
    active: int = eqx.field(static=True)
    normalized: bool = eqx.field(static=True)
    balance: float = eqx.field(static=True)

    def __init__(
        self,
        sizes: dict[str, int],
        experts: Experts,
        *,
        active: int,  # experts of each token
        normalized: bool,  # weights of a token's experts sum to 1
        balance: float,  # coefficient of the balance loss
        bias: bool = False,  # of the router
        shared: SharedExpert | None = None,
        key: PRNGKeyArray,
    ):
        self.router = Router(sizes, bias=bias, key=key)
        self.experts, self.shared = experts, shared
        self.count, self.active = sizes["experts"], active
        self.normalized, self.balance = normalized, balance

    @property
    def losses(self) -> dict[str, float]:
        return {balance.BALANCE: self.balance}

    @jax.named_scope("experts")
    def __call__(self, x: Float[Array, "batch seq embed"] | Fork) -> Float[Array, "..."]:
        (x,) = reads(x, 1)
        routing = route(self.router, x, self.active, normalized=self.normalized)
        balance.report(routing)
        y = mixed(self.experts, x, routing)
        return y if self.shared is None else y + self.shared(x)


def active_parameters(model: PyTree) -> tuple[int, int]:
    """Parameters that a token is multiplied with, of all that a model has; arrays may be shapes."""
    is_layer = lambda node: isinstance(node, ExpertLayer)  # noqa: E731
    idle = 0
    for node in filter(is_layer, jax.tree.leaves(model, is_leaf=is_layer)):
        size = _size(node.experts)
        idle += size - size * node.active // node.count
    return _size(model) - idle, _size(model)


def _size(tree: PyTree) -> int:
    return sum(x.size for x in jax.tree.leaves(tree) if hasattr(x, "size"))


def mixed(
    experts: Experts, x: Float[Array, "batch seq embed"], routing: Routing
) -> Float[Array, "batch seq embed"]:
    """Σ_e w_e expert_e(x), each device the rows of its own experts."""
    parts, x = _multiplied(experts, x)
    rows = layout(("batch",), x.shape[:1])
    if rows is None:  # no mesh
        return _local(experts, x, routing.weights, routing.experts, parts, _Mesh())
    parts, specs = _gathered(parts, x.dtype)
    mesh = _Mesh.of(specs[-1], rows)
    arrays, static = eqx.partition(parts, eqx.is_array)

    token = PartitionSpec(*rows, None, None)

    def local(x, weights, chosen, arrays):
        x, weights, chosen = (mesh.varying(one, token) for one in (x, weights, chosen))
        own = eqx.combine(jax.tree.map(mesh.varying, arrays, specs), static)
        return _local(experts, x, weights, chosen, own, mesh)

    tokens = (x, routing.weights, routing.experts)
    x, weights, chosen = (jax.sharding.reshard(one, token) for one in tokens)
    on_each = jax.shard_map(local, in_specs=(token, token, token, specs), out_specs=token)
    return on_each(x, weights, chosen, arrays)


class _Mesh(NamedTuple):
    """The mesh axes of an expert layer: none where there is no mesh."""

    rows: tuple[str, ...] = ()  # that the batch is split over
    summed: tuple[str, ...] = ()  # over which outputs are partial sums

    @staticmethod
    def of(last: PyTree, rows: PartitionSpec) -> "_Mesh":
        """By the specs of the last map and of the batch."""
        split = {name for spec in jax.tree.leaves(last) for name in _names(spec)}
        return _Mesh(_names(rows), tuple(x for x in ("expert", "tensor") if x in split))

    @property
    def gathers(self) -> bool:
        """Return True if devices with other experts have other tokens."""
        return "expert" in self.rows and "expert" in self.summed

    def varying(self, x: Array, spec: PartitionSpec) -> Array:
        """An array as one of each device, whose gradient is summed here and nowhere before."""
        more = tuple(sorted({*self.rows, *self.summed} - {*_names(spec)}))
        return jax.lax.pcast(x, more, to="varying") if more else x

    def all_tokens(self, x: Array) -> Array:
        return jax.lax.all_gather(x, "expert", tiled=True) if self.gathers else x

    def own_tokens(self, y: Array) -> Array:
        """Sums over devices, of the tokens that the device has."""
        if self.gathers:
            y = jax.lax.psum_scatter(y, "expert", tiled=True)
        rest = tuple(name for name in self.summed if not (name == "expert" and self.gathers))
        return jax.lax.psum(y, rest) if rest else y

    @property
    def ways(self) -> int:
        """Devices along which experts are divided."""
        return jax.lax.axis_size("expert") if "expert" in self.summed else 1

    def number(self, axis: str) -> Any:
        return jax.lax.axis_index(axis) if axis in self.summed else 0


def _names(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(jax.tree.leaves(tuple(spec)))


def _local(
    experts: Experts,
    x: Float[Array, "batch seq embed"],
    weights: Float[Array, "batch seq active"],
    chosen: Array,
    parts: Sequence[Parts],
    mesh: _Mesh,
) -> Float[Array, "batch seq embed"]:
    """The same on one device, of its tokens and of those of the devices with other experts."""
    flat = [one.reshape(-1, one.shape[-1]) for one in (x, weights, chosen)]
    tokens, weights, chosen = map(mesh.all_tokens, flat)
    count = _experts(parts[0])
    groups = grouped(chosen - mesh.number("expert") * count, count)
    y = _rows(experts, dispatched(tokens, groups), groups, parts, mesh)
    own = weights.reshape(-1)[groups.order].astype(y.dtype)
    y = jnp.where(groups.is_here[:, None], y * own[:, None], 0)
    return mesh.own_tokens(combined(y, groups)).reshape(x.shape)


def _rows(
    experts: Experts,
    x: Float[Array, "rows embed"],
    groups: Groups,
    parts: Sequence[Parts],
    mesh: _Mesh,
) -> Float[Array, "rows embed"]:
    """The expert of each row of it."""
    *first, last = parts
    product = functools.partial(_product, groups=groups, ways=mesh.ways)
    read = [checkpoint_name(product(one, x), "gate") for one in first]
    # A bias behind a partial sum over devices is added by one of them.
    return product(last, experts.hidden(*read), has_bias=mesh.number("tensor") == 0)


def _product(
    part: Parts, x: Float[Array, "rows ..."], *, groups: Groups, ways: int, has_bias: Any = True
) -> Float[Array, "rows ..."]:
    """y = x W_e + b_e, of the expert e of each row."""
    product = functools.partial(_product, groups=groups, ways=ways)
    if isinstance(part, ExpertFactors):
        return product(part.base, x, has_bias=has_bias) + product(part.up, product(part.down, x))
    rows, weight = x.reshape(len(x), -1), part.weight.astype(x.dtype)
    matrices = weight.reshape(len(weight), rows.shape[1], -1)
    y = ragged_dot(rows, matrices, groups, ways).reshape(len(x), *weight.shape[-len(part.writes) :])
    if part.bias is None:
        return y
    return y + jnp.where(has_bias, part.bias, 0).astype(y.dtype)[groups.owner]


def _multiplied(
    experts: Experts, x: Float[Array, "..."]
) -> tuple[list[Parts], Float[Array, "..."]]:
    """The maps as matrices, and `x`; matrices in few bits are dequantised once that is known.

    A compiler that sees several layers would else dequantise the experts of all of them first.
    """
    maps = experts.maps
    if not all(isinstance(_base(one), Linear) for one in maps):
        maps, x = jax.lax.optimization_barrier((maps, x))
    return [_parts(one) for one in maps], x


def _base(one: LinearMap) -> LinearMap:
    """The map that adapters are beside."""
    while (low := one.low_rank) is not None:
        one = low.base
    return one


def _parts(one: LinearMap) -> Parts:
    """A map, adapted or not, as matrices to be multiplied."""
    if (low := one.low_rank) is not None:
        return ExpertFactors(_parts(low.base), low.down, low.up)
    return one if isinstance(one, Linear) else eqx.filter_vmap(lambda one: one.merged())(one)


def _experts(part: Parts) -> int:
    """Number of experts on a device."""
    while isinstance(part, ExpertFactors):
        part = part.down
    return len(part.weight)


def _gathered(parts: list[Parts], dtype: Any) -> tuple[list[Parts], PyTree]:
    """Weights all-gathered over `fsdp`, and their partition specs."""

    def spec(x: Array, about: Any) -> PartitionSpec:
        return in_use((Experts.along, *about.axes), x.shape)

    def gather(x: Array, about: Any) -> Array:
        return jax.sharding.reshard(x.astype(dtype) if about.is_matrix else x, spec(x, about))

    return annotate(parts, gather), annotate(eqx.filter(parts, eqx.is_array), spec)
