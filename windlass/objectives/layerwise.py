"""Layer by layer: every adapted linear map learns the output of a frozen model's map."""

from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import keystr
from jaxtyping import Array, Float

from windlass.adapters import Adapted, is_adapted, merged
from windlass.config import section
from windlass.config.start import Start
from windlass.errors import UserError
from windlass.layers.auxiliary import reporting
from windlass.layers.linear import Linear, LinearMap
from windlass.layers.names import name
from windlass.objectives import BaseObjective, Carry, Tally

LOCAL = "local"  # name under which a map reports its loss
NORMALIZED, RELATIVE = 0.8, 0.2  # shares of the two errors
MOST = 10.0  # loss of a position, at most: one that is far off does not drown the others
EPSILON = 1e-6


@section
class Objective(BaseObjective):
    """Error of each adapted linear map, beside the same map of a frozen model, on the same input.

    With outputs y of the adapted map and t of the frozen one, and r(y) = y / rms(y), a position has

        ℓ = min(0.8 mean((r(y) − r(t))²) + 0.2 Σ(y − t)² / Σt², 10)

    and the loss is its mean over positions and maps. No gradient crosses a map: each learns by
    itself, and neither the head nor a loss over the vocabulary is computed. Maps inside the loop of
    a recurrence are left out.
    """

    # the frozen model, of the same shape: of the hub, of a folder or of a run; it is the one that
    # the maps were quantised from
    teacher: Start
    # input of the layers: own has what the adapted maps before them put out, with their errors;
    # teacher what the frozen ones do
    inputs: Literal["own", "teacher"] = "own"
    positions: int = 16  # compared, of each sequence: evenly spaced, or all where there are fewer

    columns: ClassVar[tuple[str, ...]] = ("tokens", "weight", "position", "document")

    def __post_init__(self):
        if self.positions < 1:
            raise ValueError(f"positions is {self.positions}; it must be 1 or more")

    @property
    def helpers(self) -> dict[str, Start]:
        return {"teacher": self.teacher}

    def start(self, model, batch):
        if not is_adapted(model):
            raise UserError(
                "objective is layerwise, which compares adapted linear maps with those of a "
                "frozen model, and no map here is adapted: an adapter such as lookup makes some"
            )
        return Carry()

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        _, auxiliary, _ = self._compared(model, helpers["teacher"])(batch)
        total, count = auxiliary.pop(LOCAL, (jnp.float32(0), jnp.float32(0)))
        weight = jnp.sum(batch["weight"])
        return Tally(weight * total / jnp.maximum(count, 1.0), weight, {}, {}, auxiliary), carry

    def _compared(self, model: Any, teacher: Any) -> Any:
        """The model with each adapted map beside the frozen one."""
        frozen, shapes, due = _maps(teacher), _shapes(teacher), _shapes(model)

        def visit(path, node):
            if not isinstance(node, Adapted):
                return node
            one = keystr(path)
            if (there := shapes.get(one)) != due[one]:
                raise UserError(
                    f"objective.teacher has {there or 'no matrix'} for {name(path)} of "
                    f"{due[one]}; layer by layer a map is compared with that of the model "
                    "it was quantised from"
                )
            return Compared(node, frozen[one], self.inputs, self.positions)

        return jax.tree_util.tree_map_with_path(visit, model, is_leaf=_is_map)


class Compared(LinearMap):
    """An adapted linear map beside the one it learns from."""

    own: Adapted
    teacher: LinearMap
    inputs: str = eqx.field(static=True)
    positions: int = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ()

    def __init__(self, own: Adapted, teacher: LinearMap, inputs: str, positions: int):
        self.own, self.teacher, self.inputs, self.positions = own, teacher, inputs, positions

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {}

    @property
    def reads(self) -> tuple[str, ...]:
        return self.own.reads

    @property
    def writes(self) -> tuple[str, ...]:
        return self.own.writes

    @property
    def weight(self) -> Float[Array, "..."]:
        return self.own.weight

    def merged(self) -> Linear:
        return self.own.merged()

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        self._report(x)
        return jax.lax.stop_gradient((self.own if self.inputs == "own" else self.teacher)(x))

    def product(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        self._report(x)
        onward = self.own if self.inputs == "own" else self.teacher
        return jax.lax.stop_gradient(onward.product(x))

    def _report(self, x: Float[Array, "..."]) -> None:
        """Report the loss of some positions; batch and sequence are the first axes of the input."""
        context = reporting()
        if context is None:
            return
        length, every = x.shape[1], max(1, x.shape[1] // self.positions)
        x = jax.lax.stop_gradient(x[:, ::every])
        losses = _error(self.own(x), jax.lax.stop_gradient(self.teacher(x)), len(self.writes))
        is_real = jnp.ones(losses.shape, bool)
        if context.document.shape[1] == length:
            is_real = is_real & (context.document >= 0)[:, ::every]
        count = jnp.sum(is_real.astype(jnp.float32))
        context.auxiliary(LOCAL, jnp.sum(jnp.where(is_real, losses, 0.0)), count)


def _error(y: Float[Array, "..."], t: Float[Array, "..."], axes: int) -> Float[Array, "..."]:
    """ℓ of each position, over the last axes."""
    y, t = y.astype(jnp.float32), t.astype(jnp.float32)
    over = tuple(range(-axes, 0))

    def mean(x: Array) -> Array:
        return jnp.mean(x, axis=over, keepdims=True)

    def normalized(x: Array) -> Array:
        return x * jax.lax.rsqrt(mean(x**2) + EPSILON)

    apart = NORMALIZED * mean((normalized(y) - normalized(t)) ** 2)
    relative = RELATIVE * mean((y - t) ** 2) / (mean(t**2) + EPSILON)
    return jnp.minimum(jnp.squeeze(apart + relative, over), MOST)


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each linear map's matrix, of all layers."""
    plain = eqx.filter_eval_shape(merged, model)
    return {path: node.merged().weight.shape for path, node in _maps(plain).items()}


def _maps(model: Any) -> dict[str, LinearMap]:
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_map)
    return {keystr(path): node for path, node in nodes if _is_map(node)}


def _is_map(node: Any) -> bool:
    return isinstance(node, LinearMap)
