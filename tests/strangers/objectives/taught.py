"""Cross-entropy with the candidates of a cached teacher, in shares of its whole mass."""

from typing import ClassVar

import jax.numpy as jnp

from windlass.config import section
from windlass.layers.head import log_z, pick_several
from windlass.objectives import BaseObjective, Tally

CACHED = ("teacher_ids", "teacher_logits", "teacher_log_z")


@section
class Objective(BaseObjective):
    """ℓ = −Σ_c exp(t_c − log Z_t) (z_c − log Z), over the candidates c of each position."""

    columns: ClassVar[tuple[str, ...]] = (
        *("tokens", "targets", "weight", "position", "document"),
        *CACHED,
    )

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        hidden, auxiliary, _ = model(batch)
        columns = {name: batch[name] for name in (*CACHED, "weight")}
        total, _ = model.head.reduce(_loss, hidden, columns)
        return Tally(total, jnp.sum(batch["weight"]), {}, {}, auxiliary), carry


def _loss(logits, columns):
    taught = columns["teacher_logits"].astype(jnp.float32) - columns["teacher_log_z"][..., None]
    log_q = pick_several(logits, columns["teacher_ids"]) - log_z(logits)[..., None]
    return -jnp.sum(jnp.exp(taught) * log_q, axis=-1) * columns["weight"], {}
