"""Distillation: a student learns a teacher's distribution of the next token.

The teacher's logits come from a cache that `windlass teach` wrote (`data.teacher`), or from the
teacher itself, a frozen model beside the student (`objective.teacher`).
"""

import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from windlass.adapters import plain
from windlass.config import section
from windlass.config.start import Start
from windlass.devices.axes import gathered, replicated
from windlass.errors import UserError
from windlass.layers.auxiliary import Report
from windlass.layers.head import TILE_TOKENS, Head, pick_several, tile_logits
from windlass.layers.softmax import log_z, pick
from windlass.objectives import BaseObjective, Carry, Tally

CACHED = ("teacher_ids", "teacher_logits", "teacher_log_z")  # columns of a teacher's cache
READ = ("tokens", "position", "document")  # columns that a model reads
TILE = TILE_TOKENS // 2  # with a teacher a tile has more arrays of the vocabulary's size
LEAST = 1e-6  # of probability outside the candidates: below it float32 has no digits left


@section
class Objective(BaseObjective):
    """Divergence from a teacher, with temperature T and further terms whose weights are annealed.

    With logits t of the teacher and s of the student, and p = softmax(t / T), q = softmax(s / T)
    over the candidates that a cache has, or over the vocabulary with a live teacher,

        ℓ = w T² Σ_v p_v (log p_v − log q_v) + h CE(s, argmax t) + c CE(s, next token)

    where w is `weight`, h is `hard` and c is `cross_entropy`, and CE is over the whole vocabulary,
    at a temperature of 1. With `loss: soft_cross_entropy` the first term is −w T² Σ_v p_v log q_v:
    the same gradient, and a value that never reaches 0. Of the probability that the teacher gives
    to tokens outside the candidates, which its log-sum-exp tells, `tail` says what becomes.
    """

    # a live teacher: a model of the hub, of a folder or of a run; null: the cache of data.teacher
    teacher: Start | None = None
    temperature: float = 1.0  # T, of both distributions; gradients are scaled by T²
    loss: Literal["kl", "soft_cross_entropy"] = "kl"
    # tokens outside the candidates of a cache. drop: both distributions are over the candidates;
    # bucket: all others are one more token; uniform: the teacher gives each of them the same share
    tail: Literal["drop", "bucket", "uniform"] = "bucket"
    weight: float = 1.0  # of the divergence
    hard: float = 0.0  # weight of the cross-entropy of the teacher's most likely token
    hard_end: float | None = None  # the same at the last step, linear between; null: it stays
    cross_entropy: float = 0.0  # weight of the cross-entropy of the data's next token
    cross_entropy_end: float | None = None  # the same at the last step; null: it stays
    # weight of the soft cross-entropy, at a temperature of 1, between the model without and with
    # its adapters on sequences that are read once: keeps adapters from forgetting
    anchor: float = 0.0
    anchor_sequences: int = 32  # the first of the run, at most a batch; one per microbatch in turn

    columns: ClassVar[tuple[str, ...]] = (
        *("tokens", "targets", "weight", "position", "document"),
        *CACHED,
    )

    def __post_init__(self):
        wrong = []
        if not self.temperature > 0:
            wrong.append(f"temperature is {self.temperature:g}; it must be above 0")
        for name in ("weight", "hard", "hard_end", "cross_entropy", "cross_entropy_end", "anchor"):
            if (value := getattr(self, name)) is not None and not 0 <= value < math.inf:
                wrong.append(f"{name} is {value:g}; it is a weight, 0 or more")
        if self.anchor_sequences < 1:
            wrong.append(f"anchor_sequences is {self.anchor_sequences}; it must be 1 or more")
        if wrong:
            raise ValueError(*wrong)

    @property
    def reads(self) -> tuple[str, ...]:
        if self.teacher is None:
            return self.columns
        return tuple(name for name in self.columns if name not in CACHED)

    @property
    def helpers(self) -> dict[str, Start]:
        return {} if self.teacher is None else {"teacher": self.teacher}

    def problems(self, model):
        what = "it is bidirectional (causal is false), and so attends to the token it would predict"
        return [] if model.causal else [what]

    def start(self, model, batch):
        if not self.anchor:
            return Carry()
        if jax.tree.structure(plain(model)) == jax.tree.structure(model):
            raise UserError(
                f"objective.anchor is {self.anchor:g}, which compares the model with itself "
                "without its adapters, and none here can be taken off: objective.anchor=0, or an "
                "adapter such as lora"
            )
        rows = {name: replicated(batch[name])[: self.anchor_sequences] for name in READ}
        return Carry(sums={"next": jnp.int32(0), "anchors": rows})

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        hidden, auxiliary, _ = model(batch)
        columns = {name: batch[name] for name in ("targets", "weight")}
        constants: dict[str, Any] = {"weights": self._weights(step, steps)}
        if self.teacher is None:
            columns |= {name: batch[name] for name in CACHED}
        else:
            columns["teacher"], constants["head"] = _frozen(helpers["teacher"], batch)
        how = {"constants": constants, "tile_tokens": TILE}
        total, sums = model.head.reduce(self._tile, hidden, columns, **how)
        weight = jnp.sum(batch["weight"])
        means: Report = {name: (value, weight) for name, value in sums.items()}
        if self.anchor and key is not None:
            apart, tokens, carry = self._anchored(model, carry)
            total += weight * self.anchor * apart / jnp.maximum(tokens, 1.0)
            means["anchor"] = (apart, tokens)
        return Tally(total, weight, means, {}, auxiliary), carry

    def evaluate(self, model, batch, *, carry, helpers, step, steps):
        # As at the last step, whenever it is: what is annealed could not be compared.
        last = jnp.int32(steps)
        given: dict[str, Any] = {"carry": carry, "helpers": helpers, "step": last, "steps": steps}
        return self(model, batch, key=None, **given)[0]

    def _weights(self, step: Int[Array, ""], steps: int) -> dict[str, Float[Array, ""]]:
        """The weight at a step of each term that has one."""

        def annealed(name: str) -> Float[Array, ""] | float:
            first, last = getattr(self, name), getattr(self, f"{name}_end")
            if last is None:
                return first
            return first + (last - first) * jnp.minimum(step / max(1, steps - 1), 1.0)

        terms = {"divergence": self.weight}
        terms |= {name: annealed(name) for name in ("hard", "cross_entropy")}
        is_used = {name: isinstance(value, Array) or value > 0 for name, value in terms.items()}
        return {name: jnp.float32(value) for name, value in terms.items() if is_used[name]}

    def _tile(self, logits, columns, constants) -> tuple[Array, dict[str, Array]]:
        """The weighted loss of each token of a tile, and what is reported of it."""
        if self.teacher is None:
            divergence, best = self._cached(logits, columns)
        else:
            divergence, best = self._live(logits, _logits(columns["teacher"], constants["head"]))
        z, best_logit = log_z(logits), pick(logits, best)
        terms = {
            "divergence": divergence,
            "hard": z - best_logit,
            "cross_entropy": z - pick(logits, columns["targets"]),
        }
        loss = sum(weight * terms[name] for name, weight in constants["weights"].items())
        agreement = (best_logit >= jnp.max(logits, axis=-1)).astype(jnp.float32)
        sums = {name: terms[name] for name in ("divergence", "cross_entropy")}
        sums["agreement"], weight = agreement, columns["weight"]
        return loss * weight, {name: value * weight for name, value in sums.items()}

    def _cached(self, logits, columns) -> tuple[Array, Array]:
        """The divergence from the candidates of a cache, and the teacher's most likely token."""
        ids, teacher = columns["teacher_ids"], columns["teacher_logits"].astype(jnp.float32)
        among, student = jnp.isfinite(teacher), pick_several(logits, ids)
        if self.tail == "drop" or ids.shape[-1] >= logits.shape[-1]:
            divergence = self._divergence(teacher, student, among)
        else:
            of = self._bucket if self.tail == "bucket" else self._uniform
            divergence = of(logits, student, teacher, among, columns["teacher_log_z"])
        return divergence, ids[..., 0]

    def _bucket(self, logits, student, teacher, among, teacher_log_z) -> Array:
        """The divergence with one token for all that are no candidates, by the chain rule.

        With the share P of the teacher's probability that candidates have, and the student's Q,
        it is P T² KL(p ‖ q) among the candidates and KL of (P, 1 − P) from (Q, 1 − Q). The second
        is at a temperature of 1, the one at which the share is known.
        """
        shares = _log_sum(teacher, among) - teacher_log_z, _log_sum(student, among) - log_z(logits)
        (log_p, log_no_p), (log_q, log_no_q) = (_with_complement(share) for share in shares)
        p, no_p = jnp.exp(log_p), jnp.exp(log_no_p)
        outside = -p * log_q - no_p * log_no_q
        if self.loss == "kl":
            outside += p * log_p + no_p * log_no_p
        return p * self._divergence(teacher, student, among) + outside

    def _uniform(self, logits, student, teacher, among, teacher_log_z) -> Array:
        """The divergence where the teacher gives all that are no candidates the same probability.

        It is the full divergence of a teacher of which that is true.
        """
        rest = logits.shape[-1] - jnp.sum(among.astype(jnp.float32), axis=-1)
        many = jnp.log(jnp.maximum(rest, 1.0))
        share = _with_complement(_log_sum(teacher, among) - teacher_log_z)[1]
        each = (teacher_log_z + share - many) / self.temperature  # the logit of one of them, at T
        teacher, scaled = teacher / self.temperature, logits / self.temperature
        student, z = student / self.temperature, log_z(scaled)
        normalizer = jnp.logaddexp(_log_sum(teacher, among), each + many)
        log_p = jnp.where(among, teacher, 0.0) - normalizer[..., None]
        p = jnp.where(among, jnp.exp(log_p), 0.0)
        log_u = each - normalizer
        log_q = jnp.where(among, student - z[..., None], 0.0)
        # The sum of log q over all tokens, less that over the candidates.
        outside = jnp.sum(scaled, axis=-1) - logits.shape[-1] * z - jnp.sum(log_q, axis=-1)
        cross_entropy = -jnp.sum(p * log_q, axis=-1) - jnp.exp(log_u) * outside
        if self.loss == "kl":
            cross_entropy += jnp.sum(p * log_p, axis=-1) + rest * jnp.exp(log_u) * log_u
        return self.temperature**2 * cross_entropy

    def _live(self, logits, teacher) -> tuple[Array, Array]:
        """The divergence from a teacher's logits, and its most likely token."""
        return self._divergence(teacher, logits, None), jnp.argmax(teacher, axis=-1)

    def _divergence(self, teacher, student, among) -> Array:
        """T² KL(softmax(teacher / T) ‖ softmax(student / T)) over the tokens `among` them."""
        teacher, student = teacher / self.temperature, student / self.temperature
        log_p = teacher - _log_sum(teacher, among)[..., None]
        log_q = student - _log_sum(student, among)[..., None]
        p = jnp.exp(log_p)  # 0 where it is none
        entropy = jnp.where(p > 0, p * log_p, 0.0) if self.loss == "kl" else 0.0
        return self.temperature**2 * jnp.sum(entropy - jnp.where(p > 0, p * log_q, 0.0), axis=-1)

    def _anchored(self, model, carry) -> tuple[Array, Array, Carry]:
        """Soft cross-entropy of one anchor with adapters off and on, its tokens, and the carry."""
        state = carry.sums
        count = state["anchors"]["tokens"].shape[0]
        number = state["next"] % count
        row = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, number, 1), state["anchors"])
        base, head = _frozen(plain(model), row)
        columns = {"base": base, "weight": (row["document"] >= 0).astype(jnp.float32)}
        hidden, _, _ = model(row)
        how = {"constants": head, "tile_tokens": TILE}
        total, _ = model.head.reduce(_soft_cross_entropy, hidden, columns, **how)
        after = carry._replace(sums=state | {"next": state["next"] + 1})
        return total, jnp.sum(columns["weight"]), after


def _frozen(model: Any, batch: dict[str, Array]) -> tuple[Array, Head]:
    """Hidden states of a model that is not trained, and its head, gathered."""
    hidden, head = model(batch)[0], model.head
    weight = gathered(head.weight.astype(hidden.dtype), head.axes["weight"])
    return jax.lax.stop_gradient((hidden, Head(weight, cap=head.cap)))


def _logits(hidden: Array, head: Head) -> Array:
    return tile_logits(hidden, head.weight, head.cap)


def _soft_cross_entropy(logits, columns, head) -> tuple[Array, dict[str, Array]]:
    """Cross-entropy of logits with the distribution of a frozen model, of each token of a tile."""
    p = jax.nn.softmax(_logits(columns["base"], head), axis=-1)
    return (log_z(logits) - jnp.sum(p * logits, axis=-1)) * columns["weight"], {}


def _log_sum(x: Array, among: Array | None) -> Array:
    return jax.nn.logsumexp(x, axis=-1, where=among)


def _with_complement(log_share: Array) -> tuple[Array, Array]:
    """log p and log (1 - p) of a share, of which `LEAST` is left at least."""
    log_share = jnp.minimum(log_share, math.log1p(-LEAST))
    return log_share, jnp.log(-jnp.expm1(log_share))
