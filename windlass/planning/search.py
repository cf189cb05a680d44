"""Search for the fastest settings that fit: microbatches, rematerialisation, mesh."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from rich.console import Console

from windlass.config import Layers
from windlass.config.recipe import overlay
from windlass.config.sections import flat
from windlass.config.text import write
from windlass.devices import mesh, mesh_choice
from windlass.devices.mesh import Mesh
from windlass.devices.mesh_choice import Rows
from windlass.errors import UserError
from windlass.planning import changes
from windlass.planning.plan import Plan, PlanRequest, planned
from windlass.planning.prices import Prices
from windlass.planning.targets import Target
from windlass.planning.traced import laid_out
from windlass.planning.trials import NEAR, Setting, Trial, Trials
from windlass.program.described import Described

REMATS = ("none", "saved", "full")
WHOLE = 8  # layers at most that are tried all in one iteration: more take long to compile
MARGIN = 0.02  # of a step that must be gained: less is no reason to change a recipe


@dataclass(frozen=True)
class Best:
    """Best settings for a recipe on a target, beside the recipe's own."""

    plan: Plan  # with the best settings
    before: Plan  # as the recipe says
    keys: dict[str, Any]  # to write in the recipe; empty: nothing is better by much
    trials: int  # settings that were planned
    kind: str | None = None  # of device, where the recipe says something else for that alone

    @property
    def yaml(self) -> str:
        """The keys as lines of a recipe."""
        keys = self.keys if self.kind is None else {"by_device": {self.kind: self.keys}}
        return write(keys).rstrip()

    @property
    def words(self) -> list[str]:
        """The keys as overrides on a command line."""
        return changes.words(self.keys)

    @property
    def faster(self) -> float | None:
        """Speed-up over the recipe's own settings; None where those do not fit."""
        if self.before.fits != "yes" or self.before.time is None or self.plan.time is None:
            return None
        return self.before.time.seconds / self.plan.time.seconds

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            **self.plan.as_dict(),
            "best": {"keys": flat(self.keys), "yaml": self.yaml if self.keys else ""},
            "times_as_fast": self.faster,
            "settings_looked_at": self.trials,
            "before": self.before.as_dict(),
        }


class Fixed(NamedTuple):
    """Settings that the command line fixes, which the search leaves as they are."""

    rows: bool  # of a microbatch
    each: bool  # per-device batch
    remat: bool
    loops: bool
    mesh: bool


def best(
    layers: Layers,
    target: Target,
    known: Prices,
    request: PlanRequest,
    console: Console | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Best:
    """Fastest settings on a target, of those that fit and compute the same.

    Devices cost the same however they are used, so that they are the cheapest, too. Where nothing
    fits they are those that come nearest to it.
    """
    if not target.chip.peak:
        raise UserError(
            f"no speed estimate for {target.chip.name}s, so --best cannot rank settings there; "
            "train.microbatch=auto chooses the largest microbatch that fits"
        )
    described, plain = laid_out(layers, target), request._replace(compiles=False, tries=True)
    before = planned(described, target, known, plain, console)
    trials = Trials(described, target, tell=tell)
    first = trials.first._replace(accumulation=before.settings["accumulation"])
    trials.known[first] = Trial(first, before.memory, before.time)
    changes = before.tried.changes if before.tried else []
    offered = [Trial(one.setting, one.memory, one.time) for one in changes if one.setting]
    trial = Search(trials, first, _fixed(layers), offered).best()
    keys = _keys(described, first, trial.setting)
    if not keys and not request.compiles:
        return Best(before, before, {}, trials.count)
    there = laid_out(_changed(layers, keys), target)
    if there.layout.split != dict(trial.setting.split):
        # With these microbatches the recipe would get another mesh than the one that was tried.
        keys |= {"mesh": dict(trial.setting.split)}
        there = laid_out(_changed(layers, keys), target)
    plan = planned(there, target, known, request._replace(tries=False), console)
    special = flat(layers.by_device.get(target.chip.kind, {}))
    kind = target.chip.kind if any(key in special for key in flat(keys)) else None
    return Best(plan, before, keys, trials.count, kind)


class Search:
    """Hill climbing: a change of one setting is kept if a step is faster by `MARGIN`.

    `offered` are trials of the plan itself, which has looked for changes that make it fit.
    """

    def __init__(self, trials: Trials, first: Setting, fixed: Fixed, offered: Sequence[Trial] = ()):
        self.trials, self.first, self.fixed = trials, first, fixed
        trials.known |= {one.setting: one for one in offered if self._keeps(one.setting)}

    def best(self) -> Trial:
        now = self.trials(self.first)
        assert now is not None
        if not now.memory.fits:
            fitting = [*self.trials.fitting, *islice(self._fitting(), 1)]
            now = min(fitting, key=lambda one: one.seconds, default=None)
        if now is None:  # and so nothing fits
            return self.trials.least
        while better := next(self._better(now), None):
            now = better
        return now

    def _better(self, now: Trial) -> Iterator[Trial]:
        below = (1 - MARGIN) * now.seconds
        for setting in self._near(now.setting):
            if setting.split != now.setting.split and not self._promises(setting, now, below):
                continue
            trial = self.trials.largest(setting, self._counts(setting), below)
            if trial is not None:
                yield trial

    def _promises(self, setting: Setting, now: Trial, below: float) -> bool:
        """Return True if another mesh is faster with as many microbatches, or may fit in fewer."""
        same = self.trials(setting)
        if same is None or same.seconds < below:
            return True
        fewer = [count for count in self._counts(setting) if count < setting.accumulation]
        if not fewer:
            return False
        more = self.trials(now.setting._replace(accumulation=fewer[-1]))
        return more is None or same.most + more.most - now.most <= NEAR * now.memory.limit

    def _near(self, now: Setting) -> Iterator[Setting]:
        """Neighbours of a setting, which differ in one thing; and itself, in other microbatches."""
        yield now
        if not self.fixed.remat:
            yield from (now._replace(remat=word) for word in REMATS if word != now.remat)
        splits = self._splits()
        yield from (now._replace(split=one) for one in splits if _is_near(one, now.split))
        # Some of the layers in an iteration take more memory than one, and no less time.
        layers = getattr(self.trials.described.run.model, "layers", 1)
        if not self.fixed.loops:
            yield from (now._replace(layers_per_loop=n) for n in {1, layers} if n <= WHOLE)

    def _fitting(self) -> Iterator[Trial]:
        """Settings that fit, where the recipe's do not, from small changes to larger ones."""
        here = self.first
        remats = [here.remat] if self.fixed.remat else REMATS[REMATS.index(here.remat) :]
        splits = [here.split, *sorted(self._splits(), key=_copies)]
        for split in splits:
            for remat in remats if split == here.split else remats[-1:]:
                setting = here._replace(split=split, remat=remat)
                trial = self.trials.largest(setting, self._counts(setting))
                if trial is not None:
                    yield trial

    def _keeps(self, setting: Setting) -> bool:
        """Return True if a setting is what the command line fixes."""
        fixed, first = self.fixed, self.first
        return (
            (not fixed.remat or setting.remat == first.remat)
            and (not fixed.mesh or setting.split == first.split)
            and (not fixed.rows or setting.accumulation in self._counts(setting))
        )

    def _counts(self, setting: Setting) -> list[int]:
        counts = self.trials.counts(setting)
        if not self.fixed.rows:
            return counts
        accumulation = self.first.accumulation
        if self.fixed.each:
            accumulation = accumulation * self.first.groups // setting.groups
        return [accumulation] if accumulation in counts else []

    def _splits(self) -> list[tuple[tuple[str, int], ...]]:
        described = self.trials.described
        if self.fixed.mesh or len(described.devices) == 1:
            return []
        rows = Rows(described.batches.rows, None)
        sizes = described.run.model.sizes
        able = mesh_choice.possible(Mesh(), len(described.devices), rows, sizes)
        return [tuple((name, split[name]) for name in mesh.axes(split)) for split in able]


def _is_near(one: tuple[tuple[str, int], ...], other: tuple[tuple[str, int], ...]) -> bool:
    """Return True if devices move from one axis of the mesh to one other."""
    return sum(a != b for a, b in zip(one, other, strict=True)) == 2


def _copies(split: tuple[tuple[str, int], ...]) -> tuple[int, int]:
    """Data-parallel copies, then tensor-parallel shards: the fewer, the less memory."""
    sizes = dict(split)
    return sizes["data"], sizes["tensor"]


def _changed(layers: Layers, keys: dict[str, Any]) -> Layers:
    return dataclasses.replace(layers, command_line=overlay(layers.command_line, keys))


def _fixed(layers: Layers) -> Fixed:
    keys = {key.removeprefix("train.") for key in flat(layers.command_line)}
    each = "batch_per_device" in keys
    rows = each or "accumulation" in keys or "microbatch" in keys
    is_laid = any(key.startswith("mesh.") for key in keys)
    return Fixed(rows, each, "remat" in keys, "layers_per_loop" in keys, is_laid)


def _keys(described: Described, first: Setting, setting: Setting) -> dict[str, Any]:
    """Keys of a setting, where the recipe has other values."""
    train: dict[str, Any] = {}
    recipe, batch = described.run.train, described.batches.rows
    if (first.accumulation, first.groups) != (setting.accumulation, setting.groups):
        if recipe.microbatch is not None:
            train["microbatch"] = None
        if recipe.batch_per_device is not None:
            train["batch_per_device"] = batch // (setting.accumulation * setting.groups)
        train["accumulation"] = setting.accumulation
    if setting.remat != recipe.remat:
        train["remat"] = setting.remat
    if setting.layers_per_loop != described.layers_per_loop:
        train["layers_per_loop"] = setting.layers_per_loop
    if setting.accumulation == (recipe.accumulation or 1) and recipe.microbatch is None:
        # As many microbatches as the recipe has already, or as the default, one.
        train.pop("accumulation", None)
    split = {} if setting.split == first.split else dict(setting.split)
    return {name: keys for name, keys in (("train", train), ("mesh", split)) if keys}
