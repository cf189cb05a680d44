"""A recipe: every section together. Beside it: batches, the checks of two sections, identity."""

from dataclasses import field
from typing import Annotated, Any, Literal

from windlass.checkpoint import Checkpoint
from windlass.config import Every, Open, Several, section
from windlass.config.start import Start
from windlass.data import Data
from windlass.data.tokenizer import Tokenizer
from windlass.devices.mesh import Mesh
from windlass.devices.precision import Precision
from windlass.devices.selection import Device
from windlass.residuals import Architecture
from windlass.telemetry import Telemetry

OBJECTIVES = Open("windlass.objectives", tag="kind", attribute="Objective", usual="next_token")
RESIDUALS = Open("windlass.residuals", tag="kind", attribute="Residual", usual="plain")
ADAPTERS = Open("windlass.adapters", tag="kind", attribute="Adapter", usual="lora")
OPTIMISERS = Open("windlass.optim", tag="kind", attribute="Optimizer", usual="adamw")

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
class Helper:
    """A frozen model that an objective names, such as a teacher."""

    model: Annotated[Any, FAMILIES]
    start: Start  # where its weights are


@section
class Run:
    """A recipe, read."""

    model: Annotated[Any, FAMILIES]
    start: Start | None = None  # what model.hub, model.path or model.run is written out as
    residual: Annotated[Any, RESIDUALS] = field(default_factory=RESIDUALS.load("plain"))
    # what takes the place of linear maps, several in order; null: the model as its family has it
    adapter: Annotated[tuple[Any, ...], Several(ADAPTERS)] = ()
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    data: Data
    objective: Annotated[Any, OBJECTIVES] = field(default_factory=OBJECTIVES.load("next_token"))
    helpers: dict[str, Helper] = field(default_factory=dict)  # those of the objective, written out
    optim: Annotated[Any, OPTIMISERS]
    train: Train
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    telemetry: Telemetry = field(default_factory=Telemetry)
    device: Device = field(default_factory=Device)
    mesh: Mesh = field(default_factory=Mesh)
    precision: Precision = field(default_factory=Precision)
    run: Folder = field(default_factory=Folder)

    @property
    def architecture(self) -> Architecture:
        return Architecture(self.model, self.residual)
