"""Changes to a run that is too large for its devices, and what comes of them."""

import dataclasses
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from windlass.config import Layers
from windlass.config.recipe import overlay
from windlass.config.sections import flat
from windlass.devices import chips, slices
from windlass.errors import UserError
from windlass.planning import memory as memories
from windlass.planning import targets
from windlass.planning import time as times
from windlass.planning.memory import Memory
from windlass.planning.targets import Target
from windlass.planning.time import Time
from windlass.planning.traced import Traced, laid_out, trace
from windlass.planning.trials import Setting, divided, setting
from windlass.run import ADAPTERS

ENOUGH = 3  # changes that are offered
HALVINGS = 6  # of the per-device batch
LARGER = 3  # slices that are tried
REMAT = ("none", "saved", "full")  # ever more is recomputed, and less is saved
Keys = dict[str, dict[str, Any]]


class Change(NamedTuple):
    """A change of keys or of target, with the memory and time of a step after it."""

    keys: str
    memory: Memory
    time: Time | None
    remark: str = ""
    setting: Setting | None = None  # of the same run on the same devices; None: another of either


class Tried(NamedTuple):
    """The changes that would fit, the fastest first; where there are none, the nearest to it."""

    changes: list[Change]
    least: Change | None


def several(traced: Traced, memory: Memory, too_low: float = 1.0) -> Tried:
    """Two or three changes after which a run fits, where there are that many.

    `too_low` is the ratio of the memory that it is known to need to the estimate.
    """
    fitting: list[Change] = []
    least: Change | None = None
    trial = _Alternatives(traced, memory.limit, too_low)
    for change in chain(trial.on_the_same(), trial.elsewhere(), trial.with_an_adapter()):
        if trial.fits(change):
            fitting.append(change)
        if least is None or change.memory.total < least.memory.total:
            least = change
        if len(fitting) == ENOUGH:
            break
    fitting.sort(key=lambda one: one.time.seconds if one.time else 0.0)
    return Tried(fitting, None if fitting else least)


class _Alternatives(NamedTuple):
    """A run that does not fit, to be tried otherwise."""

    traced: Traced
    limit: int
    too_low: float

    def fits(self, change: Change) -> bool:
        memory = change.memory
        return memory.fits and memory.total * self.too_low <= memory.limit

    def on_the_same(self) -> Iterator[Change]:
        """Same batch and devices: more rematerialisation, smaller microbatches, FSDP over all."""
        split = self.traced.split
        less, remat = list(self._halved()), self.traced.described.run.train.remat
        again: list[Keys] = [{"train": {"remat": word}} for word in REMAT[REMAT.index(remat) + 1 :]]
        singles = [again, less]
        if split["data"] > 1:
            pieces = split | {"data": 1, "fsdp": split["data"] * split["fsdp"]}
            singles.append([{"mesh": pieces}])
        changes = [one for keys in singles if (one := self._smallest(keys)) is not None]
        yield from changes
        if less and again and not any(map(self.fits, changes)):
            both = self._smallest([overlay(again[-1], keys) for keys in less])
            yield from [] if both is None else [both]

    def elsewhere(self) -> Iterator[Change]:
        """Larger targets: the next larger slices, or larger or more GPUs."""
        for target in _larger(self.traced.target):
            change = self._estimate(self.traced.described.layers, target, f"on {target.name}")
            if change is not None:
                yield change

    def with_an_adapter(self) -> Iterator[Change]:
        if not self.traced.described.run.adapter:
            change = self._changed({"adapter": {"kind": ADAPTERS.usual}})
            if change is not None:
                remark = "trains an adapter beside the model, as another run"
                yield change._replace(remark=remark, setting=None)

    def _halved(self) -> Iterator[Keys]:
        """Keys for smaller microbatches, as many more of them."""
        batches, train = self.traced.batches, self.traced.described.run.train
        for halvings in range(1, HALVINGS + 1):
            parts = 2**halvings
            if batches.per_device % parts:
                return
            keys: dict[str, Any] = {"microbatch": None} if train.microbatch else {}
            keys["accumulation"] = batches.accumulation * parts
            if train.batch_per_device is not None:
                keys["batch_per_device"] = batches.per_device // parts
            yield {"train": keys}

    def _smallest(self, every: list[Keys]) -> Change | None:
        """First of ever greater changes that is enough; where none is, the last."""
        last = self._changed(every[-1]) if every else None
        if last is None or not self.fits(last):
            return last
        before = (self._changed(keys) for keys in every[:-1])
        return next((one for one in before if one is not None and self.fits(one)), last)

    def _changed(self, keys: Keys) -> Change | None:
        layers, target = self.traced.described.layers, self.traced.target
        overrides = overlay(layers.command_line, keys)
        there = dataclasses.replace(layers, command_line=overrides)
        change = self._estimate(there, target, " ".join(words(keys)), self.limit)
        return change and change._replace(memory=change.memory._replace(limit=self.limit))

    def _estimate(
        self, layers: Layers, target: Target, how: str, limit: int | None = None
    ) -> Change | None:
        """Estimate of a changed run; None where it cannot be laid out so."""
        try:
            described = laid_out(layers, target)
            # Groups of an optimizer are matched with weights no earlier than here.
            again = trace(divided(described, target, limit), target)
        except UserError:
            return None
        batch, before = again.batches.rows, self.traced.batches.rows
        remark = f"a step has {batch} sequences there, not {before}" if batch != before else ""
        is_same = batch == before and target == self.traced.target
        same = setting(again.described) if is_same else None
        return Change(how, memories.memory(again), times.time(again), remark, same)


def words(keys: Keys) -> list[str]:
    """Overrides on a command line, of keys of a recipe."""
    plain = {key: "null" if value is None else value for key, value in flat(keys).items()}
    return [f"{key}={value}" for key, value in plain.items()]


def _larger(target: Target) -> Iterator[Target]:
    if target.chip.kind == "tpu":
        same = [one for one in slices.every() if one.device_kind in target.chip.device_kinds]
        larger = sorted((one for one in same if one.devices > target.devices), key=_devices)
        yield from (targets.find(one.name) for one in larger[:LARGER])
    elif target.chip.kind == "gpu":
        chip, count = target.chip, 2 * target.devices
        joined = [one for one in chips.every() if one.kind == "gpu" and one.axes]
        larger = [one for one in joined if chips.usable(one) > chips.usable(chip)]
        if target.devices == 1 and larger:
            yield targets.find(min(larger, key=chips.usable).slug)
        while count <= chip.per_host:
            yield targets.find(f"{count}x{chip.slug}")
            count *= 2


def _devices(one: slices.Slice) -> int:
    return one.devices
