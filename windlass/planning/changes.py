"""What can be changed in a run that is too large for its devices, and what comes of that."""

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
from windlass.planning.trials import divided
from windlass.run import ADAPTERS

ENOUGH = 3  # changes that are offered
HALVINGS = 6  # of the rows that a device computes at a time
LARGER = 3  # slices that are tried
REMAT = ("none", "saved", "full")  # ever more is computed again, and less is held
Keys = dict[str, dict[str, Any]]


class Change(NamedTuple):
    """Keys to change, or another place to train in, and what a step would take then."""

    keys: str
    memory: Memory
    time: Time | None
    remark: str = ""


class Tried(NamedTuple):
    """The changes that would fit, the fastest first; where there are none, the nearest to it."""

    changes: list[Change]
    least: Change | None


def several(traced: Traced, memory: Memory, too_low: float = 1.0) -> Tried:
    """Two or three changes after which a run fits, where there are so many.

    `too_low` is how many times as much it is known to need as the estimate says.
    """
    found: list[Change] = []
    least: Change | None = None
    trial = _Alternatives(traced, memory.limit, too_low)
    for change in chain(trial.on_the_same(), trial.elsewhere(), trial.with_an_adapter()):
        if trial.fits(change):
            found.append(change)
        if least is None or change.memory.total < least.memory.total:
            least = change
        if len(found) == ENOUGH:
            break
    found.sort(key=lambda one: one.time.seconds if one.time else 0.0)
    return Tried(found, None if found else least)


class _Alternatives(NamedTuple):
    """A run that does not fit, to be tried otherwise."""

    traced: Traced
    limit: int
    too_low: float

    def fits(self, change: Change) -> bool:
        memory = change.memory
        return memory.fits and memory.total * self.too_low <= memory.limit

    def on_the_same(self) -> Iterator[Change]:
        """The same batch on the same devices: more computed again, fewer rows at a time, or all
        arrays in as many pieces as there are devices."""
        split = self.traced.split
        less, remat = list(self._halved()), self.traced.described.run.train.remat
        again: list[Keys] = [{"train": {"remat": word}} for word in REMAT[REMAT.index(remat) + 1 :]]
        singles = [again, less]
        if split["data"] > 1:
            pieces = {"data": 1, "fsdp": split["data"] * split["fsdp"], "tensor": split["tensor"]}
            singles.append([{"mesh": pieces}])
        found = [one for keys in singles if (one := self._smallest(keys)) is not None]
        yield from found
        if less and again and not any(map(self.fits, found)):
            both = self._smallest([overlay(again[-1], keys) for keys in less])
            yield from [] if both is None else [both]

    def elsewhere(self) -> Iterator[Change]:
        """On the next larger slices, or on larger or more GPUs."""
        for target in _larger(self.traced.target):
            change = self._tried(self.traced.described.layers, target, f"on {target.name}")
            if change is not None:
                yield change

    def with_an_adapter(self) -> Iterator[Change]:
        if not self.traced.described.run.adapter:
            change = self._changed({"adapter": {"kind": ADAPTERS.usual}})
            if change is not None:
                yield change._replace(remark="trains an adapter beside the model, as another run")

    def _halved(self) -> Iterator[Keys]:
        """Keys for fewer rows at a time, in as many more microbatches."""
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
        """Of ever greater changes the first that is enough; where none is, the last."""
        last = self._changed(every[-1]) if every else None
        if last is None or not self.fits(last):
            return last
        before = (self._changed(keys) for keys in every[:-1])
        return next((one for one in before if one is not None and self.fits(one)), last)

    def _changed(self, keys: Keys) -> Change | None:
        layers, target = self.traced.described.layers, self.traced.target
        said = overlay(layers.command_line, keys)
        there = dataclasses.replace(layers, command_line=said)
        change = self._tried(there, target, " ".join(words(keys)), self.limit)
        return change and change._replace(memory=change.memory._replace(limit=self.limit))

    def _tried(
        self, layers: Layers, target: Target, how: str, limit: int | None = None
    ) -> Change | None:
        """A run as it would be; None where it cannot be laid out so."""
        try:
            described = laid_out(layers, target)
        except UserError:
            return None
        again = trace(divided(described, target, limit), target)
        rows, before = again.batches.rows, self.traced.batches.rows
        remark = f"a step is {rows} rows there, not {before}" if rows != before else ""
        return Change(how, memories.memory(again), times.time(again), remark)


def words(keys: Keys) -> list[str]:
    """Keys of a recipe as a command line has them."""
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
