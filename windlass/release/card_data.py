"""Metadata of a model card, as the hub reads it: licence, data sets and evaluation results."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from windlass.hub.fetch import CARD
from windlass.run_folder import folder as folders

LICENSE = ("license", "license_name", "license_link")
HARNESS = "lm-evaluation-harness"
HELD_OUT = ("loss", "perplexity", "accuracy")  # metrics of held-out rows


class TaskResult(NamedTuple):
    """A score of a task, with its standard error and what it was measured on."""

    task: str
    metric: str
    filter: str  # of answers; `none` where there is none
    value: float
    stderr: float | None
    config: Mapping[str, Any]  # of the task
    shots: int | None

    @property
    def data(self) -> tuple[str, str | None, str | None]:
        """Data set of the hub, its configuration and its split."""
        split = self.config.get("test_split") or self.config.get("validation_split")
        return str(self.config.get("dataset_path") or ""), self.config.get("dataset_name"), split

    @property
    def title(self) -> str:
        return self.metric if self.filter == "none" else f"{self.metric} ({self.filter})"


def license_of(run: Path) -> dict[str, str]:
    """Licence of the published model that a run began with, by its card; empty: it names none."""
    from huggingface_hub import ModelCard

    file = run / folders.MODEL / CARD
    if not file.is_file():
        return {}
    try:
        text = file.read_text(encoding="utf-8")
        data = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, TypeError, AttributeError):  # of a header that is no YAML, or no mapping
        return {}
    return {name: data[name] for name in LICENSE if isinstance(data.get(name), str)}


def data_sets(recipe: Mapping[str, Any]) -> list[str]:
    """Data sets of the hub that a run was trained on."""
    data = recipe.get("data") or {}
    sources = [data.get("source"), *(data.get("mixture") or ())]
    of_hub = [one for one in sources if isinstance(one, Mapping) and one.get("kind") == "hub"]
    names = [str(one.get("name")) for one in of_hub]
    return list(dict.fromkeys(name for name in names if not Path(name).expanduser().exists()))


def task_results(run: Path, step: int, part: str) -> list[TaskResult]:
    """Scores of tasks at a step, of weights or of their average, as lm-eval wrote them."""
    found = sorted((run / folders.TASKS / folders.measured_at(step, part)).glob("results_*.json"))
    if not found:
        return []
    try:
        results = json.loads(found[-1].read_text(encoding="utf-8"))
        return list(_results(results))
    except (ValueError, KeyError, AttributeError):  # somebody edited it
        return []


def _results(results: Mapping[str, Any]) -> Iterator[TaskResult]:
    for task, values in (results["results"] | results.get("groups", {})).items():
        config, shots = results["configs"].get(task, {}), results.get("n-shot", {}).get(task)
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if "_stderr" in metric or metric == "sample_len" or not _is_finite(value):
                continue
            stderr = values.get(f"{metric}_stderr,{kind}")
            error = stderr if _is_finite(stderr) else None
            yield TaskResult(task, metric, kind or "none", value, error, config, shots)


def evaluations(
    tasks: list[TaskResult], measured: Mapping[str, Any], data: list[str], prefix: str
) -> list[Any]:
    """Evaluation results: of tasks, and of held-out rows by metrics that begin with `prefix`."""
    from huggingface_hub import EvalResult

    trained_on = data[0] if len(data) == 1 else "held-out"
    own = [
        EvalResult(
            task_type="text-generation",
            dataset_type=trained_on,
            dataset_name=f"{trained_on}, held-out rows" if data else "held-out rows",
            dataset_split="validation",
            metric_type=name,
            metric_value=measured[f"{prefix}{name}"],
        )
        for name in HELD_OUT
        if _is_finite(measured.get(f"{prefix}{name}"))
    ]
    owners: dict[Any, set[str]] = {}
    for one in tasks:
        owners.setdefault(one.data, set()).add(one.task)
    # The hub tells results apart by their data set: two tasks on one need a name of their own.
    return [*(_of_task(one, len(owners[one.data]) > 1) for one in tasks), *own]


def _of_task(one: TaskResult, is_shared: bool) -> Any:
    from huggingface_hub import EvalResult

    arguments = {"stderr": one.stderr, "num_fewshot": one.shots}
    path, configuration, split = one.data
    return EvalResult(
        task_type="text-generation",
        task_name=one.task,
        dataset_type=path if "/" in path and not is_shared else one.task,
        dataset_name=one.task,
        dataset_config=configuration,
        dataset_split=split,
        metric_type=one.metric,
        metric_name=one.title,
        metric_value=one.value,
        metric_args={name: x for name, x in arguments.items() if x is not None} or None,
        source_name=HARNESS,
        source_url="https://github.com/EleutherAI/lm-evaluation-harness",
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
