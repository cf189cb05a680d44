"""A readout in closed form: the head is solved for, and nothing else is learned.

For fixed features, as a reservoir gives them: ridge regression from two streamed sums, or recursive
least squares. Neither has a gradient, a learning rate or a decay.
"""

import math
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular
from jaxtyping import Array, Float, Int

from windlass.config import section
from windlass.devices.axes import layout, replicated, shard
from windlass.objectives import BaseObjective, Carry, Tally
from windlass.objectives.next_token import Objective as NextToken

ROUNDING = float(jnp.finfo(jnp.float32).eps)
EXACT = jax.lax.Precision.HIGHEST
REFINEMENTS = 4  # of 400 features that nearly depend on each other: 31% off without, 0.8% with


class SecondMoments(NamedTuple):
    """Second moments of features x and targets y over some tokens: Σ d x xᵀ and Σ d y xᵀ."""

    xx: Float[Array, "features features"]
    yx: Float[Array, "targets features"]


class Recursion(NamedTuple):
    """State of recursive least squares: the readout W, and a root R of P = R Rᵀ."""

    root: Float[Array, "features features"]
    readout: Float[Array, "targets features"]


@section
class Objective(BaseObjective):
    """Least squares of the next token, as a one-hot vector or as its embedding.

    With the hidden state x of a token and the target y, the readout W minimises

        ridge   Σ |y − W x|² + α |W|²,            W = Y Xᵀ (X Xᵀ + α I)⁻¹
        rls     Σ λⁿ⁻ⁱ |y − W x|² + λⁿ/P₀ |W|²,   token by token k = P x / (λ + xᵀ P x),
                                                  W ← W + (y − W x) kᵀ, P ← (P − k xᵀ P) / λ

    where α is `penalty`, λ is `forgetting` and P₀ is `initial`. Logits are W x / T, of an embedding
    E W x / T with the table E of the model, where T is `temperature`: so the head is W / T or
    E W / T. The loss is the cross-entropy of held-out tokens; steps have none.
    """

    solver: Literal["ridge", "rls"] = "ridge"  # ridge regression or recursive least squares
    penalty: float = 1.0  # ridge: α, beside the sum of squared errors of all tokens
    forgetting: float = 1.0  # rls: λ, the weight of a token once one more was read
    initial: float = 1.0  # rls: P₀, the diagonal of P at the start
    # what is regressed on. one_hot: the next token; embedding: its embedding, which is fixed
    targets: Literal["one_hot", "embedding"] = "one_hot"
    # of the softmax, in the head: regression on one-hot vectors gives shares, not log-probabilities
    temperature: float = 0.1

    columns: ClassVar[tuple[str, ...]] = ("tokens", "targets", "weight", "position", "document")
    has_gradient: ClassVar[bool] = False

    def __post_init__(self):
        wrong = [
            f"{name} is {getattr(self, name):g}; it must be above 0"
            for name in ("penalty", "initial", "temperature")
            if not 0 < getattr(self, name) < math.inf
        ]
        if not 0 < self.forgetting <= 1:
            wrong.append(f"forgetting is {self.forgetting:g}; it is a share, above 0 and at most 1")
        keys = {"ridge": ("penalty",), "rls": ("forgetting", "initial")}
        wrong += [
            f"{name} is {getattr(self, name):g}; it is a key of solver {solver}, and solver is "
            f"{self.solver}"
            for solver, names in keys.items()
            for name in names
            if solver != self.solver and getattr(self, name) != 1
        ]
        if wrong:
            raise ValueError(*wrong)

    @property
    def identity(self) -> dict[str, str | int | float]:
        # Penalty and temperature are of what is solved, and may change at any time.
        of_state: dict[str, str | int | float] = {"solver": self.solver, "targets": self.targets}
        if self.solver == "ridge":
            return of_state
        return of_state | {"forgetting": self.forgetting, "initial": self.initial}

    def problems(self, model):
        wrong = NextToken().problems(model)
        is_tied = getattr(model, "tied", False)
        return wrong + ["its head is its embedding (tied is true)"] * is_tied

    def solved(self, model):
        return math.prod(self._shape(model))

    def start(self, model, batch):
        shape = self._shape(model)
        width = shape[1]
        if self.solver == "ridge":
            return Carry(sums=SecondMoments(_zeros((width, width), ". features"), _zeros(shape)))
        root = math.sqrt(self.initial) * jnp.eye(width, dtype=jnp.float32)
        sums = Recursion(shard(root, ". features"), _zeros(shape))
        if self.forgetting == 1:
            return Carry(sums=sums)
        # In microbatches rows come in another order; by these they are weighted as in their own.
        before = jnp.arange(batch["tokens"].shape[0], dtype=jnp.int32)
        rows = {"before": shard(before, "batch"), "after": shard(before[::-1], "batch")}
        return Carry(rows, sums)

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        hidden, auxiliary, _ = model(batch)
        weight, sums = batch["weight"], carry.sums
        if carry.rows is not None:
            weight, sums = self._aged(weight, carry)
        more = self._moments(model, hidden.astype(jnp.float32), batch["targets"], weight)
        with jax.default_matmul_precision("highest"):
            add = updated if self.solver == "rls" else partial(jax.tree.map, jnp.add)
            sums = add(sums, more)
        tally = Tally(jnp.float32(0), jnp.sum(batch["weight"]), {}, {}, auxiliary)
        return tally, carry._replace(sums=sums)

    def evaluate(self, model, batch, *, carry, helpers, step, steps):
        """The cross-entropy of a model that `finish` made."""
        call: dict[str, Any] = dict(key=None, carry=Carry(), helpers={}, step=step, steps=steps)
        return NextToken()(model, batch, **call)[0]

    def finish(self, model, carry):
        with jax.default_matmul_precision("highest"):
            readout = self._ridge(carry.sums) if self.solver == "ridge" else carry.sums.readout
            if self.targets == "embedding":
                readout = model.embedding.weight.astype(jnp.float32) @ readout
        # In float32, whatever the model is stored in: it is cast where it is used.
        return eqx.tree_at(lambda one: one.head.weight, model, readout / self.temperature)

    def _shape(self, model) -> tuple[int, int]:
        """Entries of a target and of a hidden state."""
        vocab, width = model.head.weight.shape
        return vocab if self.targets == "one_hot" else model.embedding.weight.shape[1], width

    def _ridge(self, sums: SecondMoments) -> Float[Array, "targets features"]:
        """W = Y Xᵀ (X Xᵀ + α I)⁻¹, by a Cholesky factor with what float32 needs of a penalty.

        With less, rounding may leave nothing to factor. Iterative refinement then comes back to α:
        W ← W + (Y Xᵀ − W (X Xᵀ + α I)) (X Xᵀ + α′ I)⁻¹.
        """
        identity = jnp.eye(len(sums.xx), dtype=jnp.float32)
        safe = jnp.maximum(self.penalty, ROUNDING * jnp.trace(sums.xx))
        lower = jnp.linalg.cholesky(sums.xx + safe * identity)
        readout = jnp.zeros_like(sums.yx)
        for _ in range(1 + REFINEMENTS):
            rest = sums.yx - readout @ sums.xx - self.penalty * readout
            readout += cho_solve((lower, True), rest.T).T
        return readout

    def _aged(
        self, weight: Float[Array, "batch seq"], carry: Carry
    ) -> tuple[Float[Array, "batch seq"], Recursion]:
        """Weights as at the end of the step, whose first microbatch ages all that was before.

        Of N positions in the rows of a step, in their order, the token at position i is weighted by
        λᴺ⁻¹⁻ⁱ, and P becomes P / λᴺ: the same in whatever order the microbatches come.
        """
        rows, length = carry.rows, weight.shape[1]
        after = rows["after"][:, None] * length + jnp.arange(length - 1, -1, -1)
        whole = jnp.max(rows["before"] + rows["after"] + 1) * length
        is_first = jnp.min(rows["before"]) == 0
        grows = jnp.where(is_first, self._weight(-0.5 * whole.astype(jnp.float32)), 1.0)
        sums = carry.sums._replace(root=carry.sums.root * grows)
        return weight * self._weight(after.astype(jnp.float32)), sums

    def _weight(self, after: Float[Array, "..."]) -> Float[Array, "..."]:
        """λⁿ, of a token after which n were read."""
        return jnp.exp(math.log(self.forgetting) * after)

    def _moments(
        self,
        model: Any,
        x: Float[Array, "batch seq features"],
        targets: Int[Array, "batch seq"],
        weight: Float[Array, "batch seq"],
    ) -> SecondMoments:
        weighted = x * weight[..., None]
        xx = _product(weighted, x, ". features")
        if self.targets == "one_hot":
            return SecondMoments(xx, _by_target(weighted, targets, model.head.weight.shape[0]))
        y = model.embedding(targets).astype(jnp.float32)
        return SecondMoments(xx, _product(y, weighted, "vocab features"))


def updated(state: Recursion, more: SecondMoments) -> Recursion:
    """Recursive least squares by the tokens of a microbatch at once (Woodbury).

    With G = Σ d x xᵀ and H = Σ d y xᵀ of the microbatch, and a Cholesky factor C,

        (P⁻¹ + G)⁻¹ = R (I + Rᵀ G R)⁻¹ Rᵀ,   I + Rᵀ G R = C Cᵀ,   R ← R C⁻ᵀ
        W ← W + (H − W G) R Rᵀ

    A root of P, since no rounding makes R Rᵀ anything but positive.
    """
    root, xx = replicated(state.root), replicated(more.xx)
    grown = root.T @ xx @ root
    identity = jnp.eye(len(root), dtype=jnp.float32)
    lower = jnp.linalg.cholesky(grown + (1 + ROUNDING * jnp.trace(grown)) * identity)
    root = solve_triangular(lower, root.T, lower=True).T
    error = more.yx - _times(state.readout, xx)
    readout = state.readout + _times(error, root @ root.T)
    return Recursion(shard(root, ". features"), readout)


def _times(a: Float[Array, "targets features"], b: Float[Array, "features features"]) -> Array:
    """A product of a sharded matrix with a square one that every device holds."""
    return jnp.einsum("tf,fg->tg", a, b, out_sharding=layout("vocab features", a.shape))


def _product(a: Array, b: Array, axes: str) -> Array:
    """Σ a bᵀ over all tokens of all rows."""
    out = layout(axes, (a.shape[-1], b.shape[-1]))
    return jnp.einsum("bsi,bsj->ij", a, b, precision=EXACT, out_sharding=out)


def _by_target(x: Float[Array, "batch seq features"], targets: Int[Array, "batch seq"], size: int):
    """Σ y xᵀ of one-hot targets y, which are never made: the gradient of a look-up adds rows so."""
    table = jnp.zeros((size, x.shape[-1]), out_sharding=layout("vocab .", (size, x.shape[-1])))
    out = layout("batch . .", x.shape)
    _, back = jax.vjp(lambda table: table.at[targets].get(out_sharding=out), table)
    return shard(back(x)[0], "vocab features")


def _zeros(shape: tuple[int, int], axes: str = "vocab features") -> Array:
    return jnp.zeros(shape, jnp.float32, out_sharding=layout(axes, shape))
