"""The summary of a run: facts, curves, cost, and its plan beside what was measured."""

import math
import time
from calendar import timegm
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from windlass import markup
from windlass.devices import chips
from windlass.planning.prices import Prices, of_one_provider
from windlass.run_folder import answers, plan_file, runs, samples
from windlass.run_folder import folder as folders
from windlass.run_folder.answers import Answers
from windlass.run_folder.runs import Standing
from windlass.run_folder.samples import Sample
from windlass.telemetry import about, metrics

# Metrics that are kept as curves over the steps.
CURVES = (
    *("loss", "validation_loss", "validation_perplexity"),
    *("learning_rate", "tokens_per_second"),
)

Number = int | float
Curve = list[tuple[int, Number]]


class RunCost(NamedTuple):
    """The cost of a run at the cheapest price; None is not known."""

    chip_hours: Number  # from each start to its end
    on_demand_usd: float | None
    on_demand_place: str | None
    spot_usd: float | None
    spot_place: str | None
    million_tokens_usd: float | None  # on demand, while steps are taken
    prices_date: str


@dataclass(frozen=True)
class Account:
    """Summary of a run from its folder, from its first step to its newest."""

    standing: Standing
    start: dict[str, Any]  # the newest: versions, devices, what was chosen
    settings: dict[str, Any]  # the recipe, resolved
    curves: dict[str, Curve]
    speed: dict[str, Number | None]
    training_seconds: Number
    wall_seconds: Number
    plan: dict[str, Any]  # planned and measured, as `plan.json` has them
    cost: RunCost | None  # None: what it ran on is not for rent, as far as is known
    sample: Sample | None  # the newest text that it generated; None: it generates none
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
            "training_seconds": self.training_seconds,
            "wall_seconds": self.wall_seconds,
            "speed": self.speed,
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
    file = folder / folders.METRICS
    records = metrics.read(file) if file.exists() else []
    starts = about.read(folder / folders.ABOUT)
    plan = plan_file.read(folder / folders.PLAN) or {}
    timed = [record for record in records if "step_ms" in record]
    wall = sum(_walls(starts, records))
    speed = _speed(timed, plan)
    return Account(
        standing=runs.standing(folder),
        start=starts[-1] if starts else {},
        settings=folders.stored(folder),
        curves={name: _curve(records, name) for name in CURVES},
        speed=speed,
        training_seconds=_training(timed),
        wall_seconds=wall,
        plan=plan,
        cost=_cost(starts[-1], plan, wall, speed, prices) if starts else None,
        sample=samples.last(folder / folders.SAMPLES),
        answers=answers.read(folder / folders.ANSWERS),
    )


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
    hours = count * seconds / 3600
    rate, tokens = on_demand and on_demand.on_demand, speed["tokens_per_second"]
    return RunCost(
        chip_hours=hours,
        on_demand_usd=rate and hours * rate,
        on_demand_place=on_demand and on_demand.place,
        spot_usd=hours * spot.spot if spot and spot.spot else None,
        spot_place=spot and spot.place,
        million_tokens_usd=1e6 / tokens / 3600 * count * rate if rate and tokens else None,
        prices_date=prices.date,
    )


def _training(timed: Iterable[dict[str, Any]]) -> Number:
    """Seconds in which steps were taken: no evaluation, no saving, no compiling."""
    total, before = 0.0, 0
    for record in timed:
        total += (record["step"] - before) * record["step_ms"] / 1000
        before = record["step"]
    return total


def _walls(starts: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]]) -> Iterator[Number]:
    """Seconds from each start to its end; of one that was killed, to its last record."""
    for number, start in enumerate(starts):
        began = _seconds(start["began"])
        if "ended" in start:
            yield _seconds(start["ended"]) - began
            continue
        after = starts[number + 1]["began"] if number + 1 < len(starts) else None
        until = time.time() if after is None else _seconds(after)
        times = [one["time"] for one in records if began <= one["time"] <= until]
        yield max(times, default=began) - began


def _seconds(moment: str) -> int:
    return timegm(time.strptime(moment, "%Y-%m-%dT%H:%M:%SZ"))
