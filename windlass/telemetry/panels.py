"""Names of metrics in panels: in groups, as TensorBoard, Weights & Biases and Trackio fold them."""

from collections.abc import Mapping
from typing import Any

NO_CURVE = ("step", "time", "token_hash")
HELD_OUT = "validation_"
# Names that panels and saved views of other trainers look for.
_ELSEWHERE = {"gradient_norm": "grad_norm"}
_PERFORMANCE = (
    *("tokens_per_second", "samples_per_second", "step_ms", "data_wait_ms", "mfu"),
    *("memory_bytes", "peak_memory_bytes", "data_part", "data_ahead_tokens"),
)


def title(metric: str) -> str:
    """Name of a metric in panels: `train/loss`, `eval/loss`, `train/grad_norm`, `perf/mfu`."""
    if metric.startswith(HELD_OUT):
        return f"eval/{metric.removeprefix(HELD_OUT)}"
    if "/" in metric:  # a task and its metric
        return f"tasks/{metric}"
    group = "perf" if metric in _PERFORMANCE else "train"
    return f"{group}/{_ELSEWHERE.get(metric, metric)}"


def curves(record: Mapping[str, Any]) -> dict[str, int | float]:
    """The numbers of a record that are points of curves, by their names in panels."""
    return {
        title(name): value
        for name, value in record.items()
        if isinstance(value, int | float) and name not in NO_CURVE
    }
