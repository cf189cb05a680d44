"""Training steps of Windlass and of transformers + PyTorch on one GPU, in turns, in one run.

    python benchmarks/gpu.py [CASE ...] [--to benchmarks/gpu.json]
    python benchmarks/gpu.py --small          # all cases at a tiny size, on whatever is here

The same random weights, tokens, dtypes, AdamW and clip on all sides: bfloat16 products over float32
weights, or over a bfloat16 base with LoRA in float32. First the losses of 20 steps must agree, of
tokens of which half can be learned. Then each side takes some steps in turn, so that clocks and
neighbours fall on all alike; a step's time is the median over the turns. Sides:

- windlass: the step that `windlass train` compiles of a recipe without settings;
- transformers: its model with its own loss under torch.compile, fused AdamW, as people run it;
- tuned: the same body, with a chunked linear cross-entropy whose gradients are computed in the
  forward pass, so that logits are never whole.

Each rival is held against Windlass in a process of its own, so that the peaks of memory are theirs.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks import rivals  # noqa: E402
from benchmarks.plan_cases import MODELS  # noqa: E402
from windlass.columns import DocumentsInRows  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {**MODELS}
AGREE, WITHIN = 20, 1e-2  # steps whose losses must agree, and how closely
WARM, TURNS, STEPS = 5, 4, 10  # steps that are not counted; turns of a side; steps in a turn
RIVALS = ("transformers", "tuned")
ALONE = "none"
BEGAN = time.perf_counter()
TINY = dict(vocab=512, embed=64, mlp=128, layers=2, heads=4, kv_heads=2, head_dim=16)


class Case(NamedTuple):
    """A model and the batch of a step."""

    model: str
    rows: int
    length: int
    rank: int | None = None  # of LoRA; None: all weights are trained
    accumulation: int = 1
    base: str | None = None  # of LoRA, in 4 bits: nf4 or int4
    remat: str = "saved"

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def recipe(self, *, is_adapted: bool) -> dict[str, Any]:
        lora = {"adapter": {"kind": "lora", "rank": self.rank}}
        base = {"start": {"path": ".", "base": {"kind": self.base}}}
        optim = {"kind": "adamw", "learning_rate": rivals.RATE, "weight_decay": rivals.DECAY}
        optim |= {"beta1": rivals.BETAS[0], "beta2": rivals.BETAS[1], "clip_norm": rivals.CLIP}
        if not is_adapted:  # its weights alone are read: no moments beside them
            optim = {"kind": "adafactor", "learning_rate": rivals.RATE}
        return {
            "model": SHAPES[self.model],
            **(lora if is_adapted and self.rank else {}),
            **(base if is_adapted and self.base else {}),
            "tokenizer": {"kind": "byte"},
            "data": {"source": {"kind": "stories"}, "length": self.length},
            "optim": optim | {"schedule": {"shape": "constant"}},
            "train": {
                **{"steps": 1000, "batch": self.rows, "accumulation": self.accumulation},
                "remat": self.remat,
            },
        }

    def small(self) -> "Case":
        SHAPES[self.model] = SHAPES[self.model] | TINY
        return self._replace(rows=2 * self.accumulation, length=64)


CASES = {
    "full-0.5b": Case("Qwen2.5-0.5B", 32, 1024),
    "full-1.7b": Case("Qwen3-1.7B", 16, 1024),
    "lora-1.7b": Case("Qwen3-1.7B", 16, 1024, rank=16),
    "lora-2x2048x4-0.6b": Case("Qwen3-0.6B", 8, 2048, rank=16, accumulation=4),
    "lora-2x2048x4-1.7b": Case("Qwen3-1.7B", 8, 2048, rank=16, accumulation=4),
    "lora-2x2048x4-4b": Case("Qwen3-4B", 8, 2048, rank=16, accumulation=4),
    "lora-2x2048x4-8b": Case("Qwen3-8B", 8, 2048, rank=16, accumulation=4),
    "full-0.5b-8x4096": Case("Qwen2.5-0.5B", 8, 4096),
    "full-0.5b-none": Case("Qwen2.5-0.5B", 16, 1024, remat="none"),
    "lora-0.5b": Case("Qwen2.5-0.5B", 32, 1024, rank=16),
    "full-0.6b": Case("Qwen3-0.6B", 16, 1024),
    "full-1.7b-remat": Case("Qwen3-1.7B", 4, 4096, remat="full"),
    "full-gemma-1b": Case("Gemma-3-1B", 8, 1024),
    "full-smol-1.7b": Case("SmolLM2-1.7B", 8, 1024),
    "full-qwen3.5-0.8b": Case("Qwen3.5-0.8B", 4, 1024),
    "lora-qwen3.5-4b": Case("Qwen3.5-4B", 2, 1024, rank=16),
    "lora-30b-a3b": Case("Qwen3-30B-A3B", 8, 1024, rank=16),
    "lora-8b": Case("Qwen3-8B", 1, 2048, rank=16, remat="full"),
    "lora-8b-nf4": Case("Qwen3-8B", 1, 2048, rank=16, base="nf4", remat="full"),
    "lora-8b-int4": Case("Qwen3-8B", 1, 2048, rank=16, base="int4", remat="full"),
}


class Side(NamedTuple):
    """One of those that are compared."""

    step: Callable[[np.ndarray], Any]  # from rows of tokens to the loss, which may be under way
    wait: Callable[[], None]  # until all steps are done
    peak: Callable[[], int]  # bytes of the GPU

    def after(self, done: Future[Any]) -> "Side":
        """The same, whose steps begin when something is done."""

        def step(tokens: np.ndarray) -> Any:
            done.result()
            return self.step(tokens)

        return self._replace(step=step)


class Ours(NamedTuple):
    """Windlass's side, and what the others begin with."""

    running: "Running"
    config: dict[str, Any]  # config.json of the model
    tensors: dict[str, np.ndarray]  # by their names elsewhere
    flops: int  # of the model in a step


class Running(NamedTuple):
    """Windlass's step of a case, and the program that it is compiled to."""

    side: Side
    compiled: Callable[[], Any]

    @property
    def text(self) -> str:
        return self.compiled().as_text() or ""

    @property
    def bytes(self) -> int:
        """Memory of a step alone: what is made before it, such as first weights, may take more."""
        found = self.compiled().memory_analysis()
        return found.argument_size_in_bytes + found.temp_size_in_bytes


def ours(case: Case) -> Ours:
    from windlass.analysis.flops import step_flops

    config, tensors = first(case)
    adapted = programs(case, is_adapted=True)
    with adapted.built.described.scope():
        flops = step_flops(adapted, *adapted.abstract_state())
    return Ours(running(adapted), config, tensors, flops)


def first(case: Case) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json and the first weights of a case's model, as they are elsewhere."""
    from windlass import models
    from windlass.hub import config
    from windlass.hub.names import to_tensors

    plain = programs(case, is_adapted=False)
    with plain.built.described.scope():
        state, frozen = plain.init()
        whole = plain.built.whole(state.weights, frozen.model)
        tensors = to_tensors(whole, models.names(plain.run.model))
    return config.written(plain.run.model, length=case.length, dtype="float32"), tensors


def programs(
    case: Case,
    *,
    is_adapted: bool,
    settings: Sequence[str] = (),
    documents: DocumentsInRows = "one",
) -> Any:
    """Programs that `windlass train` compiles of the recipe, of rows packed with such documents."""
    import jax

    from windlass.devices import selection
    from windlass.program.built import Built
    from windlass.program.described import read_for
    from windlass.program.programs import Programs
    from windlass.starting import origin

    layers = origin.load(case.recipe(is_adapted=is_adapted), settings)
    chosen = selection.choose_here(selection.Device())
    return Programs(Built(read_for(layers, chosen, jax.devices()[:1])), 1000, documents=documents)


def whole_rows(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Columns of rows that are one document each."""
    rows = tokens.shape[0], tokens.shape[1] - 1
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weight": np.ones(rows, np.float32),
        "position": np.broadcast_to(np.arange(rows[1], dtype=np.int32), rows),
        "document": np.zeros(rows, np.int32),
    }


def running(programs: Any, columns: Callable[[Any], dict[str, np.ndarray]] = whole_rows) -> Running:
    import jax

    described = programs.built.described
    with described.scope():
        state, frozen = programs.init()
        frozen = programs.resident(frozen)
        compiled = programs.step()

    def placed(given: Any) -> dict[str, Any]:
        return {
            name: jax.device_put(np.ascontiguousarray(x), programs.place(x.shape, name))
            for name, x in columns(given).items()
        }

    def step(given: Any) -> Any:
        nonlocal state
        with described.scope():
            state, metrics = compiled(state, frozen, placed(given))
        return metrics["loss"]

    def program() -> Any:
        with described.scope():
            return compiled.prepare(state, frozen, programs.abstract_batch())

    def peak() -> int:
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)

    return Running(Side(step, lambda: jax.block_until_ready(state), peak), program)


def batches(case: Case) -> Iterator[np.ndarray]:
    """Rows with something to learn: half of their tokens follow from the one before."""
    random, vocab = np.random.default_rng(0), SHAPES[case.model]["vocab"]
    follows = random.permutation(vocab)
    while True:
        rows = random.integers(vocab, size=(case.rows, case.length + 1))
        is_known = random.random(rows.shape) < 0.5
        for place in range(1, case.length + 1):
            known = is_known[:, place]
            rows[known, place] = follows[rows[known, place - 1]]
        yield rows.astype(np.int32)


def note(text: str) -> None:
    """A line with the seconds since the start, as compilations take minutes."""
    print(f"{time.perf_counter() - BEGAN:6.0f} s  {text}", file=sys.stderr, flush=True)


def agreement(
    sides: dict[str, Side], rows: Iterator[Any], steps: int = AGREE
) -> dict[str, list[float]]:
    """Losses of the first steps, which compile too; they must be the same."""
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(steps):
        tokens = next(rows)
        for name, side in sides.items():
            losses[name].append(float(side.step(tokens)))
            if number == 0:
                note(f"{name} has compiled its step")
        first, *others = (each[-1] for each in losses.values())
        apart = max(abs(other / first - 1) for other in others)
        if not apart < WITHIN:
            sys.exit(f"step {number + 1}: {losses} are {apart:.2g} apart: not the same model")
    return losses


def seconds(
    sides: dict[str, Side], rows: Iterator[Any], steps: int = STEPS
) -> dict[str, list[float]]:
    """Seconds of a step in each turn of each side."""
    note("the turns begin")
    taken: dict[str, list[float]] = {name: [] for name in sides}
    given = [next(rows) for _ in range(steps)]
    for turn in range(-1, TURNS):
        for name, side in sides.items():
            tokens = given[:WARM] if turn < 0 else given
            side.wait()
            began = time.perf_counter()
            for each in tokens:
                side.step(each)
            side.wait()
            if turn >= 0:
                taken[name].append((time.perf_counter() - began) / len(tokens))
    return taken


def alone(case: Case) -> dict[str, Any]:
    """Windlass's step by itself, for those whose figures others have published."""
    own, rows = running(programs(case, is_adapted=True)), batches(case)
    (times,) = seconds({"windlass": own.side}, rows).values()
    middle = statistics.median(times)
    return {
        "step_ms": round(1000 * middle, 2),
        "tokens_per_second": round(case.tokens / middle),
        "peak_gib": round(own.side.peak() / 2**30, 2),
        "step_gib": round(own.bytes / 2**30, 2),
    }


def measured(case: Case, rival: str) -> dict[str, Any]:
    if rival == ALONE:
        return alone(case)
    windlass = ours(case)
    begin = rivals.Begin(windlass.config, windlass.tensors, case.rank, case.accumulation)
    note("windlass has its weights")
    with ThreadPoolExecutor(1) as pool:
        # Beside the rival, which compiles in its first step.
        compiling = pool.submit(windlass.running.compiled)
        other = Side(*rivals.side(begin, is_tuned=rival == "tuned"))
        note(f"{rival} has the same")
        sides = {rival: other, "windlass": windlass.running.side.after(compiling)}
        rows = batches(case)
        losses = agreement(sides, rows)
    taken = seconds(sides, rows)
    peak = peak_flops()
    found: dict[str, Any] = {"losses": {name: each[-1] for name, each in losses.items()}}
    for name, times in taken.items():
        middle = statistics.median(times)
        found[name] = {
            "step_ms": round(1000 * middle, 2),
            "tokens_per_second": round(case.tokens / middle),
            "peak_gib": round(sides[name].peak() / 2**30, 2),
            **({"mfu": round(windlass.flops / middle / peak, 4)} if peak else {}),
        }
    # Turn by turn, so that a slow moment of the machine is divided by one just as slow.
    ratios = [a / b for a, b in zip(taken[rival], taken["windlass"], strict=True)]
    found["ratio"] = round(statistics.median(ratios), 3)
    return found | {"turns": [round(ratio, 3) for ratio in ratios]}


def peak_flops() -> float | None:
    import jax

    from windlass.devices import chips

    chip = chips.find(jax.devices()[0].device_kind)
    return None if chip is None else chip.peak.get("bfloat16")


def setting() -> dict[str, Any]:
    """Date, versions, GPU and its clocks."""
    import jax

    names = ("jax", "torch", "transformers", "peft")
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.limit"]
    try:
        gpu = subprocess.run([*asked, "--format=csv,noheader"], capture_output=True, text=True)
        clocks = gpu.stdout.strip()
    except FileNotFoundError:
        clocks = ""
    return {
        "date": date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "gpu": clocks,
        "versions": {name: importlib.metadata.version(name) for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument(
        "--rival", choices=(*RIVALS, ALONE), help="one of them; both in turn by default"
    )
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try it anywhere")
    parser.add_argument("--to", type=Path, default=HERE / "gpu.json")
    asked = parser.parse_args()
    if unknown := set(asked.cases) - set(CASES):
        parser.error(f"there is no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    # Both sides hold memory of one GPU at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    pairs = list(product(asked.cases or CASES, [asked.rival] if asked.rival else RIVALS))
    if len(pairs) > 1:
        for name, rival in pairs:
            words = [sys.executable, __file__, name, "--rival", rival, "--to", str(asked.to)]
            subprocess.run([*words, *(["--small"] if asked.small else [])], check=True)
        return
    ((name, rival),) = pairs
    case = CASES[name].small() if asked.small else CASES[name]
    found = {**setting(), "case": case._asdict(), **measured(case, rival)}
    print(f"{name}, {rival}", json.dumps(found, indent=1))
    if not asked.small:
        held = json.loads(asked.to.read_text()) if asked.to.exists() else {}
        own = held.get(name, {}) | {rival: found}
        asked.to.write_text(json.dumps(held | {name: own}, indent=1) + "\n")


if __name__ == "__main__":
    main()
