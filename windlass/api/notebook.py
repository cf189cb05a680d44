"""Live plot of a run in a notebook: its losses, drawn again as they come."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape
from typing import Any

from windlass.reports.curves import CurveStyle, chart
from windlass.reports.run_summary import Curve
from windlass.telemetry.console import ConsoleReport

PAUSE = 0.5  # seconds between two drawings, at least
STYLE = """\
.windlass { max-width: 640px; }
.windlass .plot { position: relative; height: 200px; margin: 12px 6px 0 58px; }
.windlass .plot svg { display: block; width: 100%; height: 100%; overflow: visible; }
.windlass .plot svg * { vector-effect: non-scaling-stroke; }
.windlass polyline { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.windlass .single { stroke-width: 8; }
.windlass .grid { stroke: currentColor; opacity: 0.15; }
.windlass .tick { position: absolute; right: calc(100% + 8px); transform: translateY(-50%); }
.windlass .axis { display: flex; justify-content: space-between; margin: 8px 6px 0 58px; }
.windlass .tick, .windlass .axis, .windlass .legend, .windlass details { font-size: 12px; }
.windlass .legend { display: flex; gap: 18px; margin: 6px 0 0 58px; padding: 0; list-style: none; }
.windlass .legend i { display: inline-block; width: 11px; height: 11px; margin-right: 7px; }
.windlass details { margin: 6px 0 0 58px; }
.windlass .line-1 { stroke: #2f6fde; } .windlass .line-2 { stroke: #f0913a; }
.windlass i.line-1 { background: #2f6fde; } .windlass i.line-2 { background: #f0913a; }
"""


def is_notebook() -> bool:
    """Test for a kernel behind this process, without importing what is not imported yet."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


@contextmanager
def live_report() -> Iterator[ConsoleReport | None]:
    """Report of a run with a live plot, in a notebook; None elsewhere."""
    if not is_notebook():
        yield None
        return
    with LivePlot() as report:
        yield report


class LivePlot(ConsoleReport):
    """Report of a run in a notebook: steps are points of a plot, and all else is lines."""

    def __init__(self):
        super().__init__()
        self._curves: dict[str, Curve] = {"loss": [], "validation loss": []}
        self._caption, self._drawn, self._handle = "", float("-inf"), None

    def step(self, step: int, metrics: Mapping[str, int | float]) -> None:
        self._add("loss", step, metrics.get("loss"))
        super().step(step, metrics)

    def evaluation(self, step: int, metrics: Mapping[str, int | float]) -> None:
        self._add("validation loss", step, metrics.get("validation_loss"))
        super().evaluation(step, metrics)
        self._draw()

    def close(self) -> None:
        if self._caption:
            self._draw()
        super().close()

    def _progress(self, step: int, speeds: str) -> None:
        self._caption = f"step {step:,} of {self._total:,}  {speeds}"
        self._spoke = self._clock()
        if self._spoke - self._drawn >= PAUSE:
            self._draw()

    def _add(self, name: str, step: int, value: int | float | None) -> None:
        if value is not None:
            self._curves[name].append((step, value))

    def _draw(self) -> None:
        from IPython.display import HTML, display  # type: ignore[reportMissingImports]

        self._drawn = self._clock()
        picture: Any = HTML(plot(self._curves, self._caption))
        if self._handle is None:
            self._handle = display(picture, display_id=True)
        else:
            self._handle.update(picture)


def plot(curves: Mapping[str, Curve], caption: str) -> str:
    """HTML of losses over steps, which needs nothing else."""
    styles = zip(curves, ("line-1", "line-2"), strict=True)
    lines = [CurveStyle(name, curves[name], style) for name, style in styles if curves[name]]
    return (
        f'<div class="windlass"><style>{STYLE}</style><div>{escape(caption)}</div>'
        f"{chart('Loss', lines, '{:.4g}'.format)}</div>"
    )
