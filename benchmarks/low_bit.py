"""Perplexity of a model of Qwen3-0.6B's shape at 4 and 2 bits: rounded, and trained on its grid.

    python benchmarks/low_bit.py --to FOLDER

trains weights in bfloat16 on the built-in stories, on the accelerator that is here, and goes on
from them three times on the same tokens: in bfloat16, on the grid of Q4_0, and on 2 bits with
distillation from the first weights. Prints every perplexity on held-out stories, beside that
of the same weights rounded, and writes benchmarks/low_bit.json. `--shape small` is the same in
minutes on a CPU. The same command again goes on where it was.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.plan_cases import MODELS  # noqa: E402
from windlass import api  # noqa: E402

FILE = HERE / "low_bit.json"
SHAPES = {
    "Qwen3-0.6B": (MODELS["Qwen3-0.6B"], dict(length=512, batch=64, first=300, then=150)),
    "small": (
        MODELS["distil-small"] | {"vocab": 1024},
        dict(length=64, batch=16, first=60, then=30),
    ),
}
RECOVERED, WITHIN = 0.8, 1.4  # least share of the loss by rounding; most times the perplexity


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    asked.add_argument("--to", type=Path, required=True, help="the folder of the runs")
    given = asked.parse_args()
    began = time.monotonic()
    runs = Runs(given.to, *SHAPES[given.shape])
    found = runs.measured() | {"seconds": round(time.monotonic() - began)}
    print(json.dumps(found, indent=1))
    if given.shape != "small":
        FILE.write_text(json.dumps(found, indent=1) + "\n")


class Runs:
    """The runs of a shape, each trained when its perplexity is first asked for."""

    def __init__(self, folder: Path, model: dict[str, Any], size: dict[str, int]):
        self.folder, self.model, self.size = folder, model, size

    def measured(self) -> dict[str, Any]:
        distil = {"kind": "distil", "teacher": {"run": str(self.folder / "first")}}
        q4 = {"kind": "grid", "format": "q4_0", "scale": "learned"}
        q2 = {"kind": "scalar", "bits": 2, "granularity": 32}
        first = self.perplexity("first")
        more = self.perplexity("bfloat16", rate=1e-4)
        found: dict[str, Any] = {"first": first, "bfloat16 on the same tokens": more}
        for name, adapter, objective, rate in [
            ("q4_0", q4, "next_token", 1e-4),
            ("2 bits distilled", q2, distil, 3e-4),
        ]:
            keys = {"adapter": adapter, "objective": objective, "rate": rate}
            trained = self.perplexity(name, **keys)
            rounded = self.perplexity(name, step=0, **keys)
            found[name] = {
                "rounded": rounded,
                "trained": trained,
                "of_first": round(trained / first, 4),
                "of_bfloat16": round(trained / more, 4),
                "recovered": round((rounded - trained) / (rounded - first), 3),
                "recovered_of_bfloat16": round((rounded - trained) / (rounded - more), 3),
            }
        four, two = found["q4_0"], found["2 bits distilled"]
        found["holds"] = four["recovered"] >= RECOVERED and two["of_first"] <= WITHIN
        return found

    def perplexity(
        self,
        name: str,
        *,
        adapter: dict[str, Any] | None = None,
        objective: Any = "next_token",
        rate: float = 6e-4,
        step: int | None = None,
    ) -> float:
        run = self.folder / name.replace(" ", "-")
        steps = self.size["first" if name == "first" else "then"]
        source = {"kind": "stories", "count": 60_000, "seed": 0}
        data = {"source": source, "length": self.size["length"], "validation": 0.01}
        recipe = {
            "model": self.model if name == "first" else {"run": str(self.folder / "first")},
            **({"tokenizer": {"kind": "bpe", "vocab": 1024}} if name == "first" else {}),
            **({"adapter": adapter} if adapter else {}),
            "data": data,
            "objective": objective,
            "optim": {
                "kind": "adamw",
                "learning_rate": rate,
                "schedule": {"warmup_steps": steps // 20, "shape": "cosine", "floor": 0.1},
            },
            "train": {"steps": steps, "batch": self.size["batch"]},
            "checkpoint": {"every": steps, "keep": 2},
            "run": {"dir": str(run)},
        }
        api.train(recipe)
        scored = api.evaluate(run, step=step)
        return round(scored["perplexity"], 5)


if __name__ == "__main__":
    main()
