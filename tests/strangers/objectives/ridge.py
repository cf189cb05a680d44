"""Ridge regression: a readout in closed form, from two sums over all that was read."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from windlass.config import section
from windlass.devices.axes import layout
from windlass.objectives import BaseObjective, Carry, Tally


@section
class Objective(BaseObjective):
    """Squared error of the next token as a one-hot vector; the head is solved for.

    W = (XᵀX + λI)⁻¹ XᵀY of hidden states X and targets Y. The gradient of ½|xW - y|² trains what
    is below the head.
    """

    penalty: float = 1.0  # λ
    least: int = 0  # tokens below which the head stays as it is: too few decide nothing

    columns: ClassVar[tuple[str, ...]] = ("tokens", "targets", "weight", "position", "document")

    def problems(self, model):
        return ["its head is its embedding (tied is true)"] if getattr(model, "tied", False) else []

    def start(self, model, batch):
        vocab, embed = model.head.weight.shape
        return Carry(
            sums={
                "xx": jnp.zeros((embed, embed), jnp.float32),
                "xy": jnp.zeros((embed, vocab), jnp.float32),
                "tokens": jnp.float32(0),
            }
        )

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        hidden, auxiliary, _ = model(batch)
        logits, weight = model.head.logits(hidden), batch["weight"]
        y = (jnp.arange(logits.shape[-1]) == batch["targets"][..., None]).astype(jnp.float32)
        errors = 0.5 * jnp.sum((logits - y) ** 2, axis=-1)
        tokens = jnp.sum(weight)
        best = jnp.sum(y * logits, axis=-1) >= jnp.max(logits, axis=-1)
        accuracy = jnp.sum(best.astype(jnp.float32) * weight), tokens
        tally = Tally(jnp.sum(errors * weight), tokens, {"accuracy": accuracy}, {}, auxiliary)
        x = jax.lax.stop_gradient(hidden.astype(jnp.float32))
        more = {"xx": _product(x, x, weight), "xy": _product(x, y, weight), "tokens": tokens}
        return tally, carry._replace(sums=jax.tree.map(jnp.add, carry.sums, more))

    def finish(self, model, carry):
        sums, old = carry.sums, model.head.weight
        penalty = self.penalty * jnp.eye(len(sums["xx"]), dtype=jnp.float32)
        solved = jnp.linalg.solve(sums["xx"] + penalty, sums["xy"]).T
        new = jnp.where(sums["tokens"] < self.least, old, solved.astype(old.dtype))
        return eqx.tree_at(lambda one: one.head.weight, model, new)


def _product(x, y, weight):
    """Σ w xᵀy over all positions of all rows."""
    out = layout(("", ""), (x.shape[-1], y.shape[-1]))
    return jnp.einsum("bs,bse,bsf->ef", weight, x, y, out_sharding=out)
