"""Optimizers. One file each; `optim.kind` in a recipe is the file's name.

A file defines two sections. Its `Rule` has `direction()`, the optax transformation of a gradient
into a direction, and the fields of that alone: a group of weights may have another rule than the
rest. Its `Optimizer` extends this and `Descent`, which adds what all have in common: one clip of
the whole gradient g before it, and after it decay and learning rate, each weight's own:

    w ← w - η_t (direction(g · min(1, clip_norm / |g|)) + λ w)

`rate(steps)` is the learning rate at a step of a run of that many. `build(steps, weights)` is the
whole transformation, for weights that may be abstract; its `update` is given the run's `step`, so
that a step that was left out does not shift the schedule.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from windlass.config import Open, section
from windlass.devices.axes import matrices
from windlass.errors import UserError
from windlass.layers.names import first_match, named, refuse_idle

Rate = Callable[[Int[Array, ""] | int], Float[Array, ""]]
Moment = Literal["float32", "bfloat16"]


@section
class Schedule:
    """Learning-rate schedule, as a share of the peak: warmup, plateau, decay."""

    warmup_steps: int | None = None  # of linear warmup; with warmup_share too, the fewer
    warmup_share: float | None = None  # warmup as a share of the run, rounded up
    start: float = 0.0  # where warmup begins, as a share of the peak
    shape: Literal["constant", "cosine", "linear"] = "cosine"  # of the decay
    decay_share: float = 1.0  # of the steps after warmup; a plateau comes before
    floor: float = 0.0  # where the decay ends, as a share of the peak

    def __post_init__(self):
        for name in ("warmup_share", "start", "decay_share", "floor"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it is a share, 0 to 1")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is {self.warmup_steps}; it is a count, 0 or more")

    def warmup(self, steps: int) -> int:
        share = self.warmup_share
        # Rounded first: 0.07 of 100 steps is 7.000000000000001 in binary, and would be 8.
        part = None if share is None else math.ceil(round(share * steps, 6))
        return min((n for n in (self.warmup_steps, part) if n is not None), default=0)

    def over(self, steps: int) -> Rate:
        """The share of the peak at step s of a run of `steps` steps."""
        rise = self.warmup(steps)
        fall = max(1.0, self.decay_share * (steps - rise))  # at least a step: rise may be all

        def share(step):
            s = jnp.asarray(step, jnp.float32)
            rising = self.start + (1 - self.start) * s / max(1, rise)
            return jnp.where(s < rise, rising, self.floor + (1 - self.floor) * left(s))

        def left(s):
            # A constant does not depend on the length of the run, so that a longer run of the
            # same program need not be compiled again.
            if self.shape == "constant":
                return jnp.ones_like(s)
            p = jnp.clip((s - (steps - fall)) / fall, 0.0, 1.0)
            return 1 - p if self.shape == "linear" else (1 + jnp.cos(jnp.pi * p)) / 2

        return share


@section
class Rule:
    """An update rule: the direction a gradient gives, and the state that it keeps."""

    shares: ClassVar[tuple[str, ...]] = ()  # fields from 0 to below 1
    sizes: ClassVar[tuple[str, ...]] = ()  # fields above 0
    clipped: ClassVar[bool] = True  # as a group: whether its gradient counts in the global norm

    def __post_init__(self):
        if refused := self.refused():
            raise ValueError(*refused)

    def refused(self) -> list[str]:
        """Problems of the values of fields."""
        shares = {name: getattr(self, name) for name in self.shares}
        return [
            *_not_above_0(self, *self.sizes),
            *(f"{k} is {x}; it is a share, below 1" for k, x in shares.items() if not 0 <= x < 1),
        ]

    def direction(self) -> optax.GradientTransformation:
        raise NotImplementedError

    def decayed(self, weight: Array, direction: Array) -> Array:
        """The part of a weight that decays, given its direction: usual, all of it."""
        return weight

    def rates(self, weights: PyTree, peak: float) -> list[tuple[str, float]]:
        """Title and learning rate of each weight, were it in no group."""
        return [("the rest", peak) for _ in jax.tree.leaves(weights)]


RULES = Open("windlass.optim", tag="kind", attribute="Rule")


@section
class Group:
    """Parameter group: weights, by name, with a rate, a decay or an optimizer of their own."""

    match: str  # a pattern of names, such as embedding.*
    learning_rate: float | None = None  # peak; null: that of the rest
    weight_decay: float | None = None  # not of norms and biases; null: that of the rest
    kind: Annotated[Any, RULES] | None = None  # another optimizer; null: that of the rest
    schedule: Schedule | None = None  # null: that of the rest
    # whether its gradient counts in clip_norm and is clipped; null: unless its kind never is
    clipped: bool | None = None

    def __post_init__(self):
        own = (self.learning_rate, self.weight_decay, self.kind, self.schedule, self.clipped)
        if own == (None,) * len(own):
            what = "learning_rate, weight_decay or kind would"
            raise ValueError(f"says nothing of {self.match}: {what}")
        refused = [*_not_above_0(self, "learning_rate"), *_below_0(self, "weight_decay")]
        if refused:
            raise ValueError(*refused)


class States(NamedTuple):
    """Optimizer states of a run whose groups have rules of their own: each of its weights alone."""

    rest: optax.OptState
    groups: tuple[optax.OptState, ...]


@section
class Descent(Rule):
    """Settings that every optimizer has."""

    learning_rate: float  # peak learning rate
    weight_decay: float = 0.1  # decoupled; norms and biases are never decayed
    clip_norm: float | None = 1.0  # gradient clipping by global norm; null: none
    groups: tuple[Group, ...] = ()  # parameter groups; the first that matches a weight has it
    schedule: Schedule = Schedule()

    def refused(self) -> list[str]:
        wrong = [*_not_above_0(self, "learning_rate"), *_below_0(self, "weight_decay")]
        wrong += super().refused()
        if self.clip_norm is not None and self.clip_norm <= 0:
            wrong.append(f"clip_norm is {self.clip_norm}; above 0, or null for no clipping")
        return wrong

    @property
    def kinds(self) -> str:
        """The names of its rule, and of those that groups have."""
        others = [f"{_kind(one.kind)} for {one.match}" for one in self.groups if one.kind]
        return ", ".join([_kind(self), *others])

    def rate(self, steps: int) -> Rate:
        share = self.schedule.over(steps)
        return lambda step: self.learning_rate * share(step)

    def build(self, steps: int, weights: PyTree) -> optax.GradientTransformationExtraArgs:
        clip = [] if self.clip_norm is None else [self._clip(self.clip_norm, weights)]
        return optax.chain(*clip, self._directions(weights), self._descend(steps, weights))

    def lines(self, weights: PyTree) -> list[str]:
        """Parameter groups with learning rate and decay, for people; none where all are one."""
        sizes: dict[tuple[str, float, float], int] = {}
        settings = zip(*self._settings(weights), strict=True)
        for (_, x), own in zip(named(weights), settings, strict=True):
            sizes[own] = sizes.get(own, 0) + x.size
        return [
            f"{title}: {size:,} parameters, learning_rate {peak:g}, weight_decay {decay:g}"
            for (title, peak, decay), size in sizes.items()
            if len(sizes) > 1
        ]

    def _clip(self, norm: float, weights: PyTree) -> optax.GradientTransformation:
        """The clip by the global norm of all weights but those of groups outside of it."""
        clip = optax.clip_by_global_norm(norm)
        groups = [
            group and _first(group.clipped, not group.kind or group.kind.clipped)
            for group in self._groups(weights)
        ]
        is_clipped = [one is not False for one in groups]
        if all(is_clipped):
            return clip
        return optax.masked(clip, jax.tree.unflatten(jax.tree.structure(weights), is_clipped))

    def _groups(self, weights: PyTree) -> list[Group | None]:
        """Each weight's group; None: it is in none."""
        return [None if i is None else self.groups[i] for i in self._chosen(weights)]

    def _chosen(self, weights: PyTree) -> list[int | None]:
        """The number of each weight's group; None: it is in none."""
        patterns = [group.match for group in self.groups]
        names = [name for name, _ in named(weights)]
        refuse_idle("optim.groups", patterns, names, "weight that is trained")
        chosen = [first_match(name, patterns) for name in names]
        for number, pattern in enumerate(patterns):
            if number not in chosen:
                raise UserError(
                    f"optim.groups: {pattern} matches only what groups before it match; "
                    "put it before them, or leave it out"
                )
        return chosen

    def _settings(self, weights: PyTree) -> tuple[list[str], list[float], list[float]]:
        """Title, learning rate and decay of each weight's group."""
        own = self.rates(weights, self.learning_rate)
        titles, peaks, decays = [], [], []
        for place, number in enumerate(self._chosen(weights)):
            title, peak = own[place]
            group = None if number is None else self.groups[number]
            if group is not None and group.kind is not None:
                peak = _first(group.learning_rate, self.learning_rate)
                _, peak = group.kind.rates(weights, peak)[place]
                title = f"{group.match} by {_kind(group.kind)}"
            elif group is not None:
                title, peak = group.match, _first(group.learning_rate, peak)
            titles.append(title)
            peaks.append(peak)
            decays.append(_first(group and group.weight_decay, self.weight_decay))
        return titles, peaks, decays

    def _directions(self, weights: PyTree) -> optax.GradientTransformation:
        """The direction of each weight by the rule of its group, which keeps no others' state."""
        own = {i: one.kind for i, one in enumerate(self.groups) if one.kind is not None}
        if not own:
            return self.direction()
        rules = [self.direction(), *(rule.direction() for rule in own.values())]
        places = {number: place for place, number in enumerate(own, start=1)}
        chosen = self._chosen(weights)
        rule_of = [0 if number is None else places.get(number, 0) for number in chosen]
        masks = [
            jax.tree.unflatten(jax.tree.structure(weights), [one == place for one in rule_of])
            for place in range(len(rules))
        ]

        def start(params):
            parts = (eqx.filter(params, mask) for mask in masks)
            rest, *groups = (rule.init(x) for rule, x in zip(rules, parts, strict=True))
            return States(rest, tuple(groups))

        def update(updates, state, params=None):
            results = [
                rule.update(eqx.filter(updates, mask), old, eqx.filter(params, mask))
                for rule, mask, old in zip(rules, masks, (state.rest, *state.groups), strict=True)
            ]
            directions, (rest, *groups) = zip(*results, strict=True)
            return eqx.combine(*directions), States(rest, tuple(groups))

        return optax.GradientTransformation(start, update)

    def _descend(self, steps: int, weights: PyTree) -> optax.GradientTransformationExtraArgs:
        """Decay, and the step down: each weight at its own rate, on the schedule of its group."""
        structure, groups = jax.tree.structure(weights), self._groups(weights)
        _, peaks, decays = self._settings(weights)
        is_decayed = jax.tree.leaves(matrices(weights))
        decays = [decay * is_one for decay, is_one in zip(decays, is_decayed, strict=True)]
        schedules = [_first(group and group.schedule, self.schedule) for group in groups]
        rules = [_first(group and group.kind, self) for group in groups]
        shares = {schedule: schedule.over(steps) for schedule in schedules}

        def update(updates, state, params=None, **extra):
            now = {schedule: share(extra["step"]) for schedule, share in shares.items()}

            def down(d, weight, peak, decay, schedule, rule):
                whole = d + decay * rule.decayed(weight, d) if decay else d
                return -now[schedule] * peak * whole

            leaves = zip(
                *(jax.tree.leaves(x) for x in (updates, params)),
                *(peaks, decays, schedules, rules),
                strict=True,
            )
            return structure.unflatten([down(*one) for one in leaves]), state

        return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


T = TypeVar("T")


def _kind(rule: Rule) -> str:
    return type(rule).__module__.rpartition(".")[2]


def _first(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def _not_above_0(section, *names: str) -> list[str]:
    values = {name: getattr(section, name) for name in names}
    low = {name: value for name, value in values.items() if value is not None and value <= 0}
    return [f"{name} is {value}; it must be above 0" for name, value in low.items()]


def _below_0(section, *names: str) -> list[str]:
    values = {name: getattr(section, name) for name in names}
    low = {name: value for name, value in values.items() if value is not None and value < 0}
    return [f"{name} is {value}; it must be 0 or more" for name, value in low.items()]
