"""Reward modelling by the Bradley-Terry model of pairs. https://arxiv.org/abs/2203.02155"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from windlass import models
from windlass.config import section
from windlass.objectives import BaseObjective, Tally
from windlass.preferences import pairs


@section
class Objective(BaseObjective):
    """Reward model: a score for every answer, the chosen one's above that of the rejected.

    A head of one output takes the place of the LM head, and an answer's score r is what it gives
    for the last token that is read of its document: all but the end. A pair has

        ℓ = -log σ(r_chosen - r_rejected) + c (r_chosen + r_rejected)²

    where c is `center`. An export is a sequence classifier with one label.
    """

    center: float = 0.0  # draws the scores of a pair to a mean of 0, such as 0.01

    columns: ClassVar[tuple[str, ...]] = ("tokens", "targets", "weight", "position", "document")
    spares: ClassVar[tuple[str, ...]] = ("reference",)
    unit: ClassVar[str] = "pair"
    scores: ClassVar[int] = 1

    def __post_init__(self):
        if self.center < 0:
            raise ValueError(f"center is {self.center}; it is a factor, 0 or more")

    def problems(self, model):
        if not model.causal:
            return ["it is bidirectional (causal is false), and the last token would be any other"]
        has_head = models.HEAD in models.names(model)
        return [] if has_head else ["it has no LM head whose place a head of scores could take"]

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        hidden, auxiliary, _ = model(batch)
        scores = jnp.where(_is_last(batch["document"]), model.head.logits(hidden)[..., 0], 0.0)

        found = pairs([scores], batch["document"])
        (chosen,), (rejected,) = found.first, found.second
        loss = -jax.nn.log_sigmoid(chosen - rejected)
        if self.center:
            loss += self.center * (chosen + rejected) ** 2
        margin = chosen - rejected
        values = {"rewards_chosen": chosen, "rewards_rejected": rejected, "margin": margin}
        values |= {"accuracy": (margin > 0).astype(jnp.float32)}
        means = {name: (found.total(value), found.count) for name, value in values.items()}
        return Tally(found.total(loss), found.count, means, {}, auxiliary), carry


def _is_last(document: Int[Array, "batch seq"]) -> Bool[Array, "batch seq"]:
    """Mask of the last position of each document of each row."""
    after = jnp.concatenate([document[:, 1:], jnp.full_like(document[:, :1], -1)], axis=1)
    return document != after
