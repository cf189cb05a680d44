"""The page of a run: one file of HTML with its curves, and its plan beside what was measured."""

from collections.abc import Callable, Iterable, Iterator
from html import escape

from windlass.planning.account import Account, Number
from windlass.planning.columns import facts, predictions
from windlass.planning.drawing import Bar, Line, bars, chart
from windlass.telemetry.console import number, quantity, size

# Colours in the order in which they are given out: on white, and on black.
COLOURS = (
    ("#2a78d6", "#3987e5"),
    ("#eb6834", "#d95926"),
    ("#1baf7a", "#199e70"),
    ("#eda100", "#c98500"),
    ("#4a3aa7", "#9085e9"),
    ("#e87ba4", "#d55181"),
    ("#008300", "#2aa52a"),
    ("#8a8a86", "#8f8f8a"),
    ("#c4c4be", "#5c5c57"),
)
REST, PALE = 7, 8  # the colours of what has none of its own
LEAST = 0.01  # the share of a whole below which a part is not drawn alone
STYLE = """\
:root{color-scheme:light dark;--page:#f6f6f4;--card:#fff;--ink:#1d1d1b;--faint:#6b6b66;
--grid:#e6e6e2;LIGHT}
@media (prefers-color-scheme:dark){:root{--page:#141413;--card:#1e1e1c;--ink:#f0f0ec;
--faint:#a2a29b;--grid:#33332f;DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 20px 48px}
h1{font-size:24px;margin:0;word-break:break-all}h2{font-size:15px;margin:0 0 10px}
.sub{color:var(--faint);margin:2px 0 22px}
.tiles,.cards{display:grid;gap:16px}
.tiles{grid-template-columns:repeat(auto-fit,minmax(170px,1fr))}
.cards{grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));margin-top:16px}
.card{background:var(--card);border-radius:12px;padding:16px 18px;min-width:0}
.tile b{display:block;font-size:26px;font-weight:600;line-height:1.25}
.tile span{color:var(--faint);font-size:13px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--faint);font-size:12px}
svg .left{text-anchor:end;dominant-baseline:middle}svg .right{dominant-baseline:middle}
.grid{stroke:var(--grid);stroke-width:1}
.limit{stroke:var(--ink);stroke-width:2;stroke-dasharray:4 4}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
circle{opacity:0}circle:hover{opacity:1}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px;color:var(--faint);margin:0 0 8px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{padding:6px 8px 6px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--grid)}
th{color:var(--faint);font-weight:400}td{word-break:break-word}.n{text-align:right}
.note{color:var(--faint);font-size:13px;margin:10px 0 0}.wide{grid-column:1/-1}
"""


def page(run: Account) -> str:
    """The page whole; it asks for nothing from elsewhere."""
    curves, speeds = run.curves, run.curves["tokens_per_second"][1:]
    loss = [Line("loss", curves["loss"], 0), Line("validation loss", curves["validation_loss"], 1)]
    cards = [
        _drawn("Loss", [one for one in loss if one.curve], "{:.4g}".format),
        _drawn(
            "Learning rate", [Line("learning rate", curves["learning_rate"], 4)], "{:.3g}".format
        ),
        # The first reading is of the start.
        _drawn("Tokens a second", [Line("tokens a second", speeds, 2)], quantity, base=0.0),
        _predictions(run),
        _memory(run),
        _facts(run),
    ]
    standing = run.standing
    sub = f"{standing.recipe}, {standing.state} at step {standing.step}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)}</title><style>{_style()}</style></head><body><main>"
        f'<h1>{escape(run.name)}</h1><p class="sub">{escape(sub)}</p>'
        f'<section class="tiles">{"".join(_tiles(run))}</section>'
        f'<section class="cards">{"".join(cards)}</section></main></body></html>\n'
    )


def _style() -> str:
    light, dark = (
        "".join(f"--c{i}:{pair[which]};" for i, pair in enumerate(COLOURS)) for which in (0, 1)
    )
    each = "".join(
        f".c{i}{{fill:var(--c{i});stroke:none}}.line.c{i}{{fill:none;stroke:var(--c{i})}}"
        f".legend .c{i}{{background:var(--c{i})}}\n"
        for i in range(len(COLOURS))
    )
    return STYLE.replace("LIGHT", light).replace("DARK", dark) + each


def _tiles(run: Account) -> Iterator[str]:
    standing, speed, wrong = run.standing, run.speed, run.errors
    if run.best is not None:
        yield _tile(number(run.best[1]), f"best validation loss, at step {run.best[0]:,}")
    elif standing.loss is not None:
        yield _tile(number(standing.loss), f"loss at step {standing.step:,}")
    if speed["tokens_per_second"]:
        yield _tile(quantity(speed["tokens_per_second"]), "tokens a second")
    if speed["mfu"]:
        yield _tile(f"{speed['mfu']:.1%}", "of the peak FLOP/s went into the model")
    if run.memory_bytes:
        yield _tile(size(run.memory_bytes), "of a device's memory")
    for name, what in (("memory", "memory"), ("time", "the time of a step")):
        if name in wrong:
            yield _tile(f"{wrong[name]:+.1%}", f"how far the plan was off, in {what}")


def _tile(value: str, what: str) -> str:
    return f'<div class="card tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>'


def _card(title: str, inner: str, is_wide: bool = False) -> str:
    return f'<div class="card{" wide" * is_wide}"><h2>{escape(title)}</h2>{inner}</div>'


def _drawn(
    title: str, lines: list[Line], shown: Callable[[Number], str], base: Number | None = None
) -> str:
    picture = chart(lines, shown, base=base)
    if not picture:
        return ""
    legend = _legend((one.name, one.colour) for one in lines) if len(lines) > 1 else ""
    return _card(title, legend + picture)


def _legend(names: Iterable[tuple[str, int]]) -> str:
    every = "".join(
        f'<span><i class="c{colour}"></i>{escape(name)}</span>' for name, colour in names
    )
    return f'<div class="legend">{every}</div>'


def _memory(run: Account) -> str:
    planned, measured = run.plan.get("planned") or {}, run.plan.get("measured") or {}
    memory = planned.get("memory") or {}
    parts = _folded(memory.get("parts_bytes") or {})
    compiled = measured.get("compiler_parts_bytes") or {}
    every = [Bar("planned", parts)] if parts else []
    if compiled:
        state = compiled["arguments"] + compiled["results"]
        found = [("state", state, REST), ("computing", compiled["temporaries"], PALE)]
        every.append(Bar("by the compiler", found))
    if measured.get("device_peak_bytes"):
        every.append(Bar("by the device", [("at most", measured["device_peak_bytes"], REST)]))
    if not every:
        return ""
    legend = _legend((name, colour) for one in every[:2] for name, _, colour in one.parts)
    limit = memory.get("limit_bytes")
    note = f'<p class="note">A program may use {size(limit)} of a device.</p>' if limit else ""
    return _card("Memory of a device", legend + bars(every, limit, size) + note, is_wide=True)


def _folded(parts: dict[str, Number]) -> list[tuple[str, Number, int]]:
    """Parts with their colours; what is too small to be seen, or has no colour left, together."""
    whole = sum(parts.values())
    large = [name for name, held in parts.items() if held >= LEAST * whole and name != "other"]
    kept = sorted(large, key=lambda name: -parts[name])[:REST]
    found = [
        (name, parts[name], colour) for colour, name in enumerate(n for n in parts if n in kept)
    ]
    rest = whole - sum(held for _, held, _ in found)
    return [*found, ("all else", rest, REST)] if rest > 0 else found


def _predictions(run: Account) -> str:
    found = predictions(run)
    if not found:
        return ""
    head = "".join(
        f'<th class="{css}">{name}</th>'
        for name, css in (("", ""), ("predicted", "n"), ("measured", "n"), ("off by", "n"))
    )
    lines = "".join(
        f"<tr><td>{escape(line[0])}</td>"
        + "".join(f'<td class="n">{escape(cell)}</td>' for cell in line[1:])
        + "</tr>"
        for line in found
    )
    notes = (run.plan.get("planned") or {}).get("notes") or []
    told = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    return _card("Plan", f"<table><tr>{head}</tr>{lines}</table>{told}")


def _facts(run: Account) -> str:
    versions = run.start.get("versions", {})
    every = [*facts(run)]
    if versions:
        every.append(("versions", ", ".join(f"{name} {found}" for name, found in versions.items())))
    lines = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in every)
    return _card("Run", f"<table>{lines}</table>", is_wide=True)
