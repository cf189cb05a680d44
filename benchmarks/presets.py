"""Speed and memory of every recipe that ships, on the device that is here, beside its plan.

    python benchmarks/presets.py [RECIPE ...]

Each is trained as it is by `windlass train` for a few steps, and the figures are those of its
plan.json: steps a second, and peak memory of a device, which on a CPU is the compiler's. Not
trained are recipes that need what is not here, or are too large for the device; of a CPU, which has
no plan of its speed, also those with more FLOPs in a step than it computes in some seconds.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import short_run, table  # noqa: E402
from benchmarks.table import Line  # noqa: E402
from windlass.config import load, shipped  # noqa: E402
from windlass.run_folder import plan_file  # noqa: E402
from windlass.units import size  # noqa: E402

STEPS = 5
ON_A_CPU = "h200"  # the target whose plan says how many FLOPs a step has
CPU_FLOPS = 4e11  # of a step: about ten seconds of two cores


def absent(recipe: Any, key: str = "") -> Iterator[str]:
    """Needs of a recipe that do not come with it: of the hub, or another run."""
    if not isinstance(recipe, dict):
        return
    if recipe.get("kind") == "hub":
        yield f"{recipe['name']} of the hub"
    for name, value in recipe.items():
        if name in ("hub", "run") and isinstance(value, str) and key:
            yield f"{value} of the hub" if name == "hub" else f"the run {value}"
        else:
            yield from absent(value, f"{key}.{name}")


def reason(name: str, platform: str) -> str | None:
    """Why a recipe is not trained here; None: it is."""
    if missing := sorted(set(absent(load(name).merged(platform)))):
        return f"needs {', '.join(missing)}"
    on = ON_A_CPU if platform == "cpu" else "here"
    text, errors = output([*short_run.WINDLASS, "plan", name, "--on", on, "--json"])
    if not text:
        return errors.partition("\n")[0]
    (plan,) = json.loads(text)
    if "refused" in plan:
        return plan["refused"].partition("\n")[0]
    flops, memory = plan["time"] and plan["time"]["model_flops"], plan["memory"]
    if platform == "cpu" and flops > CPU_FLOPS:
        return f"{flops / 1e12:,.1f} TFLOP in a step, more than {CPU_FLOPS / 1e12:g}"
    if plan["fits"] == "no":
        return f"needs {size(memory['total_bytes'])} of {size(memory['limit_bytes'])}"
    return None


def output(words: list[str]) -> tuple[str, str]:
    """Output of a process, of each of its streams. This one leaves the device to others."""
    variables = short_run.surroundings({})
    done = subprocess.run(words, env=variables, capture_output=True, text=True)
    return done.stdout.strip(), done.stderr.strip()


def measured(name: str, folder: Path) -> Line:
    try:
        short_run.train(name, folder / name, folder / "cache", steps=STEPS)
    except short_run.Failed as failed:
        return Line(name, "failed", str(failed).splitlines()[-1])
    whole = json.loads((folder / name / "plan.json").read_text())
    found, planned = whole["measured"], whole["planned"] or {}
    seconds, memory = found["step_seconds"], plan_file.measured_bytes(whole)
    expected = planned.get("time") and planned["time"]["step_seconds"]
    speed = f"{1 / expected:,.2f} it/s, " if expected else ""
    return Line(
        name,
        f"{1 / seconds:,.2f} it/s, {size(memory) if memory else 'no figure'}",
        f"{speed}{size(planned['memory']['total_bytes'])} planned" if planned else "no plan",
        expected / seconds if expected else None,
    )


def main() -> None:
    parser = table.parser(__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="some of them; all by default")
    asked = parser.parse_args()
    program = "import jax; print(jax.devices()[0].platform)"
    (platform, _), lines = output([sys.executable, "-c", program]), []
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.recipes or shipped():
            why = reason(name, platform)
            lines.append(Line(name, "not run", why) if why else measured(name, Path(folder)))
            print("  ".join(lines[-1][:3]), flush=True)
    table.finish(lines, asked.to)


if __name__ == "__main__":
    main()
