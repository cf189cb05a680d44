"""Summary of a run at its end, on one screen: the model, its losses, speed, cost and files."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from windlass.checkpoint.store import folder_of
from windlass.errors import UserError
from windlass.evaluation.verdict import training_loss, verdict
from windlass.planning import prices
from windlass.planning.targets import Target
from windlass.program.step import Progress, State
from windlass.run_folder import folder as folders
from windlass.telemetry.metrics import Meter
from windlass.training.session import Session
from windlass.units import count, counted, dollars, duration, number, percent, seconds

Facts = Iterator[tuple[str, str]]
Records = Sequence[Mapping[str, Any]]
MOST_SCORES = 2  # of tasks that are shown: others are in their files
FILES = (folders.METRICS, folders.SAMPLES, folders.ANSWERS, folders.TASKS)


def trained(session: Session, done: int, tokens: int | None, per_epoch: int | None) -> str:
    """The model, and what it was trained on: `qwen3, all 918,912 parameters, 220 steps, ...`."""
    built, run = session.built, session.run
    family = type(run.model).__module__.rpartition(".")[2]
    learned = run.objective.solved(built.abstract) or built.trainable.trained
    total = built.trainable.total
    share = f"all {total:,}" if learned == total else f"{learned:,} of {total:,}"
    what, many = ("rows", session.batches.rows * done) if tokens is None else ("tokens", tokens)
    epochs = "" if per_epoch is None else f", {done / per_epoch:.2f} epochs"
    steps = counted(done, "step")
    return f"{family}, {share} parameters; {steps}{epochs}, {many:,} {what}"


def losses(
    session: Session, state: State, latest: Mapping[str, float], records: Records, per_epoch: int
) -> Facts:
    """Losses before and after, the baseline to compare them with, and a verdict on overfitting."""
    run, progress, done = session.run, state.progress, int(state.step)
    unit, has_best = run.objective.unit, run.train.best is None
    seen = [one for one in records if isinstance(one.get("loss"), int | float) and one["step"]]
    parts = []
    if len(seen) > 1:
        first, last = seen[0], seen[-1]
        parts.append(f"{first['loss']:.4f} at step {first['step']}, {last['loss']:.4f} at the end")
    held_out = "validation_loss" if state.ema is None else "validation_ema_loss"
    if held_out in latest:
        which = "" if state.ema is None else " (EMA)"
        best = f", at best {best_of(progress, done)}" if has_best else ""
        parts.append(f"{latest[held_out]:.4f} nats a {unit} on validation rows{which}{best}")
    if parts:
        yield "loss", "; ".join(parts)
    if held_out not in latest:
        return
    entropy = session.prepared.unigram_entropy if unit == "token" else None
    if entropy is not None:
        yield "unigram", f"{entropy:.4f}, the entropy of the corpus's token frequencies"
    loss = latest.get("validation_cross_entropy", latest.get("validation_loss", math.nan))
    known = training_loss(records, done, per_epoch)
    if known is not None:
        names = ("validation", f"the last {known.steps} training steps")
        yield "verdict", verdict(loss, known.loss, names=names, unigram=entropy)


def best_of(progress: Progress, done: int) -> str:
    """The best loss, and its step where that is not the last."""
    where = "" if int(progress.best_step) == done else f" at step {progress.best_step}"
    return f"{float(progress.best):.4f}{where}"


def scores(records: Records, best: str | None) -> Facts:
    """Scores of tasks before and after; the one that decides which weights are best comes first."""
    measured = [one for one in records if any("/" in name for name in one)]
    if not measured:
        return
    names = [name for name in measured[-1] if "/" in name and not name.endswith("_stderr")]
    names.sort(key=lambda name: name != best)
    first, last, left = measured[0], measured[-1], len(names) - MOST_SCORES
    for name in names[:MOST_SCORES]:
        stderr = last.get(f"{name}_stderr")
        error = f" ± {number(stderr)}" if stderr is not None else ""
        before = f", {number(first[name])} at step {first['step']}" if name in first else ""
        rest = f"; {left} more" if left > 0 and name == names[MOST_SCORES - 1] else ""
        yield "tasks", f"{name} {number(last[name])}{error}{before}{rest}"


def speed(meter: Meter) -> str | None:
    """Throughput and step time of a median step, and the share of peak; None without a step."""
    if meter.median is None:
        return None
    tokens = meter.tokens_per_second
    parts = [] if tokens is None else [f"{count(tokens)} tok/s"]
    parts.append(f"{seconds(meter.median)} a step")
    if meter.utilization is not None:
        parts.append(f"{percent(meter.utilization)} of peak (MFU)")
    return ", ".join(parts)


def spent(meter: Meter, whole: float, per_epoch: int | None) -> str:
    """Time of this start, and of an epoch."""
    steps = f"{duration(whole)}, {duration(meter.seconds)} of it in {meter.steps} steps"
    if not meter.steps or per_epoch is None:
        return steps
    return f"{steps}; an epoch takes {duration(meter.seconds / meter.steps * per_epoch)}"


def cost(target: Target, whole: float) -> str | None:
    """Rent of the devices for so many seconds, on demand and spot; None where no price is known."""
    try:
        offers = prices.load().find(target.chip.slug, hosts=target.hosts if target.slices else 1)
    except UserError:  # of a file that somebody edited meanwhile: a run does not fail by it
        return None
    on_demand, spot = prices.of_one_provider(offers)
    hours = whole / 3600 * target.chips
    known = [
        f"{dollars(hours * price)} {name}"
        for one, name in ((on_demand, "on demand"), (spot, "spot"))
        if one is not None and (price := one.on_demand if name == "on demand" else one.spot)
    ]
    if not known:
        return None
    provider = next(one.provider for one in (on_demand, spot) if one is not None)
    return f"{', '.join(known)} ({target.name} for {duration(whole)}, {provider})"


def files(folder: Path) -> str:
    """The folder of a run, and what is in it."""
    inside = [name for name in FILES if (folder / name).exists()]
    return f"{folder}: {', '.join([folder_of(folder).name, *inside])}"
