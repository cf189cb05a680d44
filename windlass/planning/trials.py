"""Trials of other layouts of a run, which change no result: their memory and time."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from windlass import units
from windlass.devices import chips, mesh
from windlass.devices.mesh import Mesh
from windlass.devices.mesh_choice import MeshChoice
from windlass.planning import memory as memories
from windlass.planning import time as times
from windlass.planning.memory import Memory
from windlass.planning.targets import Target
from windlass.planning.time import Time
from windlass.planning.traced import trace
from windlass.processes.garbage import uncollected
from windlass.program.described import Described, Divided
from windlass.run import checks

NEAR = 1.03  # of the limit: a guess may be this much too high


class Setting(NamedTuple):
    """Setting of a step: what decides how it is computed, and not its result."""

    split: tuple[tuple[str, int], ...]  # of the mesh, by axis
    accumulation: int
    remat: str
    layers_per_loop: int

    @property
    def groups(self) -> int:
        """Data-parallel shards: groups of devices with sequences of their own."""
        return math.prod(size for name, size in self.split if name != "tensor")


class Trial(NamedTuple):
    """A setting, and what a step takes with it."""

    setting: Setting
    memory: Memory
    time: Time | None

    @property
    def seconds(self) -> float:
        assert self.time is not None
        return self.time.seconds

    @property
    def most(self) -> float:
        """Bytes on each device, if the estimate is as much too low as it may be."""
        return self.memory.total * (1 + self.memory.error)


class Trials:
    """Settings of one run on one target, each tried once: that takes half a second."""

    def __init__(
        self,
        described: Described,
        target: Target,
        *,
        limit: int | None = None,  # of memory, where the devices themselves say it
        tell: Callable[[str], None] = lambda text: None,
    ):
        self.described, self.target = described, target
        self.first = setting(described)
        self.known: dict[Setting, Trial | None] = {}
        self.limit, self._tell = limit, tell

    def __call__(self, setting: Setting) -> Trial | None:
        """Trial of a setting; None where a run cannot be laid out so."""
        if setting not in self.known:
            self._tell(f"{self.target.name}, {self.count} settings tried")
            described = altered(self.described, setting)
            self.known[setting] = described and self._estimate(setting, described)
        return self.known[setting]

    def largest(
        self, setting: Setting, counts: list[int], below: float | None = None
    ) -> Trial | None:
        """A setting in the fewest microbatches that fit, of these; None where not one does.

        Also where it would take no less than `below` seconds. Smaller microbatches are never
        faster, and memory is nearly linear in their size: hardly more than three are tried.
        """
        if not counts or (whole := self(setting._replace(accumulation=counts[0]))) is None:
            return None
        if below is not None and whole.seconds >= below:
            return None
        if whole.memory.fits:
            return whole
        least = self(setting._replace(accumulation=counts[-1]))
        if least is None or not least.memory.fits:
            return None
        # `above` does not fit and `fitting` does; what is between is not known.
        above, fitting, between = whole, least, counts[1:-1]
        while between := [n for n in between if _could_fit(n, above, fitting)]:
            trial = self(setting._replace(accumulation=between[0]))
            if trial is None:
                between = between[1:]
            elif trial.memory.fits:
                fitting, between = trial, []
            else:
                above, between = trial, between[1:]
        return None if below is not None and fitting.seconds >= below else fitting

    @property
    def fitting(self) -> list[Trial]:
        """Trials that fit, of those that are known."""
        return [one for one in self.known.values() if one is not None and one.memory.fits]

    @property
    def least(self) -> Trial:
        """Trial with the least memory."""
        return min(filter(None, self.known.values()), key=lambda one: one.most)

    @property
    def count(self) -> int:
        """Number of trials."""
        return sum(one is not None for one in self.known.values())

    def counts(self, setting: Setting) -> list[int]:
        """Possible numbers of microbatches of a batch, fewest first."""
        return mesh.divisors(max(1, self.described.batches.rows // setting.groups))

    @uncollected()
    def _estimate(self, setting: Setting, described: Described) -> Trial:
        traced = trace(described, self.target)
        memory = memories.memory(traced)
        if self.limit is not None:
            memory = memory._replace(limit=self.limit)
        return Trial(setting, memory, times.time(traced))


def _could_fit(count: int, above: Trial, fitting: Trial) -> bool:
    """Return True if this many microbatches may fit, by interpolation between two others."""
    size, high, low = (1 / n for n in (count, above.setting[1], fitting.setting[1]))
    if not low < size < high:
        return False
    guess = fitting.most + (above.most - fitting.most) * (size - low) / (high - low)
    return guess <= NEAR * fitting.memory.limit


def setting(described: Described) -> Setting:
    """Setting of a run as it is laid out."""
    train = described.run.train
    split = tuple(
        (name, described.layout.split[name]) for name in mesh.axes(described.layout.split)
    )
    loops = described.layers_per_loop
    return Setting(split, described.batches.accumulation, train.remat, loops)


def altered(described: Described, setting: Setting) -> Described | None:
    """The same run and batch in another setting; None where it cannot be laid out so."""
    split, batch = dict(setting.split), described.batches.rows
    train = dataclasses.replace(
        described.run.train,
        batch=batch,
        batch_per_device=None,
        accumulation=setting.accumulation,
        microbatch=None,
        remat=setting.remat,
        layers_per_loop=setting.layers_per_loop,
    )
    run = dataclasses.replace(described.run, train=train, mesh=Mesh(**split))
    kinds = [device.device_kind for device in described.devices]
    islands = mesh.slices(described.devices)
    if checks.problems(run, described.chosen.kind, kinds, split, islands):
        return None
    return dataclasses.replace(described, run=run, layout=MeshChoice(split, None), divided=None)


def divided(described: Described, target: Target, limit: int | None = None) -> Described:
    """A run with the microbatches that `train.microbatch: auto` stands for on a target."""
    if not described.run.train.microbatch or described.divided is not None:
        return described
    chosen = divide(Trials(described, target, limit=limit))
    return dataclasses.replace(described, divided=chosen)


def divide(trials: Trials) -> Divided:
    """The fewest microbatches in which a step fits, and why not fewer."""
    first, share = trials.first, trials.described.batches.rows // trials.first.groups
    if not (trials.limit or chips.usable(trials.target.chip)):
        return Divided(1, "the whole batch at once, as the memory of such devices is not known")
    counts = trials.counts(first)
    trial = trials.largest(first, counts)
    if trial is None:
        least = trials(first._replace(accumulation=counts[-1]))
        if least is None:  # no setting at all can be laid out, which the run itself says better
            return Divided(1, "the whole batch at once")
        some = "1 sequence per device and microbatch, which may not fit"
        return Divided(counts[-1], f"{some}: {_usage(least.memory)}")
    count = trial.setting.accumulation
    some = units.counted(share // count, "sequence")
    if count == counts[0]:
        every = some if share == 1 else f"all {some}"
        return Divided(count, f"{every} of a device at once, {_usage(trial.memory)}")
    more = [one for n in counts[: counts.index(count)] if (one := _of(trials, first, n))]
    beyond = f"; {share // more[-1].setting.accumulation} need {units.gib(more[-1].most)}"
    return Divided(count, f"{some} per device and microbatch, {_usage(trial.memory)}{beyond}")


def _of(trials: Trials, setting: Setting, count: int) -> Trial | None:
    return trials.known.get(setting._replace(accumulation=count))


def _usage(memory: Memory) -> str:
    most = memory.total * (1 + memory.error)
    return f"at most {units.gib(most)} of {units.gib(memory.limit)} GiB"
