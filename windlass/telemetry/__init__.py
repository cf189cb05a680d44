"""Telemetry of a run: metrics in a file, progress on a terminal, throughput and compilations."""

from dataclasses import dataclass
from typing import Any, ClassVar

from windlass.config import Every, listing, section
from windlass.config.reading import closest
from windlass.config.sections import Spelled

TRACKERS = ("wandb", "trackio")
MOST_TRACED = 100  # steps
PROJECT = "windlass"  # where a recipe names none


@dataclass(frozen=True)
class TrackerNames(Spelled):
    """Experiment trackers as a recipe names them: `wandb`, or a list, or null for none."""

    words: ClassVar[str] = f"{listing(TRACKERS)}, a list of these, or null"
    schema: ClassVar[dict[str, Any]] = {
        "anyOf": [
            {"enum": [*TRACKERS, None]},
            {"type": "array", "items": {"enum": [*TRACKERS]}},
        ]
    }

    names: tuple[str, ...] = ()

    @classmethod
    def read(cls, value: Any) -> "TrackerNames":
        several = [] if value is None else value if isinstance(value, list | tuple) else [value]
        for name in several:
            if name not in TRACKERS:
                meant = closest(name, TRACKERS)
                raise ValueError(f"did you mean {meant}?" if meant else f"it must be {cls.words}")
        return cls(tuple(dict.fromkeys(several)))

    def written(self) -> Any:
        return None if not self.names else self.names[0] if len(self.names) == 1 else [*self.names]


@section
class Telemetry:
    """Metrics and progress."""

    every: Every = Every(10)  # logging interval
    # trackers that the run is sent to, beside TensorBoard's files, which are always written
    trackers: TrackerNames = TrackerNames()
    project: str | None = None  # project of the run in trackers; null: windlass, or WANDB_PROJECT

    def __post_init__(self):
        if self.project is None:
            return
        if not self.project.strip() or set(self.project) & set("/\\#?%:"):
            raise ValueError(f'project is "{self.project}"; it must be a name without / \\ # ? % :')


@section
class Alarm:
    """Throughput alarm."""

    # tokens per second over all devices, below which a warning names the cause; null: half of
    # what the plan estimates, where it estimates a speed; 0: never
    tokens_per_second: float | None = None

    def __post_init__(self):
        if self.tokens_per_second is not None and self.tokens_per_second < 0:
            raise ValueError(
                f"tokens_per_second is {self.tokens_per_second:g}; it must be above 0, 0 for no "
                "alarm, or null for half of the plan's estimate"
            )


@section
class Profile:
    """Profiling of some steps: a trace, and the operations that take the time."""

    # the first and the last step of the trace, as [10, 13]; null: none
    steps: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.steps is None:
            return
        wrong, steps = None, [*self.steps]
        if len(steps) != 2:
            wrong = "it must be two numbers, the first and the last step, as [10, 13]"
        elif steps[0] > steps[1]:
            wrong = f"the first step comes before the last: {steps[::-1]} would do"
        elif steps[0] < 1:
            wrong = "steps are counted from 1"
        elif steps[1] - steps[0] >= MOST_TRACED:
            last = steps[0] + MOST_TRACED - 1
            wrong = f"a trace of more than {MOST_TRACED} steps is too large to be looked at: "
            wrong += f"{[steps[0], last]} would do"
        if wrong is not None:
            raise ValueError(f"steps is {steps}; {wrong}")
