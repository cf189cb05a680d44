"""A run: every section together, and the checks that need two of them."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple

from windlass.checkpoint import Checkpoint
from windlass.config import Every, Open, Problem, listing, section, tree
from windlass.data import FORMATS, Data
from windlass.data.pack import COLUMNS
from windlass.data.tokenizer import Tokenizer
from windlass.devices import chips, mesh, precision
from windlass.devices import mesh_choice as choices
from windlass.devices.mesh import Mesh
from windlass.devices.mesh_choice import Footprint, Rows
from windlass.devices.precision import Precision
from windlass.devices.selection import Device
from windlass.layers.kernels import LONGEST_WITHOUT_FLASH, Kernel, choose
from windlass.telemetry import Telemetry

OBJECTIVES = Open("windlass.objectives", tag="kind", attribute="Objective", usual="next_token")
ADAPTERS = Open("windlass.adapters", tag="kind", attribute="Adapter", usual="lora")
OPTIMISERS = Open("windlass.optim", tag="kind", attribute="Optimizer", usual="adamw")

# Which weights of a run: the newest, those of the lowest validation loss, or their average.
Weights = Literal["last", "best", "ema"]


@section
class Start:
    """What this run starts from at step 0: a model of the hub, one in a folder, or another run."""

    hub: str | None = None  # a model of the Hugging Face hub, OWNER/NAME
    # of hub: a branch, tag or commit; null: the newest, or what this recipe's runs here began with
    revision: str | None = None
    path: str | None = None  # a folder with config.json, safetensors files and a tokenizer
    run: str | None = None  # the folder of a run, or a recipe with one run in ./runs
    # of run: last (where it is null), best (of the lowest validation loss) or ema (the average of
    # train.ema)
    weights: Weights | None = None

    def __post_init__(self):
        given = [name for name in ("hub", "path", "run") if getattr(self, name) is not None]
        if not given:
            raise ValueError("one of hub, path and run is required: where the weights are")
        if len(given) > 1:
            first, *others = given
            raise ValueError(
                f"{first} is {getattr(self, first)}; {listing(others, 'and')} says where the "
                "weights are, too: name one of them"
            )
        for name, of in (("revision", "hub"), ("weights", "run")):
            if getattr(self, name) is not None and given != [of]:
                value = getattr(self, name)
                raise ValueError(f"{name} is {value}; it belongs to {of}, and this is {given[0]}")

    @property
    def which(self) -> Weights:
        """Which weights of the other run."""
        return self.weights or "last"


FAMILIES = Open("windlass.models", tag="family", attribute="Config", instead=Start)


@section
class Train:
    """How long, in what batches, and what is trained."""

    steps: int | None = None  # optimiser steps
    epochs: float | None = None  # in place of steps: times over the data, in full batches
    batch: int | None = None  # sequences in an optimiser step, over all devices
    # in place of batch: on each device, in one microbatch; a run that goes on elsewhere keeps the
    # batch that it began with
    batch_per_device: int | None = None
    accumulation: int | None = None  # microbatches in an optimiser step; null: as few as possible
    # auto, in place of accumulation: as few microbatches as the memory of the devices allows,
    # chosen before the run and kept by it; null: what accumulation and batch_per_device say
    microbatch: Literal["auto"] | None = None
    seed: int = 0  # of the weights, the order of the data and all that is random
    # patterns of weights to train, such as blocks.mlp.*; null: all, or the adapter's alone
    trainable: tuple[str, ...] | None = None
    remat: Literal["none", "saved", "full"] = "saved"  # computed again in the backward pass
    layers_per_loop: int = 1  # more: faster on GPUs, and longer to compile
    deterministic: bool = False  # the same bits in every run on a GPU, which is slower there
    nonfinite: Literal["stop", "skip"] = "stop"  # when a loss or a gradient is not finite
    skips: int = 10  # with nonfinite skip: so many in a row before the run stops after all
    evaluate_every: Every | None = None  # on held-out rows; null: only at the end
    # after so many evaluations without a new best the run ends; null: never. With ema it is the
    # average whose loss counts
    patience: int | None = None
    # of the average of the weights, the share kept at each step, such as 0.999; at step t at most
    # (1 + t) / (10 + t). null: no average
    ema: float | None = None
    sample: str | None = None  # a prompt to write on from at each evaluation
    strict: bool = False  # a program that is compiled again after the first step ends the run

    def __post_init__(self):
        least = dict(steps=1, batch=1, batch_per_device=1, accumulation=1, skips=1)
        least |= dict(layers_per_loop=1, patience=1, seed=0)
        low = [
            f"{name} is {getattr(self, name)}; it must be {smallest} or more"
            for name, smallest in least.items()
            if getattr(self, name) is not None and getattr(self, name) < smallest
        ]
        if (self.steps is None) == (self.epochs is None):
            low.append(self._wrong_length())
        elif self.epochs is not None and self.epochs <= 0:
            low.append(f"epochs is {self.epochs:g}; it must be above 0")
        if self.batch is None and self.batch_per_device is None:
            low.append("batch is required, or batch_per_device in its place")
        if self.microbatch is not None:
            low += self._chosen_twice()
        if self.ema is not None and not 0 < self.ema < 1:
            low.append(f"ema is {self.ema}; it is a share, above 0 and below 1")
        if low:
            raise ValueError(*low)

    def _chosen_twice(self) -> list[str]:
        said = [name for name in ("batch_per_device", "accumulation") if getattr(self, name)]
        return [
            f"microbatch is auto, and {name} is {getattr(self, name)}, which says how many rows "
            f"are computed at once; train.{name}=null or train.microbatch=null leaves one of them "
            "out"
            for name in said
        ]

    def _wrong_length(self) -> str:
        if self.steps is None:
            return "steps is required: a whole number; or epochs, times over the data"
        return (
            f"steps is {self.steps}, and epochs is {self.epochs:g}; train.epochs=null or "
            "train.steps=null leaves one of them out"
        )

    @property
    def watched(self) -> str:
        """The loss that decides which weights are the best: the average's, where there is one."""
        return "validation_loss" if self.ema is None else "validation_ema_loss"

    @property
    def allowed(self) -> int:
        """How many steps in a row may be not finite."""
        return self.skips if self.nonfinite == "skip" else 0


@section
class Folder:
    """Where a run is stored."""

    dir: str | None = None  # null: runs/<recipe>-<hash>

    def __post_init__(self):
        if self.dir is not None and "://" in self.dir:
            raise ValueError(
                f"dir is {self.dir}; a run is a folder of files: mount the bucket, with gcsfuse "
                "--implicit-dirs --rename-dir-limit=200000, and name the folder there; "
                "`windlass launch --bucket` does both"
            )


@section
class Run:
    """A recipe, read."""

    model: Annotated[Any, FAMILIES]
    start: Start | None = None  # what model.hub, model.path or model.run is written out as
    adapter: Annotated[Any, ADAPTERS] | None = None  # what is trained beside a model; null: itself
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    data: Data
    objective: Annotated[Any, OBJECTIVES] = field(default_factory=OBJECTIVES.load("next_token"))
    optim: Annotated[Any, OPTIMISERS]
    train: Train
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    telemetry: Telemetry = field(default_factory=Telemetry)
    device: Device = field(default_factory=Device)
    mesh: Mesh = field(default_factory=Mesh)
    precision: Precision = field(default_factory=Precision)
    run: Folder = field(default_factory=Folder)


class Batches(NamedTuple):
    """One optimiser step: rows = rows per device × microbatches × groups of devices."""

    per_device: int
    accumulation: int
    shards: int  # groups of devices that hold rows of their own: data × fsdp

    @property
    def rows(self) -> int:
        return self.per_device * self.accumulation * self.shards


def batches(
    train: Train, shards: int, began: int | None = None, chosen: int | None = None
) -> Batches:
    """How a batch is divided; `problems` says when it cannot be.

    Where the recipe says only what each device gets, a run that goes on keeps the rows that it
    `began` with: each device gets as many of its share at a time as it may, and can evenly. Of
    `train.microbatch: auto` there are as many microbatches as were `chosen`.
    """
    if train.batch is None and train.batch_per_device is not None and began is not None:
        share = max(1, began // shards)
        fits = range(1, train.batch_per_device + 1)
        at_once = max(rows for rows in fits if share % rows == 0)
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
) -> choices.Choice:
    """The mesh that a run gets on so many devices."""
    rows, sizes = microbatch(run.train, began), run.model.sizes
    return choices.choose(
        run.mesh, devices, rows=rows, sizes=sizes, footprint=footprint, slices=slices
    )


def without_batch(run: Run) -> Run:
    """A run that takes a row on each device, on however many."""
    nothing = dict(batch=None, batch_per_device=1, accumulation=None, microbatch=None)
    alone = dataclasses.replace(run.train, **nothing)
    return dataclasses.replace(run, train=alone)


def microbatch(train: Train, began: int | None = None) -> Rows:
    """What is known of its rows before there is a mesh."""
    if train.batch_per_device is not None:
        return Rows(began if train.batch is None else None, train.batch_per_device)
    assert train.batch is not None
    # As little as a row at a time is possible, and so nothing is split that fits then.
    each = None if train.microbatch is None else 1
    return Rows(train.batch // (train.accumulation or 1), each)


def problems(
    run: Run,
    kind: str,
    device_kinds: Sequence[str],
    split: Mapping[str, int] | None = None,
    slices: int = 1,
    began: int | None = None,
) -> list[Problem]:
    """What does not go together, on devices of a kind that have these names, split so.

    `began` is how many rows the steps of a run have that goes on.
    """
    wrong = precision.problems(run.precision, kind)
    devices = len(device_kinds)
    return [
        *wrong,
        *_layout(run, devices, split or choice(run, devices, began=began).split, slices, began),
        *_columns(run),
        *([] if wrong else _length(run, kind, device_kinds[0])),
        *_patience(run),
    ]


def attention(run: Run, kind: str, device_kind: str) -> Kernel | None:
    """The kernel that attention gets; None for a model without heads."""
    if "head_dim" not in run.model.sizes:
        return None
    compute = precision.resolve(run.precision, kind, chips.find(device_kind))
    return choose(kind, device_kind, compute, run.model.sizes["head_dim"], run.data.length)


def _layout(
    run: Run, devices: int, split: Mapping[str, int], slices: int, began: int | None
) -> list[Problem]:
    shards = split["data"] * split["fsdp"]
    train = run.train
    divided = batches(train, shards, began)
    found, rows = [], None
    if train.batch_per_device is None:
        rows, left = divmod(train.batch or 0, divided.accumulation)
        if left:
            what = f"is {train.batch}; accumulation ({train.accumulation}) must divide it"
            found, rows = [("train.batch", what)], None
    elif train.batch not in (None, divided.rows):
        product = (
            f"batch_per_device ({divided.per_device}) × accumulation ({divided.accumulation}) "
            f"× shards ({shards}) is {divided.rows}"
        )
        found = [("train.batch", f"is {train.batch}; {product}: leave one of them out")]
    elif train.batch is None and began not in (None, divided.rows):
        would = listing(mesh.fewer(run.mesh, split, began, devices, run.model.sizes))
        what = f"gives the {began} rows of a step, which this run began with, to data × fsdp"
        found = [("mesh", f"{what} = {shards} groups of devices; {would} would do")]
    return [*mesh.problems(run.mesh, split, devices, rows, run.model.sizes, slices), *found]


def _length(run: Run, kind: str, device_kind: str) -> list[Problem]:
    kernel = attention(run, kind, device_kind)
    if kernel is None or kernel.is_flash or run.data.length <= LONGEST_WITHOUT_FLASH:
        return []
    what = (
        f"is {run.data.length}; attention here is {kernel.why}, and a row takes "
        f"length × length numbers in each head: up to {LONGEST_WITHOUT_FLASH} would do"
    )
    return [("data.length", what)]


def _columns(run: Run) -> list[Problem]:
    """What the objective reads and the data has not, or the other way round."""
    objective = type(run.objective).__module__.rpartition(".")[2]
    format = type(run.data.format).__module__.rpartition(".")[2]
    has, reads = run.data.columns, run.objective.columns
    if missing := [name for name in reads if name not in has]:
        what = f"is {objective}, which reads {_named(missing)}; "
        what += f"data.format {format} gives {', '.join(has)}"
        able = [one for one in FORMATS.names() if set(missing) <= set(FORMATS.load(one).columns)]
        return [("objective", f"{what}: {listing(able)} would do" if able else what)]
    if idle := [name for name in has if name not in reads and name not in COLUMNS]:
        able = [one for one in OBJECTIVES.names() if set(idle) <= set(OBJECTIVES.load(one).columns)]
        what = f"is {format}, whose rows have {_named(idle)}, and {objective} does not read it"
        return [("data.format", f"{what}: objective {listing(able)} does")]
    return []


def _named(columns: list[str]) -> str:
    return f"the column{'s' if len(columns) > 1 else ''} {', '.join(columns)}"


def _patience(run: Run) -> list[Problem]:
    missing = [
        key
        for key, value in (
            ("train.evaluate_every", run.train.evaluate_every),
            ("data.validation", run.data.validation),
        )
        if not value
    ]
    if run.train.patience is None or not missing:
        return []
    what = f"is {run.train.patience}; it counts evaluations: say {listing(missing, 'and')} too"
    return [("train.patience", what)]


def widths(run: Run) -> dict[str, int]:
    """The sizes of a run's matrices, by the keys that decide them."""
    sizes = run.model.sizes
    found = {"data.length": run.data.length}
    found |= {f"model.{axis}": sizes[axis] for axis in ("embed", "mlp", "vocab") if axis in sizes}
    if "heads" in sizes and "head_dim" in sizes:
        found["model.heads × model.head_dim"] = sizes["heads"] * sizes["head_dim"]
    return found


# What makes two runs different runs; where and how fast they go does not.
_OURS = ("model", "start", "adapter", "tokenizer", "data", "objective", "optim", "train")
_NOT_OURS = {
    "data": ("cache", "workers", "prefetch"),
    "train": (
        *("steps", "epochs", "patience", "evaluate_every", "sample"),
        *("microbatch", "remat", "layers_per_loop", "deterministic", "strict"),
    ),
}


def essence(run: Run) -> dict[str, Any]:
    """The keys that decide what is computed: the same essence finds the same folder."""
    return essential(tree(run))


def essential(recipe: dict[str, Any]) -> dict[str, Any]:
    """The same of a recipe that is not read."""
    return {
        name: {key: x for key, x in recipe[name].items() if key not in _NOT_OURS.get(name, ())}
        for name in _OURS
        if recipe.get(name) is not None
    }


def digest(run: Run) -> str:
    text = json.dumps(essence(run), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
