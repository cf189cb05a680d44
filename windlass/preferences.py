"""AnswerPairs of answers in packed rows: what the targets of each add up to.

A pair is two documents of a row, one behind the other, numbered 2i and 2i + 1. Which is which the
format of the data decides: of preference pairs the first was chosen.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from windlass.devices.axes import layout

Sums = Float[Array, "batch pair"]
Means = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]


class AnswerPairs(NamedTuple):
    """Sums over the targets of the first and of the second answer of each pair of each row."""

    first: tuple[Sums, ...]
    second: tuple[Sums, ...]
    is_pair: Bool[Array, "batch pair"]

    def total(self, x: Sums | float) -> Float[Array, ""]:
        """The sum over all pairs, of a number that each has."""
        return jnp.sum(jnp.where(self.is_pair, x, 0.0))

    @property
    def count(self) -> Float[Array, ""]:
        return self.total(1.0)

    def average(self, total: Sums, count: Sums) -> Sums:
        """A mean over targets; -1 where there is no pair, of which every loss is finite."""
        return jnp.where(self.is_pair, total / jnp.maximum(count, 1e-9), -1.0)

    def means(self, rewards: tuple[Sums, Sums], log_p: tuple[Sums, Sums]) -> Means:
        """Metrics of every loss on pairs, chosen first, each a total and its weight."""
        margin = rewards[0] - rewards[1]
        values = {
            "rewards_chosen": rewards[0],
            "rewards_rejected": rewards[1],
            "margin": margin,
            "accuracy": (margin > 0).astype(jnp.float32),
            "logps_chosen": log_p[0],
            "logps_rejected": log_p[1],
        }
        return {name: (self.total(value), self.count) for name, value in values.items()}


def pairs(
    values: Sequence[Float[Array, "batch seq"]], document: Int[Array, "batch seq"]
) -> AnswerPairs:
    """The sums of these values over either answer of each pair."""
    is_first = document % 2 == 0
    of_each = [jnp.where(which, x, 0.0) for which in (is_first, ~is_first) for x in values]
    sums, is_pair = _sums(jnp.stack(of_each, axis=-1), document // 2)
    every = [sums[..., i] for i in range(len(of_each))]
    return AnswerPairs(tuple(every[: len(values)]), tuple(every[len(values) :]), is_pair)


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
