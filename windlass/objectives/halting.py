"""Deep supervision with adaptive halting: recursive models are trained a pass at a time.

https://arxiv.org/abs/2506.21734 (HRM) and https://arxiv.org/abs/2510.04871 (TRM)
"""

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from windlass.config import below_one, section
from windlass.devices.axes import shard
from windlass.layers.head import TILE_TOKENS, Head
from windlass.layers.recurrence import where
from windlass.layers.softmax import log_z, pick
from windlass.objectives import BaseObjective, Carry, Stage, Tally

TILE_LOGITS = TILE_TOKENS * 2**15  # of a small vocabulary the whole batch is one tile


class Judged(NamedTuple):
    """Answers of a pass beside their targets, by row; and the loss of all rows."""

    total: Float[Array, ""]  # cross-entropy, each row's the mean of its targets
    counts: Float[Array, " batch"]  # 1 for each row that has a target
    answers: Int[Array, "batch seq"]
    accuracy: Float[Array, " batch"]  # share of the targets that are met
    is_exact: Bool[Array, " batch"]  # all targets are met


@section
class Depth:
    """A stage of a depth curriculum: the cycles of a pass in the first part of a run."""

    until: float  # share of the run at which the next stage begins
    h_cycles: int  # at most model.h_cycles
    l_cycles: int  # at most model.l_cycles

    def __post_init__(self):
        wrong = below_one(self, "h_cycles", "l_cycles")
        if not 0 < self.until < 1:
            wrong.append(f"until is {self.until}; it is a share of the run, above 0 and below 1")
        if wrong:
            raise ValueError(*wrong)

    @property
    def cycles(self) -> tuple[int, int]:
        return self.h_cycles, self.l_cycles


@section
class Objective(BaseObjective):
    """One pass a step, a loss after each, and a halting decision by row.

    A step lets every row of the batch think for one more pass from the states that the last one
    left. Rows that have halted take the next row of the data and fresh states; the others keep
    what they were given, and what the batch has in their place is passed over. With the
    cross-entropy ℓ of a row, the mean of its targets, and the logits q of halting and continuing

        L = ℓ + w (BCE(q_halt, all targets met) + BCE(q_continue, σ(max q of the next pass)))

    where w is `halt_weight` and the last term is there with `continues`. A row halts after the last
    pass, or where q_halt > 0 (with `continues`, q_halt > q_continue), but not before `minimum`
    passes, nor before as many as were drawn for it, with probability `exploration` one of 2 to the
    last. A column `iterations` says by row after how many passes to halt at the latest.

    Where a model has a probe of its scratch state, the cross-entropy of the probe is added, whose
    gradient ends there: `reasoning_accuracy` is the share of targets that are read off the state.
    """

    # stablemax: softmax with s(x) = x + 1 from 0 on, and 1 / (1 - x) below, in place of exp
    loss: Literal["stablemax", "softmax"] = "stablemax"
    label_smoothing: float = 0.0  # the share of a target that is spread over the vocabulary
    halt_weight: float = 0.5  # of the loss of q beside the cross-entropy
    continues: bool = False  # also train q_continue, by one more pass a step without a gradient
    exploration: float = 0.1  # probability that a number of passes is drawn for a row
    # what is drawn. least: the fewest passes (HRM, TRM); exact: when to halt (Athena)
    drawn: Literal["least", "exact"] = "least"
    minimum: int = 1  # passes before q may halt a row
    # The first rows of a run halt in turn, so that every step has rows of all passes; otherwise
    # all begin and halt together until q tells them apart
    staggered: bool = False
    # batches of rows in flight, of which each step lets one think, in turn; with 1 a row is learned
    # from in consecutive steps, and at a high learning rate by heart
    pool: int = 1
    seed: int = 0  # random seed of exploration
    # depth curriculum: stages with fewer cycles, after which the model's own are taken; every stage
    # compiles a step of its own
    curriculum: tuple[Depth, ...] = ()

    columns: ClassVar[tuple[str, ...]] = (
        *("tokens", "targets", "weight", "position", "document", "identifier", "iterations"),
    )
    unit: ClassVar[str] = "row"

    def __post_init__(self):
        wrong = []
        if not 0 <= self.label_smoothing < 1:
            wrong.append(
                f"label_smoothing is {self.label_smoothing}; it is a share, 0 or more and below 1"
            )
        if self.halt_weight < 0:
            wrong.append(f"halt_weight is {self.halt_weight}; it is a factor, 0 or more")
        if not 0 <= self.exploration <= 1:
            wrong.append(f"exploration is {self.exploration}; it is a probability, 0 to 1")
        wrong += below_one(self, "minimum", "pool")
        ends = [depth.until for depth in self.curriculum]
        if any(later <= sooner for sooner, later in pairwise(ends)):
            wrong.append(
                f"curriculum has stages until {', '.join(map(str, ends))} of the run; each must "
                "end after the one before it"
            )
        if wrong:
            raise ValueError(*wrong)

    @property
    def reads(self) -> tuple[str, ...]:
        return "tokens", "position", "document"

    def problems(self, model):
        passes = getattr(model, "passes", None)
        if passes is None:
            return ["it does not think in passes, and has nothing to halt"]
        if self.minimum > passes:
            return [f"minimum is {self.minimum}, and model.passes is {passes}"]
        most = (model.h_cycles, model.l_cycles)
        return [
            f"curriculum until {depth.until} has h_cycles {depth.h_cycles} and l_cycles "
            f"{depth.l_cycles}, and the model, which is the last and deepest stage, {most[0]} and "
            f"{most[1]}"
            for depth in self.curriculum
            if depth.h_cycles > most[0] or depth.l_cycles > most[1]
        ]

    @property
    def stages(self):
        # A call takes the depth of the first stage that is left.
        begins = (0.0, *(depth.until for depth in self.curriculum))
        names = [f"{d.h_cycles} H × {d.l_cycles} L cycles" for d in self.curriculum]
        return tuple(
            Stage(share, dataclasses.replace(self, curriculum=self.curriculum[i:]), name)
            for i, (share, name) in enumerate(zip(begins, [*names, "all cycles"], strict=True))
        )

    @property
    def _cycles(self) -> tuple[int, int] | None:
        """H and L cycles of a training pass; None: the model's own."""
        return self.curriculum[0].cycles if self.curriculum else None

    def problems_of_text(self, model):
        wrong = []
        if not model.causal:
            wrong.append(
                "it is bidirectional, the targets are the next tokens of the same rows, and so it "
                "would copy them: model.bidirectional=false without model.mixing, or data with "
                "targets of their own"
            )
        if getattr(model, "prefix", None) is not None:
            wrong.append(
                "it has a prefix in front of each row, and packed rows hold several documents: "
                "model.prefix=null"
            )
        return wrong

    def start(self, model, batch):
        """Every row begins halted, so that the first step gives it its data: [batch, pool, ...]."""
        numbers = shard(jnp.arange(len(batch["tokens"]), dtype=jnp.int32), "batch")
        rows = {
            "state": model.fresh(batch),
            "steps": jnp.zeros_like(numbers),
            "halted": jnp.ones_like(numbers, bool),
            "data": self._data(batch),
            "number": numbers,  # in the batch, whatever microbatch the row is of
        }
        return Carry(jax.tree.map(lambda x: jnp.stack([x] * self.pool, axis=1), rows))

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        place = step % self.pool
        rows = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, place, 1, False), carry.rows)
        data = where(rows["halted"], self._data(batch), rows["data"])
        state = where(rows["halted"], model.fresh(batch), rows["state"])
        taken = jnp.where(rows["halted"], 0, rows["steps"]) + 1
        thought = model.think(data, state, cycles=self._cycles)
        judged = self._judged(model.head, thought.hidden, data)
        q = thought.q
        target = judged.is_exact | _is_due(data, taken)
        losses = {"halt_loss": _cross_entropy(q[:, 0], target.astype(jnp.float32))}
        if self.continues:
            losses["continue_loss"] = self._continued(model, data, thought, taken)
        whole = jnp.sum(judged.counts)
        sums = {name: jnp.sum(values * judged.counts) for name, values in losses.items()}
        total = judged.total + self.halt_weight * sum(sums.values())
        halted = self._halted(model, data, jax.lax.stop_gradient(q), taken, step, rows["number"])
        metrics = {name: (value, whole) for name, value in sums.items()}
        metrics |= {"lm_loss": (judged.total, whole), "halted": (_count(halted, judged), whole)}
        weight = jnp.where(halted, judged.counts, 0.0)
        metrics |= _means(judged, q, target, weight, taken)
        if thought.scratch is not None:
            probed = self._judged(model.reasoning, thought.scratch, data)
            total += probed.total
            metrics |= _probe(probed, weight)
        rows = rows | {"state": thought.state, "steps": taken, "halted": halted, "data": data}
        pool = jax.tree.map(
            lambda every, one: jax.lax.dynamic_update_index_in_dim(every, one, place, 1),
            carry.rows,
            rows,
        )
        return Tally(total, whole, metrics, {}, thought.auxiliary), carry._replace(rows=pool)

    def evaluate(self, model, batch, *, carry, helpers, step, steps):
        """All passes, and the accuracy after each: `exact_1` to `exact_4`, `exact_01` to `_16`."""
        data = self._data(batch)

        def one(state, _):
            thought = model.think(data, state, refines=True)
            judged = self._judged(model.head, thought.hidden, data)
            halt = _cross_entropy(thought.q[:, 0], judged.is_exact.astype(jnp.float32))
            taken = jnp.zeros_like(thought.q[:, 0])
            means = _means(judged, thought.q, judged.is_exact, judged.counts, taken)
            del means["steps"]
            if thought.scratch is not None:
                probed = self._judged(model.reasoning, thought.scratch, data)
                means |= _probe(probed, judged.counts)
            lost = jnp.sum(halt * judged.counts)
            return thought.state, (judged.total, lost, judged.counts, means, thought.auxiliary)

        _, by_pass = jax.lax.scan(one, model.fresh(batch), length=model.passes)
        exact, weights = by_pass[3]["exact_accuracy"]
        total, lost, counts, means, auxiliary = jax.tree.map(lambda x: x[-1], by_pass)
        whole = jnp.sum(counts)
        means |= {"lm_loss": (total, whole), "halt_loss": (lost, whole)}
        digits = len(str(model.passes))  # so that their order by name is that of the passes
        means |= {f"exact_{i + 1:0{digits}}": (exact[i], weights[i]) for i in range(model.passes)}
        return Tally(total + self.halt_weight * lost, whole, means, {}, auxiliary)

    def predictions(self, model, batch):
        data = self._data(batch)

        def one(state, _):
            thought = model.think(data, state, refines=True)
            answers = self._judged(model.head, thought.hidden, data).answers
            return thought.state, (answers, jax.nn.sigmoid(thought.q[:, 0]))

        _, (answers, halt) = jax.lax.scan(one, model.fresh(batch), length=model.passes)
        return {"answers": jnp.moveaxis(answers, 0, 1), "halt": jnp.moveaxis(halt, 0, 1)}

    def _data(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Columns of a batch that a row keeps; next tokens are the targets where it has none."""
        data = {name: batch[name] for name in self.columns if name in batch}
        if "targets" not in data:
            tokens, document = data["tokens"], data["document"]
            data["targets"] = jnp.roll(tokens, -1, axis=1)
            goes_on = (document == jnp.roll(document, -1, axis=1)) & (document >= 0)
            goes_on &= jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1
            weight = data.get("weight", jnp.ones_like(tokens, jnp.float32))
            data["weight"] = jnp.where(goes_on, weight, 0.0)
        return data

    def _judged(self, head: Head, hidden: Array, data: dict[str, Array]) -> Judged:
        weight, targets = data["weight"], data["targets"]
        counts = (jnp.sum(weight, axis=1) > 0).astype(jnp.float32)
        share = weight / jnp.maximum(jnp.sum(weight, axis=1, keepdims=True), 1e-9)
        tile = max(TILE_TOKENS, TILE_LOGITS // head.weight.shape[0])
        columns = {"targets": targets, "share": share}
        total, _ = head.reduce(self._tile, hidden, columns, tile_tokens=tile)
        none = jnp.zeros((*targets.shape, 0), jnp.int32)
        still = jax.lax.stop_gradient(hidden)
        answers = head.candidates(still, 1, none, tile_tokens=tile).ids[..., 0]
        is_right = (answers == targets) | (weight == 0)
        is_asked = (weight > 0).astype(jnp.float32)
        right = jnp.sum(jnp.where(is_right, is_asked, 0.0), axis=1)
        accuracy = right / jnp.maximum(jnp.sum(is_asked, axis=1), 1.0)
        return Judged(total, counts, answers, accuracy, jnp.all(is_right, axis=1))

    def _tile(self, logits, columns):
        # With t(x) = log s(x) stablemax is a softmax: both have one form, which cannot overflow.
        logits = log_stable(logits) if self.loss == "stablemax" else logits
        z = log_z(logits)
        loss = z - pick(logits, columns["targets"])
        if self.label_smoothing:
            uniform = z - jnp.mean(logits, axis=-1)
            loss += self.label_smoothing * (uniform - loss)
        return loss * columns["share"], {}

    def _continued(self, model: Any, data: dict, thought: Any, taken: Array) -> Array:
        """BCE(q_continue, σ(max q)), with q of the next pass; of the last one, its q_halt."""
        following = model.think(data, thought.state, cycles=self._cycles).q
        following = jax.lax.stop_gradient(following)
        best = jnp.where(taken >= model.passes, following[:, 0], jnp.max(following, axis=1))
        return _cross_entropy(thought.q[:, 1], jax.nn.sigmoid(best))

    def _halted(
        self,
        model: Any,
        data: dict[str, Array],
        q: Float[Array, "batch 2"],
        taken: Int[Array, " batch"],
        step: Int[Array, ""],
        number: Int[Array, " batch"],
    ) -> Bool[Array, " batch"]:
        """The rows that are done after so many passes."""
        last = model.passes
        chooses = q[:, 0] > q[:, 1] if self.continues else q[:, 0] > 0
        halts = (chooses | _is_due(data, taken)) & (taken >= self.minimum)
        if self.exploration and last > 1:
            explores, drawn = self._drawn(last, step, number)
            if self.drawn == "least":
                halts &= ~explores | (taken >= drawn)
            else:
                halts = jnp.where(explores, taken >= drawn, halts)
        if self.staggered:
            halts |= step // self.pool == number % last
        return halts | (taken >= last)

    def _drawn(
        self, last: int, step: Int[Array, ""], number: Int[Array, " batch"]
    ) -> tuple[Bool[Array, " batch"], Int[Array, " batch"]]:
        """Rows that explore, and a number of passes for each: the same in any microbatch."""
        key = jax.random.fold_in(jax.random.key(self.seed), step)

        def draw(number):
            own, other = jax.random.split(jax.random.fold_in(key, number))
            passes = jax.random.randint(other, (), 2, last + 1, jnp.int32)
            return jax.random.bernoulli(own, self.exploration), passes

        return jax.vmap(draw)(number)


def log_stable(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """log s(x) of stablemax: log(1 + x) from 0 on, and -log(1 - x) below."""
    is_low = x < 0
    return jnp.log1p(jnp.where(is_low, 0.0, x)) - jnp.log1p(jnp.where(is_low, -x, 0.0))


def _is_due(data: dict[str, Array], taken: Int[Array, " batch"]) -> Bool[Array, " batch"]:
    """Rows that have thought for as many passes as the data asks for."""
    if "iterations" not in data:
        return jnp.zeros_like(taken, bool)
    return taken >= data["iterations"]


def _cross_entropy(q: Float[Array, " batch"], target: Float[Array, " batch"]) -> Array:
    """Binary cross-entropy of a logit."""
    return jax.nn.softplus(q) - q * target


def _count(flags: Bool[Array, " batch"], judged: Judged) -> Float[Array, ""]:
    return jnp.sum(jnp.where(flags, judged.counts, 0.0))


def _probe(probed: Judged, weight: Array) -> dict:
    """Metrics of the probe of the scratch state."""
    pair = (jnp.sum(probed.accuracy * weight), jnp.sum(weight))
    return {"reasoning_accuracy": jax.tree.map(jax.lax.stop_gradient, pair)}


def _means(judged: Judged, q: Array, target: Array, weight: Array, taken: Array) -> dict:
    """Metrics over rows of a weight: totals, each with the sum of the weights."""
    values = {
        "accuracy": judged.accuracy,
        "exact_accuracy": judged.is_exact.astype(jnp.float32),
        "q_halt_accuracy": ((q[:, 0] >= 0) == target).astype(jnp.float32),
        "steps": taken.astype(jnp.float32),
    }
    whole = jnp.sum(weight)
    means = {name: (jnp.sum(value * weight), whole) for name, value in values.items()}
    return jax.tree.map(jax.lax.stop_gradient, means)
