"""`make plans`: a page of every recipe that ships, with its planned time, memory and cost."""

import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from huggingface_hub import constants

from tests import published
from tests.hub.published import QWEN2_5_0_5B, QWEN2_5_0_5B_INSTRUCT, QWEN3_0_6B
from windlass.api import plans
from windlass.config import shipped
from windlass.planning.plan import Plan, Refused
from windlass.reports import reasons

PAGE = "recipes.md"
TARGETS = ("v5e-1", "v6e-1", "h100")
# Of runs that want more than one chip.
LARGER = ("v5e-8", "v6e-8", "8xh100")
LARGE = ("trm-sudoku", "hrm-sudoku", "trm-maze", "trm-arc", "athena-large", "nash-mhc-3b")
COLUMNS = ("GiB per device", "step", "run", "on demand", "spot")
# Sequences of an epoch, for recipes that are measured in epochs of data that people bring.
ROWS = {"legal-cot-sft": 2054, "chat-lora": 1000, "chat-dpo": 1000}
GROUPS = {
    "Start here": ("quickstart", "sudoku-4x4"),
    "Fine-tuning": ("legal-cot-sft", "chat-lora", "chat-dpo"),
    "Distillation and low bits": ("distil-small", "qwen3-qat", "recovery-lora"),
    "Reservoirs": ("tinystories-reservoir", "tinystories-transformer"),
    "Recursive reasoning": (
        *("sudoku-9x9", "trm-sudoku", "hrm-sudoku", "trm-maze", "trm-arc"),
        *("athena-small", "athena-large"),
    ),
    "Multiscale attention": ("nash-mhc-small", "nash-mhc-3b"),
}
ABOUT = f"""\
# Recipes

A recipe is a complete run that ships with Windlass: `windlass train NAME` trains it, `windlass new
mine.yaml` and `windlass train NAME key=value` make it yours. The text of each is the head of its
file; the tables are written by `make plans` and are what this command prints:

```sh
windlass plan quickstart --on {",".join(TARGETS)}
```

`run` has three minutes to start a machine and one to compile. Prices are the cheapest of
`windlass prices`, and spot is without restarts. What `fits` means is in [planning](planning.md).
On a CPU there is no estimate of speed: where a recipe is for CPUs its text has the minutes.
"""
CONFIGS = {
    "Qwen/Qwen2.5-0.5B": QWEN2_5_0_5B,
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN2_5_0_5B_INSTRUCT,
    "Qwen/Qwen3-0.6B": QWEN3_0_6B,
}


def main(names: Collection[str]) -> None:
    """Write the page: the tables of these recipes, or of all, anew, and the others as they are."""
    path = Path("docs") / PAGE
    before = "" if not names else path.read_text(encoding="utf-8")
    path.write_text(page(before, names or shipped()), encoding="utf-8")
    print(path)


def page(before: str = "", names: Collection[str] = tuple(shipped())) -> str:
    """Page of all recipes, by what they are for; figures of those not named are as before."""
    lines = [ABOUT]
    with tempfile.TemporaryDirectory() as folder:
        offline(Path(folder))
        for title, group in GROUPS.items():
            lines += [f"## {title}\n"]
            for name in group:
                figures = table(name) if name in names else [written(before, name)]
                lines += [f"### {name}\n", *head(name), *figures]
    return "\n".join(lines)


def written(page: str, name: str) -> str:
    """Table of a recipe as a page has it."""
    start = page.index(command(name))
    return page[start:].partition("\n\n#")[0].rstrip("\n") + "\n"


def offline(folder: Path) -> None:
    """Hugging Face cache with the published configs of the models of recipes, and no weights."""
    for name, config in CONFIGS.items():
        place = published.snapshot(folder, name)
        place.mkdir(parents=True)
        (place / "config.json").write_text(config)
        published.write_tokenizer(place)
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = str(folder), True


def head(name: str) -> Iterator[str]:
    """Markdown of the comment that a recipe opens with: its commands are blocks."""
    text = shipped()[name].read_text(encoding="utf-8")
    lines = [line.removeprefix("#") for line in text[: text.index("\n\n")].splitlines()]
    is_code = False
    for line in lines:
        begins = line.startswith("   ")
        if begins != is_code and (begins or line.strip()):
            yield "```sh" if begins else "```\n"
            is_code = begins
        words = line.strip()
        if not is_code:
            words = words.replace("Hardware: ", "**Hardware**: ").replace("Expect ", "**Expect** ")
        if words or not is_code:
            yield words
    yield "```\n" if is_code else ""


def targets(name: str) -> tuple[str, ...]:
    return LARGER if name in LARGE else TARGETS


def command(name: str) -> str:
    rows = f" --rows {ROWS[name]}" if name in ROWS else ""
    return f"`windlass plan {name} --on {','.join(targets(name))}{rows}`:"


def table(name: str) -> Iterator[str]:
    """Figures of a recipe's plan on each target, and the command that prints them."""
    yield f"{command(name)}\n"
    yield f"| on | fits | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}"
    for plan in plans([name], targets(name), rows=ROWS.get(name)):
        yield f"| {plan.target.name} | {' | '.join(figures(plan))} |"
    yield ""


def figures(plan: Plan | Refused) -> list[str]:
    if isinstance(plan, Refused):
        return ["no", plan.why.partition("\n")[0], *[""] * (len(COLUMNS) - 1)]
    cells = reasons.cells(plan)
    return [plan.fits, *(cells[name] for name in COLUMNS)]


if __name__ == "__main__":
    main(sys.argv[1:])
