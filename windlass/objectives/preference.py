"""Direct preference optimization (DPO) on pairs of answers. https://arxiv.org/abs/2305.18290"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from windlass.config import section
from windlass.devices.axes import layout
from windlass.objectives import BaseObjective, Tally


@section
class Objective(BaseObjective):
    """Direct preference optimization, of chosen answers over rejected ones.

    With log-probabilities π of answers under the model and π₀ under its first weights, a pair has

        margin m = β ((π - π₀)_chosen - (π - π₀)_rejected),  ℓ = -(1 - s) log σ(m) - s log σ(-m)

    where s is `label_smoothing`.

    A pair is two documents of a row, one behind the other, numbered 2i and 2i + 1: the first was
    chosen. `reference` has the log-probability of every target under the weights that the run
    started from, so that only one model is ever in memory.
    """

    beta: float = 0.1  # what a nat of log-probability is worth; the larger, the nearer to the start
    label_smoothing: float = 0.0  # the share of pairs that are taken to be the wrong way round

    columns: ClassVar[tuple[str, ...]] = (
        *("tokens", "targets", "weight", "position", "document", "reference"),
    )
    unit: ClassVar[str] = "pair"

    def __post_init__(self):
        wrong = []
        if self.beta <= 0:
            wrong.append(f"beta is {self.beta}; it is a factor, above 0")
        if not 0 <= self.label_smoothing < 0.5:
            wrong.append(
                f"label_smoothing is {self.label_smoothing}; it is a share, 0 or more and below 0.5"
            )
        if wrong:
            raise ValueError(*wrong)

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        hidden, auxiliary, _ = model(batch)
        log_p = batch["weight"] * model.head.log_probabilities(hidden, batch["targets"])
        gain = log_p - batch["weight"] * batch["reference"]

        is_chosen = batch["document"] % 2 == 0
        of_each = [
            jnp.where(which, x, 0.0) for x in (log_p, gain) for which in (is_chosen, ~is_chosen)
        ]
        sums, is_pair = _sums(jnp.stack(of_each, axis=-1), batch["document"] // 2)
        chosen, rejected, more, less = (sums[..., i] for i in range(4))
        margin = self.beta * (more - less)
        loss = -(1 - self.label_smoothing) * jax.nn.log_sigmoid(margin)
        if self.label_smoothing:
            loss -= self.label_smoothing * jax.nn.log_sigmoid(-margin)

        def total(x):
            return jnp.sum(jnp.where(is_pair, x, 0.0))

        weight = total(1.0)
        totals = {
            "rewards_chosen": total(self.beta * more),
            "rewards_rejected": total(self.beta * less),
            "margin": total(margin),
            "accuracy": total((margin > 0).astype(jnp.float32)),
            "logps_chosen": total(chosen),
            "logps_rejected": total(rejected),
        }
        means = {name: (value, weight) for name, value in totals.items()}
        return Tally(total(loss), weight, means, {}, auxiliary), carry


def _sums(
    values: Float[Array, "batch seq k"], pair: Int[Array, "batch seq"]
) -> tuple[Float[Array, "batch pair k"], Bool[Array, "batch pair"]]:
    """The sums over each pair of each row, and which of them are of a pair at all."""
    most = pair.shape[1] // 2  # each has a place at least in either answer

    def of_row(values, pair):
        # Pairs stand in their order, and what is of none behind them: it is summed and cut off.
        number = jnp.where(pair < 0, most, pair)
        every = jnp.concatenate([values, jnp.ones_like(values[:, :1])], axis=-1)
        sums = jax.ops.segment_sum(every, number, most + 1, indices_are_sorted=True)[:most]
        return sums[:, :-1], sums[:, -1] > 0

    of_rows, rows = jax.vmap(of_row), layout(("batch",), pair.shape[:1])
    if rows is None:
        return of_rows(values, pair)
    # Each device adds up the rows it holds: sums into indexed places cannot be split otherwise.
    return jax.shard_map(of_rows, in_specs=(rows, rows), out_specs=(rows, rows))(values, pair)
