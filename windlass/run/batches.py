"""Batch size of a run: per device, in microbatches and shards; and the mesh it gets."""

import dataclasses
from typing import NamedTuple

from windlass.devices import mesh_choice as choices
from windlass.devices.mesh_choice import Footprint, Rows
from windlass.run import Run, Train


class Batches(NamedTuple):
    """Global batch size: sequences per step = per device × microbatches × shards."""

    per_device: int
    accumulation: int
    shards: int  # groups of devices that hold rows of their own: data × fsdp

    @property
    def rows(self) -> int:
        return self.per_device * self.accumulation * self.shards


def batches(
    train: Train, shards: int, began: int | None = None, chosen: int | None = None
) -> Batches:
    """Division of a batch over devices and microbatches; `problems` reports where there is none.

    Where the recipe has only a per-device batch size, a resumed run keeps the global one that it
    `began` with: each device gets as many of its share at a time as it may, and can evenly. Of
    `train.microbatch: auto` there are as many microbatches as were `chosen`.
    """
    if train.batch is None and train.batch_per_device is not None and began is not None:
        share = max(1, began // shards)
        fits = range(1, train.batch_per_device + 1)
        at_once = max(size for size in fits if share % size == 0)
        return Batches(at_once, share // at_once, shards)
    if train.batch_per_device is None:
        assert train.batch is not None
        accumulation = train.accumulation or chosen or 1
        per_device = max(1, train.batch // (accumulation * shards))
        return Batches(per_device, accumulation, shards)
    accumulation = train.accumulation or (train.batch or 0) // (train.batch_per_device * shards)
    return Batches(train.batch_per_device, max(1, accumulation), shards)


def choice(
    run: Run,
    devices: int,
    footprint: Footprint | None = None,
    slices: int = 1,
    began: int | None = None,
) -> choices.MeshChoice:
    """The mesh of a run on a number of devices."""
    rows, sizes = microbatch(run.train, began), run.model.sizes
    return choices.choose(
        run.mesh, devices, rows=rows, sizes=sizes, footprint=footprint, slices=slices
    )


def without_batch(run: Run) -> Run:
    """A run with a per-device batch size of 1, on any number of devices."""
    nothing = dict(batch=None, batch_per_device=1, accumulation=None, microbatch=None)
    alone = dataclasses.replace(run.train, **nothing)
    return dataclasses.replace(run, train=alone)


def microbatch(train: Train, began: int | None = None) -> Rows:
    """Microbatch size, as far as it is known before there is a mesh."""
    if train.batch_per_device is not None:
        return Rows(began if train.batch is None else None, train.batch_per_device)
    assert train.batch is not None
    # As little as a row at a time is possible, and so nothing is split that fits then.
    each = None if train.microbatch is None else 1
    return Rows(train.batch // (train.accumulation or 1), each)
