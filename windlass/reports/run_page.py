"""The page of a run: one file of HTML with its curves, its time, and its plan as it came out."""

from collections.abc import Callable, Iterator, Mapping
from html import escape

from windlass import units
from windlass.reports import boards, charts, columns, html, time_page
from windlass.reports.charts import Segment
from windlass.reports.curves import CurveStyle, chart
from windlass.reports.run_summary import Account, Number
from windlass.units import count, counted, dollars, duration, number, size

ROOM = 0.92  # of the width of a bar, so that its whisker has some, too
FAR = 2.5  # times the longest bar: a limit beyond it would make the bars too small to be read
NEWEST = 20  # samples, and compilations, that are shown


def page(run: Account, *, is_live: bool = False) -> str:
    """HTML of the page; it loads nothing from elsewhere."""
    standing = run.standing
    lead = f"{standing.recipe}, {standing.state} at step {standing.step:,}"
    if standing.steps is not None:
        lead += f" of {standing.steps:,}"
    if run.left_seconds and standing.state == "training":
        lead += f", about {duration(run.left_seconds)} left"
    body = [
        f'<div class="cards">{"".join(_tiles(run))}</div>\n',
        f'<div class="pair">{"".join(_curves(run))}{_predictions(run)}</div>\n',
        "" if run.answers is None else html.section("Pass by pass", boards.boards(run.answers)),
        time_page.time_section(run.goodput),
        time_page.starts_section(run.goodput),
        _memory(run),
        _step(run),
        _samples(run),
        f'<div class="pair">{_checkpoints(run)}{_compilations(run)}</div>\n',
        html.section("Data", html.facts(run.data.items())),
        _facts(run),
        html.section("Recipe", html.details("recipe.yaml", f"<pre>{escape(run.recipe)}</pre>")),
    ]
    return html.document(run.name, lead, "".join(body), is_live=is_live)


def _tiles(run: Account) -> Iterator[str]:
    standing, speed, wrong = run.standing, run.speed, run.errors
    if run.best is not None:
        yield html.tile(number(run.best[1]), f"best validation loss, at step {run.best[0]:,}")
    elif standing.loss is not None:
        yield html.tile(number(standing.loss), f"loss at step {standing.step:,}")
    if speed["tokens_per_second"]:
        yield html.tile(count(speed["tokens_per_second"]), "tokens/s")
    if speed["mfu"]:
        yield html.tile(f"{speed['mfu']:.1%}", "MFU")
    if run.memory_bytes:
        yield html.tile(size(run.memory_bytes), "peak memory per device")
    if run.goodput.share is not None:
        of = f"goodput, of {duration(run.goodput.running)} of running time"
        yield html.tile(f"{run.goodput.share:.1%}", of)
    if run.left_seconds:
        yield html.tile(duration(run.left_seconds), f"left to step {standing.steps:,}, about")
    yield from _cost_tiles(run)
    kinds = [kind for kind in ("memory", "time") if kind in wrong]
    if kinds:
        off = ", ".join(f"{wrong[kind]:+.1%}" for kind in kinds)
        yield html.tile(off, f"error of the plan, in {' and '.join(kinds)}")


def _cost_tiles(run: Account) -> Iterator[str]:
    cost = run.cost
    if cost is None or cost.on_demand_usd is None:
        return
    spot = "" if cost.spot_usd is None else f", {dollars(cost.spot_usd)} spot"
    yield html.tile(dollars(cost.on_demand_usd), f"cost so far, on demand{spot}")
    if cost.forecast_on_demand_usd is not None:
        later = cost.forecast_spot_usd
        spot = "" if later is None else f", {dollars(later)} spot"
        yield html.tile(dollars(cost.forecast_on_demand_usd), f"at the last step, about{spot}")


def _curves(run: Account) -> Iterator[str]:
    curves = run.curves
    losses = [CurveStyle("loss", curves["loss"], "line-1")]
    losses += [CurveStyle("validation loss", curves["validation_loss"], "line-2")]
    rate = CurveStyle("learning rate", curves["learning_rate"], "line-3")
    # The first reading is of the start.
    speeds = CurveStyle("tokens/s", curves["tokens_per_second"][1:], "line-4")
    resumed = run.goodput.resumed_at

    def drawn(title: str, lines: list[CurveStyle], show: Callable[[Number], str], **how) -> str:
        return html.section(title, chart(title, lines, show, restarts=resumed, **how))

    yield drawn("Loss", losses, "{:.4g}".format)
    yield drawn("Learning rate", [rate], "{:.3g}".format)
    yield drawn("Tokens/s", [speeds], count, base=0.0)


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
    legend = html.legend({part: charts.style(part) for parts in several for part in parts})
    return html.section(title, f'<div class="bars">{"".join(rows)}</div>{legend}', hint)


def _predictions(run: Account) -> str:
    head = ("", "predicted", "measured", "off by")
    notes = "".join(f'<p class="hint">{escape(one)}</p>' for one in run.planned.get("notes", ()))
    table = html.table(head, columns.predictions(run), caption="Predicted and measured")
    return html.section("Plan", table and table + notes)


def _samples(run: Account) -> str:
    newest = run.samples[-NEWEST:][::-1]
    if not newest:
        return ""
    last, *before = newest
    texts = f"<h3>step {last.step:,}</h3><pre>{escape(last.text)}</pre>"
    texts += "".join(
        html.details(f"step {one.step:,}", f"<pre>{escape(one.text)}</pre>") for one in before
    )
    return html.section("Samples", f'<div class="samples">{texts}</div>')


def _checkpoints(run: Account) -> str:
    lines = [
        (
            f"{one.step:,}",
            size(one.size_bytes),
            "" if one.validation_loss is None else number(one.validation_loss),
            time_page.moment(one.saved),
        )
        for one in run.checkpoints[::-1]
    ]
    head = ("step", "size", "validation loss", "saved, UTC")
    return html.section("Checkpoints", html.table(head, lines, caption="Checkpoints on disk"))


def _compilations(run: Account) -> str:
    """Programs of ours that were compiled, the newest first; small ones are only counted."""
    ours = [one for one in run.compiles if one.get("program")]
    lines = [
        (
            str(one["program"]),
            f"{one.get('step', 0):,}",
            duration(one.get("seconds", 0.0)),
            "from the cache" if one.get("cached") else str(one.get("cause", "")),
        )
        for one in ours[-NEWEST:][::-1]
    ]
    small = [one for one in run.compiles if not one.get("program") and not one.get("cached")]
    took = duration(sum(one.get("seconds", 0.0) for one in small))
    hint = f"{counted(len(small), 'small program')} more in {took}." if small else ""
    head = ("program", "at step", "time", "cause")
    return html.section("Compilations", html.table(head, lines, (3,), caption="Compilations"), hint)


def _facts(run: Account) -> str:
    every = [(name, value) for name, value in columns.facts(run) if name != "sample"]
    if versions := run.start.get("versions"):
        every.append(("versions", ", ".join(f"{name} {each}" for name, each in versions.items())))
    return html.section("Run", html.facts(every))
