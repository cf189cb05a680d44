"""The page of a run: one file of HTML with its curves, and its plan beside what was measured."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from importlib import resources

from windlass import units
from windlass.reports import boards, charts, columns
from windlass.reports.charts import Segment
from windlass.reports.curves import CurveStyle, chart
from windlass.reports.run_summary import Account, Number
from windlass.units import count, number, size

ROOM = 0.92  # of the width of a bar, so that its whisker has some, too
FAR = 2.5  # times the longest bar: a limit beyond it would make the bars too small to be read


def page(run: Account) -> str:
    """HTML of the page; it loads nothing from elsewhere."""
    standing = run.standing
    lead = f"{standing.recipe}, {standing.state} at step {standing.step}"
    if standing.steps is not None:
        lead += f" of {standing.steps}"
    style = resources.files("windlass.reports").joinpath("page.css").read_text(encoding="utf-8")
    body = [
        f'<header><h1>{escape(run.name)}</h1><p class="lead">{escape(lead)}</p></header>\n',
        f'<div class="cards">{"".join(_tiles(run))}</div>\n',
        f'<div class="pair">{"".join(_curves(run))}{_predictions(run)}</div>\n',
        "" if run.answers is None else _section("Pass by pass", boards.boards(run.answers)),
        _memory(run),
        _step(run),
        _facts(run),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(run.name)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(body)}</main>\n</body>\n</html>\n"
    )


def _tiles(run: Account) -> Iterator[str]:
    standing, speed, wrong = run.standing, run.speed, run.errors
    if run.best is not None:
        yield _tile(number(run.best[1]), f"best validation loss, at step {run.best[0]:,}")
    elif standing.loss is not None:
        yield _tile(number(standing.loss), f"loss at step {standing.step:,}")
    if speed["tokens_per_second"]:
        yield _tile(count(speed["tokens_per_second"]), "tokens/s")
    if speed["mfu"]:
        yield _tile(f"{speed['mfu']:.1%}", "MFU")
    if run.memory_bytes:
        yield _tile(size(run.memory_bytes), "peak memory per device")
    kinds = [kind for kind in ("memory", "time") if kind in wrong]
    if kinds:
        off = ", ".join(f"{wrong[kind]:+.1%}" for kind in kinds)
        yield _tile(off, f"error of the plan, in {' and '.join(kinds)}")


def _tile(value: str, what: str) -> str:
    return (
        f'<div class="card"><div class="big">{escape(value)}</div>'
        f'<div class="chip">{escape(what)}</div></div>'
    )


def _curves(run: Account) -> Iterator[str]:
    curves = run.curves
    losses = [CurveStyle("loss", curves["loss"], "first")]
    losses += [CurveStyle("validation loss", curves["validation_loss"], "second")]
    yield _chart("Loss", [one for one in losses if one.curve], "{:.4g}".format)
    rate = CurveStyle("learning rate", curves["learning_rate"], "third")
    yield _chart("Learning rate", [rate], "{:.3g}".format)
    # The first reading is of the start.
    speeds = CurveStyle("tokens/s", curves["tokens_per_second"][1:], "fourth")
    yield _chart("Throughput, tokens/s", [speeds], count, base=0.0)


def _chart(
    title: str, lines: list[CurveStyle], show: Callable[[Number], str], base: Number | None = None
) -> str:
    svg = chart(lines, show, base=base)
    legend = _legend({one.name: one.style for one in lines}) if len(lines) > 1 else ""
    return _section(title, svg + legend) if svg else ""


def _memory(run: Account) -> str:
    """Planned and measured memory per device, as bars on one scale."""
    planned, measured = run.planned.get("memory") or {}, run.measured
    limit, parts = planned.get("limit_bytes"), planned.get("parts_bytes") or {}
    compiled = measured.get("compiler_parts_bytes") or {}
    bars: dict[str, Mapping[str, Number]] = {"planned": parts}
    if compiled:
        state = compiled["arguments"] + compiled["results"]
        bars["by the compiler"] = {"state": state, "temporaries": compiled["temporaries"]}
    if measured.get("device_peak_bytes"):
        bars["by the device"] = {"peak": measured["device_peak_bytes"]}
    error = planned.get("error_share", 0.0)
    hint = f"A program may use {size(limit)} of each device." if limit else ""
    return _bars("Memory", hint, bars, error, limit, size)


def _step(run: Account) -> str:
    """Planned step time by part, and the measured one."""
    planned = run.planned.get("time") or {}
    bars: dict[str, Mapping[str, Number]] = {"planned": planned.get("parts_seconds") or {}}
    if planned and run.measured.get("step_seconds"):
        bars["measured"] = {"step time": run.measured["step_seconds"]}
    hint = "An optimizer step by what bounds it; work that is hidden behind other work is left out."
    return _bars("Step", hint, bars, planned.get("error_share", 0.0), None, units.seconds)


def _bars(
    title: str,
    hint: str,
    bars: dict[str, Mapping[str, Number]],
    error: float,
    limit: Number | None,
    show: Callable[[Number], str],
) -> str:
    """Bars of parts under each other; a whisker on what was planned, as much as it may be off."""
    filled = {name: parts for name, parts in bars.items() if sum(parts.values())}
    if not filled:
        return ""
    longest = max(sum(parts.values()) for parts in filled.values()) * (1 + error)
    limit = limit if limit and limit <= FAR * longest else None
    scale = max(longest, limit or 0.0) / ROOM
    rows = []
    for name, parts in filled.items():
        pieces = [
            Segment(part, value / scale, f"{name}: {part} {show(value)}")
            for part, value in parts.items()
        ]
        total = sum(parts.values())
        most = total / scale * (1 + error * (name == "planned"))
        bar = charts.bar(pieces, most=most, limit=limit and limit / scale)
        rows.append(
            f'<div class="label">{name}</div>{bar}<div class="value"><b>{show(total)}</b></div>'
        )
    several = [parts for parts in filled.values() if len(parts) > 1]
    legend = _legend({part: charts.style(part) for parts in several for part in parts})
    inside = f'<div class="bars">{"".join(rows)}</div>{legend}'
    return _section(title, f'<p class="hint">{hint}</p>{inside}' if hint else inside)


def _predictions(run: Account) -> str:
    predictions = columns.predictions(run)
    if not predictions:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("", "predicted", "measured", "off by"))
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in line) for line in predictions)
    lines = "".join(f"<tr>{line}</tr>" for line in cells)
    notes = "".join(f'<p class="hint">{escape(one)}</p>' for one in run.planned.get("notes", ()))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return _section("Plan", table + notes)


def _facts(run: Account) -> str:
    every = [*columns.facts(run)]
    if versions := run.start.get("versions"):
        every.append(("versions", ", ".join(f"{name} {each}" for name, each in versions.items())))
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in every)
    return _section("Run", f'<dl class="facts">{lines}</dl>')


def _legend(styles: Mapping[str, str]) -> str:
    keys: Iterable[str] = (
        f'<li><i class="{style}"></i>{escape(name)}</li>' for name, style in styles.items()
    )
    return f'<ul class="legend">{"".join(keys)}</ul>'


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{title}</h2>{inside}</section>\n"
