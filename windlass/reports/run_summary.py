"""The summary of a run: facts, curves, cost, and its plan beside what was measured."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from windlass import markup
from windlass.checkpoint.store import folder_of, steps_in
from windlass.devices import chips
from windlass.planning.prices import Prices, of_one_provider
from windlass.reports.goodput import Goodput, goodput
from windlass.run_folder import answers, plan_file, runs, samples
from windlass.run_folder import folder as folders
from windlass.run_folder.answers import Answers
from windlass.run_folder.runs import Standing
from windlass.run_folder.samples import Sample
from windlass.telemetry import about, metrics
from windlass.telemetry.phases import pieces

# Metrics that are kept as curves over the steps.
CURVES = (
    *("loss", "validation_loss", "validation_perplexity"),
    *("learning_rate", "tokens_per_second"),
)

Number = int | float
Curve = list[tuple[int, Number]]


class RunCost(NamedTuple):
    """The cost of a run at the cheapest price; None is not known."""

    chip_hours: Number  # of the running time of all starts
    on_demand_usd: float | None
    on_demand_place: str | None
    spot_usd: float | None
    spot_place: str | None
    million_tokens_usd: float | None  # on demand, while steps are taken
    forecast_on_demand_usd: float | None  # at the last step; None of a run that has done it
    forecast_spot_usd: float | None
    prices_date: str


class SavedCheckpoint(NamedTuple):
    """A checkpoint on disk."""

    step: int
    size_bytes: int
    saved: float  # in seconds since 1970
    validation_loss: Number | None


@dataclass(frozen=True)
class Account:
    """Summary of a run from its folder, from its first step to its newest."""

    standing: Standing
    start: dict[str, Any]  # the newest: versions, devices, what was chosen
    settings: dict[str, Any]  # the recipe, resolved
    curves: dict[str, Curve]
    speed: dict[str, Number | None]
    goodput: Goodput
    left_seconds: Number | None  # to the last step, at the newest pace; None: done, or not known
    plan: dict[str, Any]  # planned and measured, as `plan.json` has them
    cost: RunCost | None  # None: what it ran on is not for rent, as far as is known
    samples: Sequence[Sample]  # texts that it generated, the newest last
    compiles: Sequence[dict[str, Any]]  # every compilation, of all starts
    checkpoints: Sequence[SavedCheckpoint]  # oldest first
    records: Sequence[dict[str, Any]]  # metrics, one for each step
    answers: Answers | None  # the newest to held-out grids, pass by pass; None: there are none

    @property
    def name(self) -> str:
        return self.standing.folder.name

    def _repr_html_(self) -> str:
        """Page that was written to the folder of the run, in a frame, for a notebook."""
        page = self.standing.folder / folders.REPORT
        return markup.frame(page.read_text(encoding="utf-8"))

    @property
    def planned(self) -> dict[str, Any]:
        """The plan of the run; empty where there is none."""
        return self.plan.get("planned") or {}

    @property
    def measured(self) -> dict[str, Any]:
        return self.plan.get("measured") or {}

    @property
    def errors(self) -> dict[str, float]:
        """The relative error of each prediction; above 0 it was too high."""
        return plan_file.errors(self.plan)

    @property
    def memory_bytes(self) -> Number | None:
        """Peak memory per device."""
        return plan_file.measured_bytes(self.plan)

    @property
    def parameters(self) -> dict[str, int] | None:
        """Trainable parameters and all of them; None of a run that did not note them."""
        return self.start.get("parameters")

    @property
    def sample(self) -> Sample | None:
        """The newest text that it generated; None: it generates none."""
        return self.samples[-1] if self.samples else None

    @property
    def data(self) -> dict[str, str]:
        """Facts of its data by name."""
        return self.start.get("data", {})

    @property
    def recipe(self) -> str:
        """Text of the resolved recipe."""
        file = self.standing.folder / folders.RECIPE
        return file.read_text(encoding="utf-8")

    @property
    def best(self) -> tuple[int, Number] | None:
        """The step of the lowest validation loss, and that loss."""
        return _lowest(self.curves["validation_loss"])

    @property
    def perplexity(self) -> Number | None:
        """The lowest validation perplexity; None where tokens are not what is measured."""
        lowest = _lowest(self.curves["validation_perplexity"])
        return lowest and lowest[1]

    def as_dict(self) -> dict[str, Any]:
        """JSON form; units are in the names."""
        standing = self.standing
        chose = self.start.get("chose", {})
        return {
            "run": str(standing.folder),
            "recipe": standing.recipe,
            "state": standing.state,
            "step": standing.step,
            "steps": standing.steps,
            "loss": metrics.plain(standing.loss),
            "validation_loss": metrics.plain(standing.validation_loss),
            "best": None
            if self.best is None
            else dict(zip(("step", "loss"), self.best, strict=True)),
            "perplexity": self.perplexity,
            "parameters": self.parameters,
            "sample": self.sample and self.sample._asdict(),
            "chose": chose,
            "time": self.goodput.as_dict() | {"left_seconds": self.left_seconds},
            "speed": self.speed,
            "data": self.data,
            "compiles": [*self.compiles],
            "checkpoints": [
                one._asdict() | {"validation_loss": metrics.plain(one.validation_loss)}
                for one in self.checkpoints
            ],
            "cost": self.cost and self.cost._asdict(),
            "plan": {name: self.plan.get(name) for name in ("planned", "measured")},
            "plan_errors": self.errors,
            "curves": {
                name: [[step, metrics.plain(value)] for step, value in curve]
                for name, curve in self.curves.items()
            },
        }


def account(folder: Path, prices: Prices) -> Account:
    """The summary of the run in a folder, with the cost of its time."""
    standing = runs.standing(folder)
    records = _records(folder / folders.METRICS)
    starts = about.read(folder / folders.ABOUT)
    plan = plan_file.read(folder / folders.PLAN) or {}
    speed = _speed([record for record in records if "step_ms" in record], plan)
    time = goodput(pieces(folder / folders.PHASES), is_running=standing.state == "training")
    left = _left(standing, time)
    curves = {name: _curve(records, name) for name in CURVES}
    return Account(
        standing=standing,
        start=starts[-1] if starts else {},
        settings=folders.stored(folder),
        curves=curves,
        speed=speed,
        goodput=time,
        left_seconds=left,
        plan=plan,
        cost=_cost(starts[-1], plan, time.running, left, speed, prices) if starts else None,
        samples=samples.read(folder / folders.SAMPLES),
        compiles=_records(folder / folders.COMPILES),
        checkpoints=[*_checkpoints(folder, dict(curves["validation_loss"]))],
        records=metrics.by_step(records),
        answers=answers.read(folder / folders.ANSWERS),
    )


def _records(file: Path) -> list[dict[str, Any]]:
    return metrics.read(file) if file.exists() else []


def _left(standing: Standing, time: Goodput) -> Number | None:
    """Seconds that the steps to come take."""
    if standing.state == "finished" or standing.steps is None or time.pace is None:
        return None
    return max(0, standing.steps - standing.step) * time.pace


def _checkpoints(folder: Path, losses: dict[int, Number]) -> Iterator[SavedCheckpoint]:
    for step in steps_in(folder_of(folder)):
        place = folder_of(folder) / str(step)
        try:
            saved = place.stat().st_mtime
        except FileNotFoundError:  # removed meanwhile, by the run that trains
            continue
        yield SavedCheckpoint(step, runs.size_of(place), saved, losses.get(step))


def _curve(records: Iterable[dict[str, Any]], name: str) -> Curve:
    return [(record["step"], record[name]) for record in records if name in record]


def _lowest(curve: Curve) -> tuple[int, Number] | None:
    finite = [point for point in curve if math.isfinite(point[1])]
    return min(finite, key=lambda point: point[1], default=None)


def _speed(timed: Sequence[dict[str, Any]], plan: dict[str, Any]) -> dict[str, Number | None]:
    """Medians over the readings of a run; the first is of its start."""
    usual = timed[1:] or timed
    speed: dict[str, Number | None] = {
        name: median(values) if (values := [x[name] for x in usual if name in x]) else None
        for name in ("tokens_per_second", "samples_per_second", "step_ms", "data_wait_ms", "mfu")
    }
    measured = plan.get("measured") or {}
    if measured.get("step_seconds"):  # each reading counted by its steps
        speed["step_ms"] = 1000 * measured["step_seconds"]
        speed["tokens_per_second"] = measured["tokens_per_second"]
    return speed


def _cost(
    start: dict[str, Any],
    plan: dict[str, Any],
    seconds: Number,
    left: Number | None,
    speed: dict[str, Number | None],
    prices: Prices,
) -> RunCost | None:
    chose = start["chose"]
    chip = chips.find(chose["device"]["kind"])
    if chip is None:
        return None
    target = (plan.get("planned") or {}).get("target") or {}
    count = target.get("chips", chose["device"]["count"])
    offers = prices.find(chip.slug, hosts=chose["processes"])
    on_demand, spot = of_one_provider(offers)
    hours, later = count * seconds / 3600, None if left is None else count * left / 3600
    rate, tokens = on_demand and on_demand.on_demand, speed["tokens_per_second"]
    spot_rate = spot and spot.spot
    return RunCost(
        chip_hours=hours,
        on_demand_usd=rate and hours * rate,
        on_demand_place=on_demand and on_demand.place,
        spot_usd=spot_rate and hours * spot_rate,
        spot_place=spot and spot.place,
        million_tokens_usd=1e6 / tokens / 3600 * count * rate if rate and tokens else None,
        forecast_on_demand_usd=None if later is None or not rate else (hours + later) * rate,
        forecast_spot_usd=None if later is None or not spot_rate else (hours + later) * spot_rate,
        prices_date=prices.date,
    )
