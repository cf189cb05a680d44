"""A reservoir learns what no model without memory can, from the command line; and its measures.

In a language of eight symbols each follows from the last one and the one three back, nine times of
ten. Only embeddings, readout and gate learn. The ablation has no recurrence and no leak, and so no
memory. The same with a readout solved for by ridge regression, over states and their squares, where
a symbol follows from the one two back. Then reservoirs of 50 units, of several spectral radii, are
measured.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from proofs.distil import windlass_of, write

RESERVOIR = {"size": 256, "radius": 0.8, "leak": 0.7, "density": 0.2, "input_scale": 0.5}
WITHOUT = RESERVOIR | {"radius": 0.0, "leak": 1.0}
CEILING = 0.9 + 0.1 / 8
LEAST, ABOVE = 0.85, 0.6  # accuracy, and how far it is above the ablation
CAPACITY = {0.5: 13.5, 0.9: 21.4, 1.0: 21.6}  # by spectral radius, within a fifth
FORGETS, CHAOTIC = 1.2, 2.0  # spectral radii at which a start is forgotten, and is not


def prove(steps: int = 600) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        learned = accuracies(here, "reservoir", recipe([RESERVOIR], steps))
        ablated = accuracies(here, "ablation", recipe([WITHOUT], steps))
        solved = accuracies(here, "ridge", ridge(RESERVOIR, steps))
        unsolved = accuracies(here, "ridge-ablation", ridge(WITHOUT, steps))
        measured = dynamics(here)
    capacities = (
        abs(measured[radius]["memory_capacity"] / expected - 1) < 0.2
        for radius, expected in CAPACITY.items()
    )
    forgets = all(x["echo_ratio"] < 1e-9 for r, x in measured.items() if r <= FORGETS)
    radii = all(abs(x["radius"] - radius) < 1e-3 for radius, x in measured.items())
    remembers = all(
        last(accuracy) >= max(LEAST, max(without.values()) + ABOVE)
        for accuracy, without in [(learned, ablated), (solved, unsolved)]
    )
    holds = remembers and radii and all(capacities) and forgets
    return {
        "holds": holds and not measured[CHAOTIC]["forgets_its_start"],
        "accuracy": learned,
        "accuracy_without_recurrence": ablated,
        "accuracy_of_ridge_at_lag_2": solved,
        "accuracy_of_ridge_without_recurrence": unsolved,
        "ceiling": CEILING,
        "by_radius": measured,
    }


def last(accuracy: dict[int, float]) -> float:
    return accuracy[max(accuracy)]


def accuracies(here: Path, name: str, recipe: dict[str, Any]) -> dict[int, float]:
    """Validation accuracy by step."""
    write(here / f"{name}.yaml", recipe | {"run": {"dir": name}})
    windlass_of(here, "train", f"{name}.yaml")
    records = map(json.loads, (here / name / "metrics.jsonl").read_text().splitlines())
    found = ((one["step"], one.get("validation_accuracy")) for one in records)
    return {step: round(share, 4) for step, share in found if share is not None}


def dynamics(here: Path) -> dict[float, dict[str, Any]]:
    """Diagnosis of reservoirs of 50 units in the block of one model, by spectral radius."""
    radii = [*CAPACITY, FORGETS, CHAOTIC]
    small = {"size": 50, "density": 0.2, "input_scale": 0.4}
    small_ones = recipe([small | {"radius": one} for one in radii], 1)
    write(here / "small.yaml", small_ones | {"run": {"dir": "small"}})
    windlass_of(here, "train", "small.yaml")
    found = json.loads(windlass_of(here, "evaluate", "small", "--diagnose", "--json"))
    return dict(zip(radii, found["rows"], strict=True))


def recipe(reservoirs: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    model = {"family": "reservoir", "vocab": 8, "embed": 32, "layers": 1, "readout": 64}
    return {
        "model": model | {"seed": 1, "reservoirs": reservoirs},
        "data": {"source": {"kind": "lagged", "count": 20480}, "validation": 0.05},
        "optim": {"kind": "adamw", "learning_rate": 3e-3},
        "train": {"steps": steps, "batch": 32, "evaluate_every": max(1, steps // 4)},
        "device": {"kind": "cpu", "count": 1},
    }


def ridge(reservoir: dict[str, Any], steps: int) -> dict[str, Any]:
    """The same language at lag 2, of which nothing but a readout is learned, in closed form."""
    model = {"family": "echo_state", "vocab": 8, "inputs": 16, "squares": True, "seed": 1}
    learned = recipe([], steps)
    del learned["optim"]
    return learned | {
        "model": model | {"reservoirs": [reservoir | {"size": 400}]},
        "data": {"source": {"kind": "lagged", "count": 20480, "lag": 2}, "validation": 0.05},
        "objective": {"kind": "readout", "solver": "ridge", "penalty": 1e-4},
    }
