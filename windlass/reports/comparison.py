"""Comparison of runs: speed, memory, cost, the loss after equal steps, and differing settings."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from windlass import markup
from windlass.config.sections import flat
from windlass.reports.run_summary import Account, Curve, Number
from windlass.telemetry.metrics import plain
from windlass.units import number

LOOKS = 4  # steps at which losses are compared


@dataclass(frozen=True)
class RunComparison:
    """Two or more runs, in the order in which they were named."""

    runs: Sequence[Account]

    def _repr_html_(self) -> str:
        """Table of losses after as many steps, a column for each run, for a notebook."""
        head = ["loss", *(run.name for run in self.runs)]
        rows = [
            [f"at step {step:,}", *("?" if value is None else number(value) for value in values)]
            for step, values in self.losses().items()
        ]
        best = [run.best for run in self.runs]
        rows.append(["validation, best", *("?" if x is None else number(x[1]) for x in best)])
        return markup.table(head, rows)

    @property
    def settings(self) -> dict[str, list[Any]]:
        """The keys on which recipes differ, with the value of each; absent is None."""
        every = [_set(run.settings) for run in self.runs]
        keys = dict.fromkeys(key for one in every for key in one)
        table = {key: [one.get(key) for one in every] for key in keys}
        return {key: values for key, values in table.items() if any(x != values[0] for x in values)}

    @property
    def steps(self) -> list[int]:
        """The steps at which all runs have a loss, evenly over those that all have done."""
        if not all(run.curves["loss"] for run in self.runs):
            return []
        last = min(run.curves["loss"][-1][0] for run in self.runs)
        first = max(run.curves["loss"][0][0] for run in self.runs)
        even = [round(last * part / LOOKS) for part in range(1, LOOKS + 1)]
        return [step for step in dict.fromkeys(even) if step >= first]

    def losses(self, name: str = "loss") -> dict[int, list[Number | None]]:
        """The losses of all runs at the same steps."""
        return {step: [at(run.curves[name], step) for run in self.runs] for step in self.steps}

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        hidden = ("curves", "plan")
        every = [run.as_dict() for run in self.runs]
        return {
            "runs": [
                {key: x for key, x in one.items() if key not in hidden}
                | {"memory_bytes": run.memory_bytes, "measured": one["plan"]["measured"]}
                for run, one in zip(self.runs, every, strict=True)
            ],
            "loss_at": _plain(self.losses()),
            "validation_loss_at": _plain(self.losses("validation_loss")),
            "settings": self.settings,
        }


def at(curve: Curve, step: Number) -> Number | None:
    """Value of a curve at a step, linearly interpolated."""
    after = bisect_left(curve, step, key=lambda point: point[0])
    if after < len(curve) and curve[after][0] == step:
        return curve[after][1]
    if after in (0, len(curve)):
        return None
    (first, low), (last, high) = curve[after - 1 : after + 1]
    return low + (step - first) / (last - first) * (high - low)


def _set(recipe: dict[str, Any]) -> dict[str, Any]:
    """The keys of a recipe; where it is stored is no setting."""
    return flat(_numbered({name: keys for name, keys in recipe.items() if name != "run"}))


def _numbered(value: Any) -> Any:
    """Lists of sections as sections by number, so that each of their keys is compared."""
    if isinstance(value, list) and all(isinstance(one, dict) for one in value) and value:
        value = {str(number): one for number, one in enumerate(value)}
    if isinstance(value, dict):
        return {key: _numbered(one) for key, one in value.items()}
    return value


def _plain(losses: dict[int, list[Number | None]]) -> dict[str, list[Any]]:
    return {str(step): [plain(x) for x in values] for step, values in losses.items()}
