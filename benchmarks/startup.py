"""Seconds from a command to its first step: imports, compilation, and starts warm and again.

    python benchmarks/startup.py                          # a small model, on whatever is here
    python benchmarks/startup.py --case full-0.5b         # that of benchmarks/gpu.py, on a GPU

Each start is a process of `windlass train`, and its times are those that the run writes down
(metrics.jsonl, compile.jsonl); it is stopped after the first step. Cold: nothing is in the cache,
neither programs nor tokens. Warm: another run of the same recipe. From a checkpoint: the cold run
goes on. The step of the small model is compiled with four times the layers, too: a scan over them
takes the same time. On one GPU each layer is part of the program instead. Where a warm start's
seconds go is said by the phases of the run.
Of a case the starts are killed, and none goes on: a checkpoint is gigabytes, which are written for
longer than all else takes.
The rival is a process that imports transformers and PyTorch, and takes a step of the same model
eagerly, of tokens that it has.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import short_run, table  # noqa: E402
from benchmarks.table import Line  # noqa: E402

SMALL = dict(family="qwen3", vocab=1024, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32)
SMALL |= dict(layers=4, theta=1e4)
DEEPER = 4
TRIES = 3  # of what takes a moment
TURNS = 2  # of a warm start and of the rival's
GOAL = 10  # seconds of a warm start of 0.5B on a GPU
RIVAL = """
import json, sys
import numpy as np, torch
from transformers import AutoConfig, AutoModelForCausalLM
written, rows, length = json.loads(sys.argv[1])
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
tokens = torch.randint(written["vocab_size"], (rows, length), device=device)
with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
    loss = model(input_ids=tokens, labels=tokens).loss
loss.backward()
optimizer.step()
print(float(loss.detach()))
"""


class Start(NamedTuple):
    """A start of a run, in seconds."""

    first_step: float  # from the command to the end of the first step
    step_program: float  # to trace the step, and to compile it or to read it from the cache
    is_cached: bool
    phases: dict[str, float]  # seconds of each

    @property
    def described(self) -> str:
        longest = sorted(self.phases.items(), key=lambda one: -one[1])
        return ", ".join(f"{name} {taken:.1f} s" for name, taken in longest if taken >= 0.1)


class Place(NamedTuple):
    """A folder of runs and caches, and the recipe that is started."""

    folder: Path
    recipe: dict[str, Any]

    def start(self, run: str, cache: str, layers: int, *, saves: bool) -> Start:
        file = self.folder / "recipe.json"  # JSON is YAML
        file.write_text(json.dumps(self.recipe))
        places = self.folder / run, self.folder / cache
        keys = [f"model.layers={layers}"]
        found = short_run.train(file, *places, keys=keys, steps=1, saves=saves)
        (step,) = (one for one in found.compiled if one["program"] == "step")
        first = found.metrics[0]["time"] - found.began
        start = Start(first, step["seconds"], step["cached"], found.phases)
        print(f"{run}: {first:.1f} s, {start.described}", file=sys.stderr, flush=True)
        return start


def seconds(words: list[str], tries: int) -> float:
    """Median time of a process, without the first, which may read from a slow disk."""
    taken = []
    for _ in range(1 + tries):
        began = time.perf_counter()
        done = subprocess.run(words, env=short_run.surroundings({}), capture_output=True, text=True)
        taken.append(time.perf_counter() - began)
        if done.returncode:
            sys.exit(f"{' '.join(words[:3])} failed:\n{done.stderr}")
    return statistics.median(taken[1:] or taken)


def recipe(case: str | None) -> dict[str, Any]:
    if case is None:
        return {
            "model": SMALL,
            "data": {"source": {"kind": "stories", "count": 500}, "length": 128},
            "optim": {"kind": "adamw", "learning_rate": 1e-3},
            "train": {"batch": 8, "steps": 1000},
        }
    from benchmarks.gpu import CASES

    return CASES[case].recipe(is_adapted=True)


def rival(made: dict[str, Any]) -> float:
    """Seconds of a first step in PyTorch, of the same model and batch."""
    from windlass.hub import config
    from windlass.run import Run
    from windlass.starting import origin

    run = origin.load(made, []).read(Run, None)
    written = config.written(run.model, length=run.data.length, dtype="float32")
    given = json.dumps([written, made["train"]["batch"], run.data.length])
    return seconds([sys.executable, "-c", RIVAL, given], tries=0)


def _compiled(layers: int, cold: Start, deep: Start | None) -> Line:
    if deep is None:
        return Line(f"compile the step of {layers} layers", f"{cold.step_program:.1f} s")
    both = cold.step_program, deep.step_program
    name = f"compile the step of {layers} layers, and of {DEEPER * layers}"
    return Line(name, "{:.1f} s, {:.1f} s".format(*both), "flat: 1", both[0] / both[1])


def _from_a_checkpoint(again: Start) -> Line:
    return Line("from a checkpoint to the first step, small", f"{again.first_step:.1f} s")


def main() -> None:
    parser = table.parser(__doc__)
    parser.add_argument("--case", help="of benchmarks/gpu.py, such as full-0.5b; none: a small one")
    asked = parser.parse_args()
    made = recipe(asked.case)
    layers = made["model"]["layers"]
    is_small = asked.case is None
    imported = seconds([sys.executable, "-c", "import windlass"], TRIES)
    helped = seconds([*short_run.WINDLASS, "--help"], TRIES)
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), made)
        cold = place.start("cold", "cache", layers, saves=is_small)
        warm, other = [], []
        for turn in range(TURNS if is_small else 1):
            warm.append(place.start(f"warm{turn}", "cache", layers, saves=is_small))
            other.append(rival(made))
        again = place.start("cold", "cache", layers, saves=True) if is_small else None
        deep = place.start("deep", "other", DEEPER * layers, saves=True) if is_small else None
        used = [*warm, again] if again else warm
        if cold.is_cached or not all(one.is_cached for one in used):
            sys.exit(f"cold {cold}, warm {warm} and again {again}: the cache is not used as meant")
    quickest = min(warm, key=lambda one: one.first_step)
    first, by_rival = quickest.first_step, min(other)
    name = asked.case or "small"
    table.finish(
        [
            Line("import windlass", f"{imported:.2f} s"),
            Line("windlass --help", f"{helped:.2f} s"),
            _compiled(layers, cold, deep),
            Line(f"cold start to the first step, {name}", f"{cold.first_step:.1f} s"),
            Line(
                f"warm start to the first step, {name} (goal {GOAL} s at 0.5B)",
                f"{first:.1f} s",
                f"{by_rival:.1f} s transformers",
                by_rival / first,
            ),
            Line("its phases", quickest.described),
            *([_from_a_checkpoint(again)] if again else []),
        ],
        asked.to,
    )


if __name__ == "__main__":
    main()
