"""Log-likelihood of given tokens under a model, for tasks that choose among answers."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from windlass.devices.axes import shard
from windlass.evaluation.generate import bucket
from windlass.models import Model
from windlass.telemetry.compiles import Program

TILE = 128  # positions of a batch whose logits are live at the same time


class Likelihood(NamedTuple):
    """Log-probability of a continuation; greedy where each of its tokens is the likeliest."""

    total: float
    is_greedy: bool


class Scorer:
    """Scores continuations of contexts, on the mesh that is set where it is called.

    Rows are padded to a power of two and batches are always full, so that there is one program for
    each of a few lengths.
    """

    def __init__(self, model: Model, *, longest: int, batch: int = 8):
        self.longest, self.batch = longest, batch
        self._weights, self._rest = eqx.partition(model, eqx.is_array)
        self._read = Program(self._log_likelihood, "scorer")

    def renew(self, model: Model) -> None:
        """Go on with other weights of the same model; nothing is compiled again."""
        self._weights, _ = eqx.partition(model, eqx.is_array)

    def __call__(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        before: Callable[[], None] = lambda: None,
    ) -> list[Likelihood]:
        """Log-likelihood of each continuation; a context that is too long loses its beginning.

        `before` is called before each batch, and may raise.
        """
        scores: dict[int, Likelihood] = {}
        # Long ones first: rows of a batch then have about the same length.
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
        for first in range(0, len(order), self.batch):
            before()
            some = order[first : first + self.batch]
            scores |= zip(some, self._scored([pairs[i] for i in some]), strict=True)
        return [scores[i] for i in range(len(pairs))]

    def _scored(self, pairs: list[tuple[Sequence[int], Sequence[int]]]) -> list[Likelihood]:
        whole = [[*context, *answer][-self.longest - 1 :] for context, answer in pairs]
        shape = (self.batch, bucket(max(len(tokens) - 1 for tokens in whole)))
        columns = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "position")}
        document = np.full(shape, -1, np.int32)
        for row, tokens in enumerate(whole):
            here = (row, slice(0, len(tokens) - 1))
            columns["tokens"][here], columns["targets"][here] = tokens[:-1], tokens[1:]
            columns["position"][here], document[here] = np.arange(len(tokens) - 1), 0
        targets = columns.pop("targets")
        outputs = self._read(self._weights, columns | {"document": document}, targets)
        log_probability, is_greedy = (np.asarray(column) for column in outputs)
        scores = []
        for row, (tokens, (_, answer)) in enumerate(zip(whole, pairs, strict=True)):
            end = len(tokens) - 1
            here = (row, slice(max(0, end - len(answer)), end))
            total = float(log_probability[here].astype(np.float64).sum())
            scores.append(Likelihood(total, bool(is_greedy[here].all())))
        return scores

    def _log_likelihood(self, weights, batch: dict[str, Array], targets: Int[Array, "batch seq"]):
        model = eqx.combine(weights, self._rest)
        batch = {name: shard(column, "batch seq") for name, column in batch.items()}
        targets = shard(targets, "batch seq")
        hidden, _, _ = model(batch)
        parts = []
        for first in range(0, hidden.shape[1], TILE):
            tile = slice(first, first + TILE)
            logits = model.head.logits(hidden[:, tile])
            here = jnp.arange(logits.shape[-1]) == targets[:, tile, None]
            target_logit = jnp.sum(jnp.where(here, logits, 0), axis=-1)
            log_probability = target_logit - jax.nn.logsumexp(logits, axis=-1)
            parts.append((log_probability, target_logit >= jnp.max(logits, axis=-1)))
        return jax.tree.map(lambda *tiles: jnp.concatenate(tiles, axis=1), *parts)
