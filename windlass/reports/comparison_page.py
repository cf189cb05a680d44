"""The page of a comparison: the curves of several runs in one plot each, and their figures."""

from collections.abc import Callable, Iterator
from html import escape

from windlass.reports import charts, columns, html, time_page
from windlass.reports.comparison import RunComparison
from windlass.reports.curves import CurveStyle, chart
from windlass.reports.goodput import in_order
from windlass.reports.run_summary import Curve, Number
from windlass.units import count

STYLES = 8  # of lines, after which they come again
CHARTS: tuple[tuple[str, str, Callable[[Number], str], Number | None], ...] = (
    ("Loss", "loss", "{:.4g}".format, None),
    ("Validation loss", "validation_loss", "{:.4g}".format, None),
    ("Tokens/s", "tokens_per_second", count, 0.0),
    ("Learning rate", "learning_rate", "{:.3g}".format, None),
)


def page(comparison: RunComparison, *, is_live: bool = False) -> str:
    """HTML of the page; it loads nothing from elsewhere."""
    names = _names(comparison)
    body = [
        f'<div class="pair">{"".join(_curves(comparison, names))}</div>\n',
        html.section("Time", _times(comparison, names)),
        *_tables(comparison, names),
        _samples(comparison, names),
    ]
    title, lead = f"{len(names)} runs compared", ", ".join(names)
    return html.document(title, lead, "".join(body), is_live=is_live)


def _names(comparison: RunComparison) -> list[str]:
    """Names of the runs; those of the same name by their folder."""
    every = [run.name for run in comparison.runs]
    return [
        run.name if every.count(run.name) == 1 else str(run.standing.folder)
        for run in comparison.runs
    ]


def _curves(comparison: RunComparison, names: list[str]) -> Iterator[str]:
    for title, metric, show, base in CHARTS:
        lines = [
            CurveStyle(name, _curve(run.curves[metric], metric), f"line-{i % STYLES + 1}")
            for i, (name, run) in enumerate(zip(names, comparison.runs, strict=True))
        ]
        yield html.section(title, chart(title, lines, show, base=base))


def _curve(curve: Curve, metric: str) -> Curve:
    return curve[1:] if metric == "tokens_per_second" else curve  # the first is of the start


def _times(comparison: RunComparison, names: list[str]) -> str:
    """The phases of each run as a bar, on one scale."""
    longest = max((run.goodput.running for run in comparison.runs), default=0.0)
    if not longest:
        return ""
    bars = "".join(
        time_page.named_bar(name, run.goodput.seconds, longest)
        for name, run in zip(names, comparison.runs, strict=True)
    )
    kinds = in_order(kind for run in comparison.runs for kind in run.goodput.seconds)
    legend = html.legend({kind: charts.style(kind) for kind in kinds})
    return f'<div class="bars">{bars}</div>{legend}'


def _tables(comparison: RunComparison, names: list[str]) -> Iterator[str]:
    for title, group in columns.rows(comparison):
        lines = [(name, *values) for name, values in group]
        yield html.section(title.capitalize(), html.table(["", *names], lines, caption=title))


def _samples(comparison: RunComparison, names: list[str]) -> str:
    texts = "".join(
        f"<h3>{escape(name)}, step {run.sample.step:,}</h3><pre>{escape(run.sample.text)}</pre>"
        for name, run in zip(names, comparison.runs, strict=True)
        if run.sample is not None
    )
    return html.section("Samples", texts and f'<div class="samples">{texts}</div>')
