"""One training step: gradient, update, report."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt32

from windlass.columns import DocumentsInRows
from windlass.devices.axes import layout
from windlass.layers import kernels
from windlass.layers.dropout import keyed
from windlass.objectives import BaseObjective, Carry, Tally, settled
from windlass.program import token_hash
from windlass.program.loss_scale import LossScale


class Progress(NamedTuple):
    """Progress counters: the part of the state that the loop reports."""

    not_finite: Int[Array, ""]  # steps in a row, up to this one, whose loss or gradient was not
    skipped: Int[Array, ""]  # such steps in all
    best: Float[Array, ""]  # the lowest validation loss
    best_step: Int[Array, ""]  # where that was
    since: Int[Array, ""]  # evaluations after it
    token_hash: UInt32[Array, ""]  # of all tokens that were consumed, in their order

    def unjudged(self) -> "Progress":
        """Progress without a best, as before the first evaluation."""
        return self._replace(
            best=jnp.full_like(self.best, jnp.inf),
            best_step=jnp.zeros_like(self.best_step),
            since=jnp.zeros_like(self.since),
        )

    def judged(self, step: int, loss: float) -> "Progress":
        """Progress after an evaluation: a new best, or one more without."""
        is_best = loss < self.best
        return self._replace(
            best=jnp.where(is_best, loss, self.best),
            best_step=jnp.where(is_best, step, self.best_step),
            since=jnp.where(is_best, 0, self.since + 1),
        )


class State(NamedTuple):
    """All that changes during training, and all that a checkpoint holds."""

    step: Int[Array, ""]
    key: UInt32[Array, "..."]  # of the run: every random number follows from it and the step
    weights: PyTree  # the trainable part of the model; the rest is None
    ema: PyTree  # their average over the steps, in float32; None where the run keeps none
    moments: PyTree
    carry: Carry
    progress: Progress
    loss_scale: LossScale | None  # of float16; None in other formats


class Frozen(NamedTuple):
    """Frozen arrays: read by the step and never changed."""

    model: PyTree  # the arrays that are not trained
    helpers: dict[str, PyTree]  # the arrays of the models that the objective names


MICROBATCH = "microbatch"  # name of its function in the program of a step without a loop

Batch = dict[str, Array]
Step = Callable[[State, Frozen, Batch], tuple[State, dict[str, Array]]]
TrainingCall = Callable[..., tuple[Float[Array, ""], tuple[Tally, Carry]]]


def start(
    weights: PyTree,
    optimizer: optax.GradientTransformationExtraArgs,
    carry: Carry,
    *,
    key: PRNGKeyArray,
    has_ema: bool = False,
    has_loss_scale: bool = False,
) -> State:
    return State(
        step=jnp.int32(0),
        key=jax.random.key_data(key),
        weights=weights,
        ema=jax.tree.map(lambda x: jnp.array(x, jnp.float32), weights) if has_ema else None,
        moments=optimizer.init(weights),
        carry=carry,
        progress=Progress(
            not_finite=jnp.int32(0),
            skipped=jnp.int32(0),
            best=jnp.float32(jnp.inf),
            best_step=jnp.int32(0),
            since=jnp.int32(0),
            token_hash=token_hash.none(),
        ),
        loss_scale=LossScale.start() if has_loss_scale else None,
    )


def make_training_call(
    model: Callable[[PyTree, PyTree], Any],
    objective: BaseObjective,
    steps: int,
    helpers: Callable[[dict[str, PyTree]], dict[str, Any]] = dict,
) -> TrainingCall:
    """The objective on a microbatch: the total to be differentiated, tally and carry.

    `model` joins what is trained and what is frozen into the model that computes, and `helpers`
    arrays into the modules that the objective names.
    """

    def call(weights, frozen: Frozen, batch: Batch, key, carry: Carry, step: Int[Array, ""]):
        whole = model(weights, frozen.model)
        if objective.has_gradient:  # dropout is for what is trained
            whole = keyed(whole, key)
        settings: dict[str, Any] = dict(helpers=helpers(frozen.helpers), step=step, steps=steps)
        tally, carry = objective(whole, batch, key=key, carry=carry, **settings)
        tally = settled(tally, whole)
        return tally.total, (tally, carry)

    return call


def make_step(
    model: Callable[[PyTree, PyTree], Any],
    objective: BaseObjective,
    optimizer: optax.GradientTransformationExtraArgs,
    *,
    steps: int,
    microbatches: int,
    skips: int,
    ema: float | None = None,
    hashed: Sequence[str] = ("tokens",),
    helpers: Callable[[dict[str, PyTree]], dict[str, Any]] = dict,
    documents: DocumentsInRows | None = None,
    deterministic: bool = False,
) -> Step:
    """The step, to be compiled. What changes is in `State`; what does not is an argument here.

    The gradient of a batch is g = Σ ∇ℓ / Σ w, both sums over all its microbatches and devices.

    Of an objective without one a step changes the carry alone, and reports no loss.

    A step whose loss or gradient is not finite, or without a gradient the carry, changes nothing
    but the count of such steps. After more than `skips` of them in a row no step changes anything,
    so that the loop may find out late. With a loss scale such a step is first taken for an
    overflow, which only halves the scale.
    `ema` is how much of the average of the weights is kept at each step, `hashed` the columns
    of a batch that the token hash is over, and `documents` those that rows are packed with, if any.
    """
    call = make_training_call(model, objective, steps, helpers)

    def step(state: State, frozen: Frozen, batch: Batch) -> tuple[State, dict[str, Array]]:
        def total(weights, rows, key, carry):
            with kernels.rows_of(documents, deterministic=deterministic):
                return call(weights, frozen, rows, key, carry, state.step)

        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        loss_scale = state.loss_scale
        tally, carry, gradient = accumulate(
            total,
            state.weights,
            batch,
            state.carry,
            key,
            microbatches,
            None if loss_scale is None else loss_scale.scale,
        )
        weight = jnp.maximum(tally.weight, 1e-9)  # a batch may hold nothing to train on
        with jax.numpy_dtype_promotion("standard"), jax.named_scope("optimizer"):
            gradient = jax.tree.map(lambda g: g / weight, gradient)
            norm = optax.tree.norm(gradient) if objective.has_gradient else None
            updates, moments = optimizer.update(
                gradient, state.moments, state.weights, step=state.step
            )
            weights = eqx.apply_updates(state.weights, updates)

        is_sound = _are_finite(carry) if norm is None else jnp.isfinite(norm)
        is_finite = is_sound & jnp.isfinite(tally.total)
        stopped = state.progress.not_finite > skips
        goes_on = jnp.where(stopped, 0, 1)
        fails = ~is_finite
        if loss_scale is not None:
            fails &= ~loss_scale.overflowed(is_finite)
            after = loss_scale.after(is_finite)
            loss_scale = jax.tree.map(lambda x, y: jnp.where(stopped, x, y), loss_scale, after)
        failed = jnp.where(fails, goes_on, 0)
        not_finite = state.progress.not_finite + failed
        consumed = state.progress.token_hash
        progress = state.progress._replace(
            not_finite=jnp.where(is_finite & ~stopped, 0, not_finite),
            skipped=state.progress.skipped + failed,
            token_hash=jnp.where(stopped, consumed, token_hash.with_batch(consumed, batch, hashed)),
        )
        keep = is_finite & ~stopped
        average = None if ema is None else averaged(state.ema, weights, state.step, ema)
        with jax.named_scope("optimizer"):
            weights, average, moments, carry = jax.tree.map(
                lambda new, old: jnp.where(keep, new, old),
                (weights, average, moments, carry),
                (state.weights, state.ema, state.moments, state.carry),
            )
        new = State(
            step=state.step + goes_on,
            key=state.key,
            weights=weights,
            ema=average,
            moments=moments,
            carry=carry,
            progress=progress,
            loss_scale=loss_scale,
        )
        metrics = tally.metrics()
        if norm is None:
            del metrics["loss"]
        else:
            metrics["gradient_norm"] = norm
        scaling = {} if loss_scale is None else loss_scale.metrics()
        return new, metrics | {"token_hash": progress.token_hash} | scaling

    return step


def averaged(ema: PyTree, weights: PyTree, step: Int[Array, ""], decay: float) -> PyTree:
    """The exponential moving average (EMA) of the weights after one more step.

    a ← d a + (1 - d) w, with d = min(decay, (1 + t) / (10 + t)) at step t.
    """
    # At first less is kept, or the random weights of the start would be remembered for longest.
    t = step.astype(jnp.float32)
    d = jnp.minimum(decay, (1 + t) / (10 + t))
    return jax.tree.map(lambda old, new: d * old + (1 - d) * new, ema, weights)


def accumulate(
    total: Callable,
    weights: PyTree,
    batch: Batch,
    carry: Carry,
    key,
    microbatches: int,
    loss_scale: Float[Array, ""] | None = None,
) -> tuple[Tally, Carry, PyTree]:
    """The objective's tally and carry, and the gradient of its total, summed over microbatches.

    With a loss scale, each gradient is taken of the mean loss times it, and undone in float32.
    """

    def microbatch(part, sums):
        number, own, carried = part

        def scaled(weights):
            value, (tally, new) = total(
                weights, own, jax.random.fold_in(key, number), Carry(carried, sums)
            )
            # Of the mean, so that a scale means the same for any number of tokens; a microbatch
            # may hold next to nothing.
            factor = None if loss_scale is None else loss_scale / jnp.maximum(tally.weight, 1.0)
            return value if factor is None else value * factor, (tally, new, factor)

        if not jax.tree.leaves(weights):  # nothing is trained
            _, (tally, new, _) = scaled(weights)
            return tally, new, weights
        gradient, (tally, new, factor) = jax.grad(scaled, has_aux=True)(weights)
        gradient = jax.tree.map(lambda g: g.astype(jnp.float32), gradient)
        if factor is not None:
            gradient = jax.tree.map(lambda g: g / factor, gradient)
        return tally, new, gradient

    if microbatches == 1:
        # No loop of one round: for a single chip the TPU compiler makes two of it, and computes
        # most of the step twice. In a part of its own, which a plan knows by its name.
        return jax.jit(microbatch)((jnp.int32(0), batch, carry.rows), carry.sums)

    def add(so_far, part):
        tally, sums, gradient = so_far
        more, new, further = microbatch(part, sums)
        return (tally + more, new.sums, jax.tree.map(jnp.add, gradient, further)), new.rows

    split = jax.tree.map(lambda x: _split(x, microbatches), (batch, carry.rows))
    split = (jnp.arange(microbatches), *split)
    first = jax.tree.map(lambda x: x[0], split)
    _, (tally, _) = jax.eval_shape(
        lambda rows: total(weights, rows[1], key, Carry(rows[2], carry.sums)), first
    )
    # The first tally to add to: nothing, and no maximum.
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tally)
    none = none._replace(extremes=jax.tree.map(lambda x: jnp.full_like(x, -jnp.inf), none[3]))
    zeros = jax.tree.map(
        lambda w: jnp.zeros(w.shape, jnp.float32, out_sharding=_sharding(w)), weights
    )
    (tally, sums, gradient), rows = jax.lax.scan(add, (none, carry.sums, zeros), split)
    return tally, Carry(jax.tree.map(_join, rows), sums), gradient


def _split(x: Array, microbatches: int) -> Array:
    # Row i goes to microbatch i % microbatches, so that each device splits the rows it holds.
    # Contiguous blocks would put a whole microbatch on a few devices.
    shape = (x.shape[0] // microbatches, microbatches, *x.shape[1:])
    out = layout(("batch", *[""] * x.ndim), shape)
    return jnp.reshape(x, shape, out_sharding=out).swapaxes(0, 1)


def _join(x: Array) -> Array:
    shape = (x.shape[0] * x.shape[1], *x.shape[2:])
    out = layout(("batch", *[""] * (len(shape) - 1)), shape)
    return jnp.reshape(x.swapaxes(0, 1), shape, out_sharding=out)


def _are_finite(carry: Carry) -> Bool[Array, ""]:
    numbers = [x for x in jax.tree.leaves(carry) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in numbers]))


def _sharding(x):
    return None if jax.sharding.get_abstract_mesh().empty else jax.typeof(x).sharding.spec
