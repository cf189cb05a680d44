"""Checks of a recipe that need two of its sections, or the devices it is to run on."""

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.adapters import BaseAdapter
from windlass.config import Problem, listing
from windlass.data import FORMATS
from windlass.data.pack import COLUMNS
from windlass.devices import chips, mesh, precision
from windlass.formats import BaseFormat
from windlass.layers.kernels import LONGEST_WITHOUT_FLASH, Kernel, choose
from windlass.layers.pattern import Pattern
from windlass.run import OBJECTIVES, OPTIMIZERS, Run
from windlass.run.batches import batches, choice
from windlass.teacher_cache import IDS, LOG_Z, LOGITS
from windlass.units import counted

TAUGHT = {IDS, LOGITS, LOG_Z}  # columns of data.teacher


def problems(
    run: Run,
    kind: str,
    device_kinds: Sequence[str],
    split: Mapping[str, int] | None = None,
    slices: int = 1,
    began: int | None = None,
) -> list[Problem]:
    """Problems of sections that do not go together, on devices of these kinds, split so.

    `began` is the global batch size of a run that is resumed.
    """
    wrong = precision.problems(run.precision, kind)
    devices = len(device_kinds)
    return [
        *wrong,
        *_layout(run, devices, split or choice(run, devices, began=began).split, slices, began),
        *(_units(run) or _columns(run)),
        *_objective(run),
        *_gradient(run),
        *([] if wrong else _length(run, kind, device_kinds[0])),
        *_stream(run),
        *_patience(run),
        *_sample(run),
        *([] if run.train.steps is None else profile(run, run.train.steps)),
        *_tasks(run),
    ]


def profile(run: Run, steps: int) -> list[Problem]:
    """Problem of a profile of steps that a run of so many does not have."""
    if run.profile.steps is None or run.profile.steps[1] <= steps:
        return []
    what = f"is {[*run.profile.steps]}, and the run has {counted(steps, 'step')}"
    return [("profile.steps", f"{what}; steps up to {steps} would do")]


def attention(run: Run, kind: str, device_kind: str) -> Kernel | None:
    """The kernel that attention gets, that with a stride where some has one; None without heads."""
    if "head_dim" not in run.model.sizes:
        return None
    compute = precision.resolve(run.precision, kind, chips.find(device_kind))
    window, stride = getattr(run.model, "window", None), getattr(run.model, "stride", 1)
    sinks = getattr(run.model, "sinks", False)
    pattern = Pattern(causal=run.model.causal, window=window, stride=stride, sinks=sinks)
    return choose(
        *(kind, device_kind, compute, run.model.sizes["head_dim"], run.data.length, pattern),
        deterministic=run.train.deterministic,
    )


def _layout(
    run: Run, devices: int, split: Mapping[str, int], slices: int, began: int | None
) -> list[Problem]:
    shards = mesh.row_groups(split)
    train = run.train
    divided = batches(train, shards, began)
    wrong, rows = [], None
    if train.batch_per_device is None:
        rows, left = divmod(train.batch or 0, divided.accumulation)
        if left:
            what = f"is {train.batch}; accumulation ({train.accumulation}) must divide it"
            wrong, rows = [("train.batch", what)], None
    elif train.batch not in (None, divided.rows):
        product = (
            f"batch_per_device ({divided.per_device}) × accumulation ({divided.accumulation}) "
            f"× shards ({shards}) is {divided.rows}"
        )
        wrong = [("train.batch", f"is {train.batch}; {product}: leave one of them out")]
    elif train.batch is None and began not in (None, divided.rows):
        would = listing(mesh.fewer(run.mesh, split, began, devices, run.model.sizes))
        what = f"gives the {began} rows of a step, which this run began with, to data × fsdp"
        wrong = [("mesh", f"{what} = {shards} groups of devices; {would} would do")]
    return [*mesh.problems(run.mesh, split, devices, rows, run.model.sizes, slices), *wrong]


def _length(run: Run, kind: str, device_kind: str) -> list[Problem]:
    kernel = attention(run, kind, device_kind)
    if kernel is None or kernel.is_flash or run.data.length <= LONGEST_WITHOUT_FLASH:
        return []
    what = (
        f"is {run.data.length}; attention here is {kernel.why}, and a row takes "
        f"length × length numbers in each head: up to {LONGEST_WITHOUT_FLASH} would do"
    )
    return [("data.length", what)]


def _units(run: Run) -> list[Problem]:
    """Examples of another kind than the objective's loss is an average over."""
    objective, format = run.objective, run.data.format
    own = {name: FORMATS.load(name).unit for name in FORMATS.names()}
    special = {*own.values()} - {BaseFormat.unit}
    if (
        run.data.has_blocks
        or format.unit == objective.unit
        or not special & {*(format.unit, objective.unit)}
    ):
        return []
    what = f"is {_kind(objective)}, whose loss is of {objective.unit}s, and examples of "
    what += f"data.format {_kind(format)} are for losses of {format.unit}s"
    if able := [name for name, unit in own.items() if unit == objective.unit and unit in special]:
        return [("objective", f"{what}: data.format {listing(able)} would do")]
    able = [name for name in OBJECTIVES.names() if OBJECTIVES.load(name).unit == format.unit]
    return [("objective", f"{what}: objective {listing(able)} would do")]


def _columns(run: Run) -> list[Problem]:
    """Columns that the objective reads and the data lacks, or the other way round."""
    objective, format = map(_kind, (run.objective, run.data.format))
    has, reads = run.data.columns, run.objective.reads
    missing = [name for name in reads if name not in has]
    if run.data.has_blocks:
        # What the objective does not read a model may: no column is idle.
        what = f"is {objective}, which reads {_named(missing)}; {run.data.parts[0].key} has "
        return [("objective", f"{what}{listing(has, 'and')}")] if missing else []
    if missing:
        what = f"is {objective}, which reads {_named(missing)}; "
        what += f"data.format {format} gives {', '.join(has)}"
        able = [one for one in FORMATS.names() if set(missing) <= set(FORMATS.load(one).columns)]
        if {*missing} <= TAUGHT:
            able = ["data.teacher, a cache that `windlass teach` writes,"]
        return [("objective", f"{what}: {listing(able)} would do" if able else what)]
    known = {*reads, *run.objective.spares, *COLUMNS}
    unread = [name for name in has if name not in known]
    # Of a teacher an objective may read a part.
    idle = [name for name in unread if name not in TAUGHT or not TAUGHT & {*reads}]
    if idle:
        able = [one for one in OBJECTIVES.names() if set(idle) <= set(OBJECTIVES.load(one).columns)]
        does = f": objective {listing(able)} does" if able else ""
        if {*idle} <= TAUGHT:
            what = f"gives {_named(idle)}, and {objective} does not read it"
            return [("data.teacher", f"{what}{does}")]
        what = f"is {format}, whose rows have {_named(idle)}, and {objective} does not read it"
        return [("data.format", f"{what}{does}")]
    return []


def _objective(run: Run) -> list[Problem]:
    """Problems of the model, or of a helper, that keep the objective from being computed."""
    kind, family = map(_kind, (run.objective, run.model))
    unfit = run.objective.problems(run.model)
    if not run.data.has_blocks or "targets" not in run.data.columns:
        unfit = [*unfit, *run.objective.problems_of_text(run.model)]
    wrong = [
        ("objective", f"is {kind}, which does not fit family {family}: {what}") for what in unfit
    ]
    for name, helper in run.helpers.items():
        if helper.model.vocab != run.model.vocab:
            there = helper.start.hub or helper.start.path or helper.start.run
            what = f"is {there}, whose vocabulary has {helper.model.vocab} tokens; model.vocab is "
            wrong.append((f"objective.{name}", f"{what}{run.model.vocab}: they must be the same"))
    return wrong


def _gradient(run: Run) -> list[Problem]:
    """Sections that train by a gradient, and are missing or of no use."""
    kind = _kind(run.objective)
    if run.objective.has_gradient:
        what = f"is required: objective {kind} trains by a gradient, with optim.kind "
        return [] if run.optim else [("optim", f"{what}{listing(OPTIMIZERS.names())}")]
    train = run.train
    idle = {
        "adapter": ", ".join(map(_kind, run.adapter)),
        "optim": run.optim and run.optim.kinds,
        "train.ema": train.ema,
        "train.trainable": train.trainable and " ".join(train.trainable),
    }
    why = f"objective {kind} solves for weights and trains none by a gradient"
    wrong = {key: f"is {value}; {why}: {key}=null" for key, value in idle.items() if value}
    return list(wrong.items())


def _named(columns: list[str]) -> str:
    return f"the column{'s' if len(columns) > 1 else ''} {', '.join(columns)}"


def _kind(section: Any) -> str:
    """Name of a member of an open set."""
    return type(section).__module__.rpartition(".")[2]


def _stream(run: Run) -> list[Problem]:
    """Keys that need an end of the data, where it is a stream."""
    if not run.data.is_streamed:
        return []
    wrong, why = [], "data.source.stream is true, and nobody knows the end of a stream"
    if run.train.steps is None:
        wrong.append(
            ("train.steps", f"is required: {why}; train.epochs=null train.steps=1000 would do")
        )
    if run.tokenizer.kind == "bpe":
        what = "is bpe, which is learned from all documents, and data.source.stream is true; "
        wrong.append(("tokenizer.kind", f"{what}hub, file or byte would do"))
    intervals = {
        "train.evaluate_every": run.train.evaluate_every,
        "checkpoint.every": run.checkpoint.every,
        "telemetry.every": run.telemetry.every,
        "tasks.every": run.tasks and run.tasks.every,
    }
    for key, every in intervals.items():
        if every is not None and any(one.unit == "epochs" for one in (every, *every.also)):
            what = f"is {every.written()}; {why}: a number of steps or minutes would do"
            wrong.append((key, what))
    return wrong


def _patience(run: Run) -> list[Problem]:
    interval = ("train.evaluate_every", run.train.evaluate_every)
    needed = [interval, ("data.validation", run.data.holds_out("validation"))]
    if run.train.best is not None and run.tasks is not None:
        needed = [("tasks.every", run.tasks.every or run.train.evaluate_every)]
    missing = [key for key, value in needed if not value]
    if run.train.patience is None or not missing:
        return []
    what = f"is {run.train.patience}; it counts evaluations: set {listing(missing, 'and')} too"
    return [("train.patience", what)]


def _sample(run: Run) -> list[Problem]:
    if run.train.sample is None or not (why := _predicts_nothing(run)):
        return []
    what = f"is {run.train.sample}; generation needs {why}"
    return [("train.sample", f"{what}: leave it out")]


def _predicts_nothing(run: Run) -> str | None:
    """Continuation of "it needs ...", of a run whose model predicts no next token."""
    if not run.model.causal:
        return f"a causal family, and {_kind(run.model)} attends in both directions"
    if run.objective.scores:
        return f"an LM head, and the model of objective {_kind(run.objective)} has scores instead"
    return None


def _tasks(run: Run) -> list[Problem]:
    best = run.train.best
    if run.tasks is None:
        what = f"is {best}, a metric of tasks; tasks.names=[{(best or '').partition('/')[0]}]"
        return [] if best is None else [("train.best", f"{what} would measure it")]
    if (why := _predicts_nothing(run)) is None:
        return []
    what = f"are {', '.join(run.tasks.names)}; tasks need {why}"
    return [("tasks.names", f"{what}: tasks=null")]


def unfrozen(run: Run) -> list[Problem]:
    """Problem of a base in 4 bits that a run would have to train, or that its adapter replaces."""
    if run.base is None:
        return []
    what = f"is {run.base.kind}, in which weights are frozen"
    fitted = [_kind(one) for one in run.adapter if type(one).fit is not BaseAdapter.fit]
    if fitted:
        return [("model.base", f"{what}; adapter {fitted[0]} has codes of its own for them: lora")]
    if run.adapter or run.train.trainable is not None or not run.objective.has_gradient:
        return []
    leave = "adapter=lora trains matrices beside them, and without model.base all are trained"
    return [("model.base", f"{what}; {leave}")]


def too_long(run: Run) -> list[Problem]:
    """Problem of sequences that are longer than a model that is to be trained has positions for."""
    longest = getattr(run.model, "longest", None)
    if longest is None or run.data.length <= longest:
        return []
    what = f"is {run.data.length}; the model has {longest} positions: {longest} or less would do"
    return [("data.length", what)]


def widths(run: Run) -> dict[str, int]:
    """The sizes of a run's matrices, by the keys that decide them."""
    sizes = run.model.sizes
    by_key = {"data.length": run.data.length}
    by_key |= {f"model.{axis}": sizes[axis] for axis in ("embed", "mlp", "vocab") if axis in sizes}
    if "heads" in sizes and "head_dim" in sizes:
        by_key["model.heads × model.head_dim"] = sizes["heads"] * sizes["head_dim"]
    return by_key
