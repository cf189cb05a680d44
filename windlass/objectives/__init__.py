"""Objectives: the loss a run minimises. One file each; `objective` in a recipe is its name.

A file defines `Objective`: a section that extends `BaseObjective` and can be called. Everything it
returns is a sum, so that microbatches, devices and evaluation batches add up without anybody
knowing what it counts.

What it keeps between steps is a `Carry`, made by `start` from the first batch and stored in
checkpoints. Frozen models that it computes with (a teacher) are its `helpers`: it says where their
weights are, and gets the modules. `finish` is a pure function of model and carry that gives the
model to use: it is called before every evaluation, sample and export, and never changes what is
trained further. Where that is all there is to learn, `has_gradient` is False.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from windlass.config.start import Start
from windlass.layers.auxiliary import Report, added, coefficients


class Tally(NamedTuple):
    """Sums that an objective returns, never means. The loss is `total / weight`."""

    total: Float[Array, ""]
    weight: Float[Array, ""]  # tokens, pairs, ...: what the loss is an average over
    sums: Report  # to report: a total and its weight
    extremes: dict[str, Float[Array, ""]]  # to report: maxima
    auxiliary: Report  # what `model(batch)` returned as such: `settled` adds it, no objective does

    def __add__(self, other: "Tally") -> "Tally":  # pyright: ignore[reportIncompatibleMethodOverride]
        total, weight, sums = jax.tree.map(jnp.add, self[:3], other[:3])
        extremes = jax.tree.map(jnp.maximum, self.extremes, other.extremes)
        return Tally(total, weight, sums, extremes, added(self.auxiliary, other.auxiliary))

    def metrics(self) -> dict[str, Float[Array, ""]]:
        """Averages, where a weight of zero gives zero."""
        sums = {"loss": (self.total, self.weight), **self.sums}
        means = {name: t / jnp.maximum(w, 1e-9) for name, (t, w) in sums.items()}
        return means | self.extremes


def settled(tally: Tally, model: Any) -> Tally:
    """The tally of a microbatch with the auxiliary losses that a model declares in its total.

    Over microbatches m the loss of a step is

        L = Σ_m w_m (l_m + Σ_k c_k A_mk / W_mk) / Σ_m w_m

    with the objective's loss l_m and weight w_m, and of auxiliary loss k the coefficient c_k, the
    sum A_mk and its weight W_mk: the same for any number of microbatches where A is a sum over
    tokens or rows, and W is proportional to w; a product of two means, as the balance loss of
    experts is, is that of each microbatch. Each is reported by its name, as are auxiliary metrics,
    and l as `objective_loss`.
    """
    losses = coefficients(model)
    if missing := [name for name in losses if name not in tally.auxiliary]:
        raise ValueError(
            f"the model declares the auxiliary loss {', '.join(missing)}, and the tally has none "
            "of that name; an objective gives a Tally all that `model(batch)` returned as auxiliary"
        )
    if double := [name for name in tally.auxiliary if name in tally.sums]:
        raise ValueError(f"{', '.join(double)} is reported by the model and by the objective")
    sums = tally.sums | tally.auxiliary
    if not losses:
        return tally._replace(sums=sums, auxiliary={})
    means = {name: total / jnp.maximum(w, 1e-9) for name, (total, w) in tally.auxiliary.items()}
    penalty = sum(factor * means[name] for name, factor in losses.items())
    sums |= {"objective_loss": (tally.total, tally.weight)}
    return tally._replace(total=tally.total + tally.weight * penalty, sums=sums, auxiliary={})


class Carry(NamedTuple):
    """State that an objective carries from one step to the next."""

    rows: PyTree = None  # a leading batch axis: split and joined with microbatches and devices
    sums: PyTree = None  # threaded through the microbatches


class Stage(NamedTuple):
    """A part of a run whose steps are a program of their own."""

    begins: float  # share of the run
    objective: "BaseObjective"  # whose call the steps are
    name: str  # to report


class BaseObjective(ABC):
    """An objective: its call, and the parts that most leave as they are."""

    columns: ClassVar[tuple[str, ...]]  # what it can read of a batch
    # columns that a format may offer and this one does without: they are not made
    spares: ClassVar[tuple[str, ...]] = ()
    unit: ClassVar[str] = "token"  # what its loss is an average over
    scores: ClassVar[int] = 0  # outputs of a head in place of the LM head; 0: that stays
    # False: nothing is trained by a gradient, and `finish` solves for weights from the carry; steps
    # then have no loss to report, no backward pass and no optimizer
    has_gradient: ClassVar[bool] = True
    # False: the carry of step 0 is the same whatever the first batch holds, and `start` gets none
    starts_from_data: ClassVar[bool] = True

    @abstractmethod
    def __call__(
        self,
        model: Any,
        batch: dict[str, Array],
        *,
        key: PRNGKeyArray | None,  # None: nothing random, as in evaluation
        carry: Carry,
        helpers: dict[str, Any],  # the modules of those it names
        step: Int[Array, ""],  # how many were done before this one
        steps: int,  # of the whole run: another number is another program where it is used
    ) -> tuple[Tally, Carry]: ...

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that a batch must hold, with the keys that this objective has."""
        return self.columns

    @property
    def helpers(self) -> dict[str, Start]:
        """Frozen models to compute with, each by the name of the field that says where it is."""
        return {}

    @property
    def identity(self) -> dict[str, str | int | float]:
        """Keys that the carry depends on: a run cannot be resumed with others."""
        return {}

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Parts of a run, in order. The last one, for which a run is planned, takes most."""
        return (Stage(0.0, self, "all"),)

    def problems(self, model: Any) -> list[str]:
        """Problems of a family's config that does not fit this objective, in words."""
        return []

    def problems_of_text(self, model: Any) -> list[str]:
        """Further problems where the targets are the next tokens of the row itself, in words."""
        return []

    def solved(self, model: Any) -> int:
        """Number of parameters that it solves for, of a model that may be abstract."""
        return 0

    def start(self, model: Any, batch: dict[str, Array]) -> Carry:
        """The carry of step 0, from the model as it computes and the first batch."""
        return Carry()

    def finish(self, model: Any, carry: Carry) -> Any:
        """The model to use at this step, such as one with a readout solved for."""
        return model

    def evaluate(
        self,
        model: Any,
        batch: dict[str, Array],
        *,
        carry: Carry,
        helpers: dict[str, Any],
        step: Int[Array, ""],
        steps: int,
    ) -> Tally:
        """The tally of held-out rows: the call with the run's sums, and rows that start anew."""
        carry = Carry(self.start(model, batch).rows, carry.sums)
        return self(model, batch, key=None, carry=carry, helpers=helpers, step=step, steps=steps)[0]

    def predictions(self, model: Any, batch: dict[str, Array]) -> dict[str, Array] | None:
        """Answers by row, arrays with a leading batch axis; None: this objective has none.

        `answers` are tokens [batch, passes, length] and `halt` [batch, passes] is how sure the
        model is of each, a probability: the last pass is what a model answers.
        """
        return None
