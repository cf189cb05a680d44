"""A recipe: every section together. Beside it: batches, the checks of two sections, identity."""

from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from windlass.checkpoint import Checkpoint
from windlass.columns import Column
from windlass.config import Every, Open, Several, section
from windlass.config.sampling import Sampling
from windlass.config.start import FrozenBase, Start
from windlass.config.tasks import Tasks
from windlass.data import Data
from windlass.data.tokenizer import Tokenizer
from windlass.devices.mesh import Mesh
from windlass.devices.precision import Precision
from windlass.devices.selection import Device
from windlass.residuals import Architecture
from windlass.telemetry import Alarm, Profile, Telemetry

OBJECTIVES = Open("windlass.objectives", tag="kind", attribute="Objective", usual="next_token")
RESIDUALS = Open("windlass.residuals", tag="kind", attribute="Residual", usual="plain")
ADAPTERS = Open("windlass.adapters", tag="kind", attribute="Adapter", usual="lora")
OPTIMIZERS = Open("windlass.optim", tag="kind", attribute="Optimizer", usual="adamw")

TASK_COST = "task_cost"  # train.best in a checkpoint, with the sign by which lower is better
FAMILIES = Open("windlass.models", tag="family", attribute="Config", instead=Start)


@section
class SampleSampling(Sampling):
    """Sampling of the next token of `train.sample`, and where its text stops."""

    top_k: int | None = 50  # sample from the k likeliest tokens; null: all
    top_p: float | None = 0.9  # nucleus sampling: keep this probability mass; null: all


@section
class Train:
    """Length of the run, batches, and which weights are trained."""

    steps: int | None = None  # optimizer steps
    epochs: float | None = None  # instead of steps: passes over the data, in full batches
    batch: int | None = None  # global batch size: sequences per optimizer step
    # instead of batch: sequences per device and microbatch; a run resumed on other devices keeps
    # the global batch size that it began with
    batch_per_device: int | None = None
    # gradient accumulation: microbatches per step; null: as few as can be
    accumulation: int | None = None
    # auto, instead of accumulation: as few microbatches as fit in device memory, chosen before the
    # run and kept by it; null: as accumulation and batch_per_device say
    microbatch: Literal["auto"] | None = None
    seed: int = 0  # random seed of the weights, the order of the data and dropout
    # patterns of weights to train, such as blocks.mlp.*; null: all, or only the adapter
    trainable: tuple[str, ...] | None = None
    # activation checkpointing: saves all, some or none
    remat: Literal["none", "saved", "full"] = "saved"
    # unroll the scan over layers: faster on GPUs, slower to compile; null: all of them on a GPU
    # alone, else 1
    layers_per_loop: int | None = None
    deterministic: bool = False  # bitwise reproducible on GPUs, at some cost in speed
    nonfinite: Literal["stop", "skip"] = "stop"  # on a loss or gradient that is not finite
    skips: int = 10  # with nonfinite skip: the most such steps in a row
    evaluate_every: Every | None = None  # evaluation on held-out data; null: only at the end
    # metric of tasks by which weights are the best, such as arc_easy/acc; null: the loss on
    # held-out data. With ema, the averaged weights count
    best: str | None = None
    # early stopping: evaluations without a new best; null: never
    patience: int | None = None
    # decay of an exponential moving average of the weights, such as 0.999; at step t at most
    # (1 + t) / (10 + t). null: no average
    ema: float | None = None
    sample: str | None = None  # a prompt to generate from at each evaluation
    sampling: SampleSampling = field(default_factory=SampleSampling)  # of the text of sample
    strict: bool = False  # a recompilation after the first step ends the run

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
        names = [name for name in ("batch_per_device", "accumulation") if getattr(self, name)]
        return [
            f"microbatch is auto, and {name} is {getattr(self, name)}, which says how many rows "
            f"are computed at once; train.{name}=null or train.microbatch=null leaves one of them "
            "out"
            for name in names
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
        """The metric that is lowest for the best weights: the average's, where there is one."""
        if self.best is not None:
            return TASK_COST
        return "validation_loss" if self.ema is None else "validation_ema_loss"

    @property
    def allowed(self) -> int:
        """Limit of consecutive steps whose loss or gradient is not finite."""
        return self.skips if self.nonfinite == "skip" else 0


@section
class Folder:
    """The folder of a run."""

    dir: str | None = None  # output folder; null: runs/<recipe>-<hash>

    def __post_init__(self):
        if self.dir is not None and "://" in self.dir:
            raise ValueError(
                f"dir is {self.dir}; a run is a folder of files: mount the bucket, with gcsfuse "
                "--implicit-dirs --rename-dir-limit=200000, and name the folder there; "
                "`windlass launch --bucket` does both"
            )


@section
class Helper:
    """A frozen model that an objective names, such as a teacher, as it was resolved."""

    is_resolved: ClassVar[bool] = True  # written by a run, never by people

    model: Annotated[Any, FAMILIES]
    start: Start  # where its weights are
    residual: Annotated[Any, RESIDUALS] = field(default_factory=RESIDUALS.load("plain"))

    @property
    def architecture(self) -> Architecture:
        return Architecture(self.model, self.residual, self.start.base)


@section
class Run:
    """A recipe, read."""

    model: Annotated[Any, FAMILIES]
    start: Start | None = None  # as model.hub, model.path or model.run was resolved
    residual: Annotated[Any, RESIDUALS] = field(default_factory=RESIDUALS.load("plain"))
    # what takes the place of linear maps, several in order; null: the model as its family has it
    adapter: Annotated[tuple[Any, ...], Several(ADAPTERS)] = ()
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    data: Data
    objective: Annotated[Any, OBJECTIVES] = field(default_factory=OBJECTIVES.load("next_token"))
    helpers: dict[str, Helper] = field(default_factory=dict)  # those of the objective, written out
    # what trains weights by their gradient; null: nothing, for an objective that solves for them
    optim: Annotated[Any, OPTIMIZERS] | None = None
    train: Train
    # public benchmarks that are measured as the run trains; null: none
    tasks: Tasks | None = None
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    telemetry: Telemetry = field(default_factory=Telemetry)
    alarm: Alarm = field(default_factory=Alarm)
    profile: Profile = field(default_factory=Profile)
    device: Device = field(default_factory=Device)
    mesh: Mesh = field(default_factory=Mesh)
    precision: Precision = field(default_factory=Precision)
    run: Folder = field(default_factory=Folder)

    @property
    def columns(self) -> dict[str, Column]:
        """Columns of a batch: those of the data, but for what the objective does without."""
        spares = self.objective.spares
        return {name: one for name, one in self.data.columns.items() if name not in spares}

    @property
    def base(self) -> FrozenBase | None:
        """Storage of the model that the run starts from; None: as matrices."""
        return None if self.start is None else self.start.base

    @property
    def architecture(self) -> Architecture:
        return Architecture(self.model, self.residual, self.base, self.objective.scores)
