"""Plans as an HTML page: one file that needs no network, in a light and a dark scheme."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources

from windlass import units
from windlass.planning.plan import Plan, Refused
from windlass.planning.search import Best
from windlass.planning.winner import Ranking
from windlass.reports import charts, gains, reasons
from windlass.reports.charts import Point, Segment
from windlass.units import size

FITS = {"yes": "fits", "tight": "tight", "no": "too large"}
LEFT_OUT = "left out"  # of what cannot be laid out there, or takes too long or too much money
COLUMNS = ("GiB per device", "step", "tokens/s", "MFU", "run", "on demand", "spot")
MOST = 1.8  # times what a device has: a bar that is longer is cut
ROOM = 0.92  # of the width of a bar, so that its whisker has some, too


def page(results: Sequence[Plan | Refused], command: str, rankings: Sequence[Ranking] = ()) -> str:
    """The page of some plans; `command` is what made it, and `rankings` what a search found."""
    plans = [one for one in results if isinstance(one, Plan)]
    names = list(dict.fromkeys(one.name for one in results))
    style = resources.files("windlass.reports").joinpath("page.css").read_text(encoding="utf-8")
    body = [
        _header(names, plans),
        _answers(rankings),
        f'<div class="cards">{"".join(_card(one, results) for one in results)}</div>',
        _memory(plans, names),
        _step([one for one in plans if one.time is not None], names),
        _money(plans, names),
        _table(results, names),
        _reasons(results, names),
        _section("Made with", "", f"<pre>{escape(command)}</pre>"),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(', '.join(names))}: plan</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(body)}</main>\n</body>\n</html>\n"
    )


def _header(names: Sequence[str], plans: Sequence[Plan]) -> str:
    lead = reasons.length(plans) if len(names) == 1 else f"{len(names)} recipes"
    if not reasons.reads_alike(plans):
        lead += ": runs of different lengths, compared by a million tokens"
    return f'<header><h1>{escape(", ".join(names))}</h1><p class="lead">{lead}</p></header>\n'


def _answers(rankings: Sequence[Ranking]) -> str:
    """Settings that a search found for each target, and the best target."""
    if not rankings:
        return ""
    found = [(ranking, one) for ranking in rankings for one in ranking.each]
    names = list(dict.fromkeys(one.plan.name for _, one in found if isinstance(one, Best)))
    inside = "".join(_answer(one, names) for _, one in found if isinstance(one, Best))
    for ranking in rankings:
        if ranking.winner is not None and len(ranking.each) > 1:
            inside += f"<p><b>{ranking.by}</b> {escape(gains.winning(ranking))}</p>"
    return _section("Best settings", "The keys to write in the recipe, and their effect.", inside)


def _answer(best: Best, names: Sequence[str]) -> str:
    lines = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in gains.gain(best))
    keys = f"<pre>{escape(best.yaml)}</pre>" if best.keys else ""
    return f'<h3>{_label(best.plan, names)}</h3><dl class="facts">{lines}</dl>{keys}'


def _card(one: Plan | Refused, results: Sequence[Plan | Refused]) -> str:
    target, fits = one.target, one.fits
    names = {each.name for each in results}
    recipe = f"{escape(one.name)} on " if len(names) > 1 else ""
    top = (
        f'<div class="card {fits}"><div class="name">{recipe}{escape(target.name)}'
        f"{_pill(one)}</div>"
        f'<div class="chip">{escape(reasons.heading(target))}</div>'
    )
    if isinstance(one, Refused):
        return f"{top}<p>{escape(one.why)}</p></div>\n"
    cells = reasons.cells(one)
    known = [name for name in _columns(results) if cells[name] != reasons.UNKNOWN]
    figures = "".join(
        f"<dt>{name.split(' per ')[0]}</dt><dd>{escape(cells[name])}</dd>" for name in known
    )
    return f"{top}<dl>{figures}</dl></div>\n"


def _columns(results: Iterable[Plan | Refused]) -> tuple[str, ...]:
    return COLUMNS if reasons.reads_alike(results) else (*COLUMNS, *reasons.TOKENS)


def _memory(plans: Sequence[Plan], names: Sequence[str]) -> str:
    fullest = max(one.memory.total / one.memory.limit for one in plans)
    scale = min(max(1.0, fullest), MOST) / ROOM
    bars = []
    for one in plans:
        memory = one.memory
        pieces = [
            Segment(name, part / memory.limit / scale, f"{name}: {size(part)}")
            for name, part in memory.parts.items()
        ]
        most = memory.total * (1 + memory.error) / memory.limit / scale
        bar = charts.bar(pieces, most=most, limit=1 / scale)
        text = f"<b>{units.gib(memory.total)}</b> of {units.gib(memory.limit)} GiB"
        bars.append(_row(one, names, bar, text))
    hint = (
        "Peak memory per device; the upright line is what a program may use. The whisker is the "
        "error of the estimate."
    )
    parts = _named(one.memory.parts for one in plans)
    return _section("Memory by part", hint, _bars(bars) + _legend(parts))


def _step(plans: Sequence[Plan], names: Sequence[str]) -> str:
    if not plans:
        return ""
    times = [(one, one.time) for one in plans if one.time is not None]
    scale = max(time.seconds * (1 + time.error) for _, time in times) / ROOM
    bars = []
    for one, time in times:
        pieces = [
            Segment(name, value / scale, f"{name}: {units.seconds(value)}")
            for name, value in time.parts.items()
        ]
        bar = charts.bar(pieces, most=time.seconds * (1 + time.error) / scale)
        text = f"<b>{units.seconds(time.seconds, time.error)}</b>, {escape(time.bound)}"
        bars.append(_row(one, names, bar, text))
    hint = "An optimizer step by what bounds it; work that is hidden behind other work is left out."
    parts = _named(time.parts for _, time in times)
    return _section("Step time by part", hint, _bars(bars) + _legend(parts))


def _money(plans: Sequence[Plan], names: Sequence[str]) -> str:
    is_alike = reasons.reads_alike(plans)
    points = [point for one in plans for point in _points(one, names, is_alike)]
    if not points:
        return ""
    per = "of the whole run" if is_alike else "per million tokens"
    unit, size = units.time_unit(3600 * max(point.x.expected for point in points))
    x = charts.axis(f"{unit} {per}", [point.x for point in points], size / 3600)
    y = charts.axis(f"USD {per}", [point.y for point in points])
    rates = [one.cost.inputs["preemptions_per_hour"] for one in plans if one.cost]
    restarts = "without" if None in rates else "with"
    keys = (
        '<ul class="legend"><li><i class="demand-key"></i>on demand</li>'
        f'<li><i class="spot-key"></i>spot, {restarts} restarts</li></ul>'
    )
    hint = (
        "Further left is sooner, further down is cheaper. Whiskers are the error of the estimate; "
        "targets on which it does not fit are faint."
    )
    return _section(
        "Cost against time", hint, f'<div class="scroll">{charts.points(points, x, y)}</div>{keys}'
    )


def _points(plan: Plan, names: Sequence[str], is_alike: bool) -> Iterator[Point]:
    bill = plan.cost and (plan.cost.run if is_alike else plan.cost.million_tokens)
    if bill is None:
        return
    name, out = _label(plan, names), " out" if plan.fits == "no" else ""
    kinds = {"demand": (bill.hours, bill.on_demand), "spot": (bill.spot_hours, bill.spot)}
    for style, (hours, dollars) in kinds.items():
        if hours is not None and dollars is not None:
            tooltip = f"{name}: {reasons.hours(hours)}, {reasons.dollars(dollars)}"
            yield Point(name, hours, dollars, tooltip, f"{style}{out}", style == "demand")


def _table(results: Sequence[Plan | Refused], names: Sequence[str]) -> str:
    head = '<th>target</th><th class="left">fits</th>'
    columns = _columns(results)
    head += "".join(f"<th>{name}</th>" for name in columns)
    body = "".join(_line(one, names, columns) for one in results)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return _section("All figures", "", f'<div class="scroll">{table}</div>')


def _line(one: Plan | Refused, names: Sequence[str], columns: Sequence[str]) -> str:
    if isinstance(one, Refused):
        figures = f'<td class="left" colspan="{len(columns)}">{escape(one.why)}</td>'
    else:
        cells = reasons.cells(one)
        figures = "".join(f"<td>{escape(cells[name])}</td>" for name in columns)
    named = f'<td>{_label(one, names)}</td><td class="left">{_pill(one)}</td>'
    return f'<tr class="{one.fits}">{named}{figures}</tr>'


def _pill(one: Plan | Refused) -> str:
    text = FITS[one.fits] if isinstance(one, Plan) else LEFT_OUT
    return f'<span class="pill {one.fits}">{text}</span>'


def _reasons(results: Sequence[Plan | Refused], names: Sequence[str]) -> str:
    details = []
    for one in results:
        facts = [("refused", one.why)] if isinstance(one, Refused) else list(_facts(one))
        lines = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts)
        details.append(
            f"<details><summary>{_label(one, names)} <span>{escape(reasons.heading(one.target))}"
            f'</span></summary><dl class="facts">{lines}</dl></details>'
        )
    return _section("Why", "How each run is laid out, and what to know of it.", "".join(details))


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    yield from reasons.layout(plan)
    yield from reasons.compiled(plan)
    yield "memory", reasons.memory(plan)
    if text := reasons.step(plan):
        yield "step", text
    yield from reasons.money(plan)
    yield from reasons.changes(plan)
    yield from (("note", note) for note in plan.notes)


def _row(one: Plan | Refused, names: Sequence[str], bar: str, text: str) -> str:
    return f'<div class="label">{_label(one, names)}</div>{bar}<div class="value">{text}</div>\n'


def _label(one: Plan | Refused, names: Sequence[str]) -> str:
    recipe = f"{one.name} on " if len(names) > 1 else ""
    return escape(f"{recipe}{one.target.name}")


def _bars(bars: Iterable[str]) -> str:
    return f'<div class="bars">\n{"".join(bars)}</div>'


def _legend(names: Iterable[str]) -> str:
    keys = "".join(f'<li><i class="{name}"></i>{name}</li>' for name in names)
    return f'<ul class="legend">{keys}</ul>'


def _named(parts: Iterable[dict[str, float]]) -> Iterator[str]:
    """The parts that any has, in their order."""
    yield from dict.fromkeys(name for one in parts for name, value in one.items() if value)


def _section(title: str, hint: str, inside: str) -> str:
    lead = f'<p class="hint">{hint}</p>' if hint else ""
    return f"<section><h2>{title}</h2>{lead}{inside}</section>\n"
