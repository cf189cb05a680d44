"""A model that reverses digits learns to add to them: its adapter alone is trained.

The tiny task of a fine-tuning: from a base that has never seen the question, with reasoning before
the answer, and a loss on what is written alone.
"""

import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

import windlass
from windlass import adapters
from windlass.checkpoint import archive
from windlass.checkpoint.store import FROZEN, folder_of, load, load_frozen, steps_in
from windlass.data.load import evaluation_batches
from windlass.starting.describe import describe
from windlass.training.session import open_session

DIGITS = "0123456789"
WORDS = [*DIGITS, "R", "A", "=", ">", ",", "\n", " ", "<end>"]  # 18 characters
MODEL = dict(vocab=18, embed=64, mlp=128, layers=2, heads=4, kv_heads=4, head_dim=16, theta=1e4)
HELD_OUT = 64  # questions that no row asks


def prove(pretraining: int = 300, tuning: int = 400) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), pretraining, tuning)


def run(here: Path, pretraining: int, tuning: int) -> dict[str, Any]:
    """Both runs, and what came of them."""
    base, tuned = (str(here / name) for name in ("base", "tuned"))
    numbers = [f"{n:04d}" for n in range(10_000)]
    Random(0).shuffle(numbers)
    asked, taught = numbers[:HELD_OUT], numbers[HELD_OUT:]
    tokenizer(here)
    rows(here / "reverse.jsonl", [{"asked": n, "answer": n[::-1]} for n in taught])
    rows(here / "add.jsonl", [{"asked": n, **added(n)} for n in taught])
    windlass.train(recipe(here, base, "reverse", pretraining) | {"model": model(here)})
    before = exact(base, [f"A\n{n}\n\n=\n" for n in asked], [added(n)["answer"] for n in asked])
    windlass.train(
        recipe(here, tuned, "add", tuning)
        | {
            "model": {"run": base},
            "adapter": {"kind": "lora", "rank": 8, "alpha": 16},
            "optim": {"kind": "adamw", "learning_rate": 5e-3, "weight_decay": 0.0},
        }
    )
    after = exact(tuned, [f"A\n{n}\n\n=\n" for n in asked], [added(n)["answer"] for n in asked])
    packed, apart = (windlass.evaluate(tuned, keys)["loss"] for keys in ([], ["data.packing=none"]))
    gap, masked, trained = inside(Path(tuned))
    found = {
        "base_reverses": exact(base, [f"R\n{n}\n\n=\n" for n in asked], [n[::-1] for n in asked]),
        "exact_match_before": before,
        "exact_match_after": after,
        "base_is_the_same_bits": fingerprints(Path(base)) == fingerprints(Path(tuned)),
        "merged_logits_differ_by": gap,
        "largest_gradient_at_masked_tokens": masked,
        "smallest_gradient_at_trained_tokens": trained,
        "packed_loss": packed,
        "unpacked_loss": apart,
    }
    holds = found["base_reverses"] > 0.95 and before == 0 and after >= 0.95
    holds &= found["base_is_the_same_bits"] and gap < 1e-4 and masked == 0 < trained
    return {"holds": holds and abs(packed / apart - 1) < 1e-5, **found}


def inside(folder: Path) -> tuple[float, float, float]:
    """Of a batch: how far merged logits are from those with the adapter, and gradients of states.

    The largest gradient of the loss by a hidden state that predicts a token which is not trained
    on, and the smallest by one that is.
    """
    described = describe(folder / "recipe.yaml", [f"run.dir={folder}"])
    with described.scope():
        session = open_session(described, Console(quiet=True))
        state, frozen = session.programs.abstract_state()
        weights = load(folder, {"weights": state.weights}, {}).state["weights"]
        kept = load_frozen(folder, frozen, {})
        rows = session.prepared.split("validation")
        batch = next(iter(evaluation_batches(rows, 8, session.programs.place, prefetch=0)))

        @jax.jit
        def look(weights, kept, batch):
            model = session.built.model(weights, kept.model)
            hidden, plain = model(batch)[0], adapters.merged(model)
            gap = model.head.logits(hidden) - plain.head.logits(plain(batch)[0])
            columns = {name: batch[name] for name in ("targets", "weight")}

            def loss(hidden):
                tile = session.run.objective._tile
                return model.head.reduce(tile, hidden, columns, statistics_of="targets")[0]

            size = jnp.max(jnp.abs(jax.grad(loss)(hidden)), axis=-1)
            is_trained = batch["weight"] > 0
            masked, trained = jnp.where(is_trained, 0, size), jnp.where(is_trained, size, jnp.inf)
            return jnp.max(jnp.abs(gap)), jnp.max(masked), jnp.min(trained)

        gap, masked, trained = map(float, look(weights, kept, batch))
        return gap, masked, trained


def fingerprints(folder: Path) -> dict[str, int]:
    """Those of the base of a run: its newest weights, or what it froze at its start."""
    place = folder_of(folder)
    name, part = (
        (FROZEN, "model.") if (place / FROZEN).exists() else (steps_in(place)[-1], "weights.")
    )
    arrays = archive.manifest(place / str(name))["arrays"]
    return {
        path.removeprefix(part).replace(".base.", "."): about["fingerprint"]
        for path, about in arrays.items()
        if path.startswith(part)
    }


def added(number: str) -> dict[str, str]:
    """Three more than each digit, and how."""
    answer = "".join(str((int(digit) + 3) % 10) for digit in number)
    return {
        "reasoning": ",".join(map(">".join, zip(number, answer, strict=True))),
        "answer": answer,
    }


def tokenizer(here: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    library = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, []))
    library.add_special_tokens([WORDS[-1]])
    library.decoder = decoders.Fuse()
    library.save(str(here / "tokenizer.json"))


def rows(path: Path, each: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in each))


def model(here: Path) -> dict[str, Any]:
    return {"family": "llama", **MODEL, "tied": True}


def recipe(here: Path, run: str, task: str, steps: int) -> dict[str, Any]:
    """A run on one of the tasks, whose loss begins behind the question."""
    answer = [{"heading": ">", "column": "answer"}]
    reasoning = [{"heading": "=", "column": "reasoning"}, *answer]
    first = {"heading": task[0].upper(), "column": "asked"}
    sections = [first, *(reasoning if task == "add" else [{"heading": "=", "column": "answer"}])]
    return {
        "tokenizer": {"kind": "file", "path": str(here / "tokenizer.json"), "eos": WORDS[-1]},
        "data": {
            "source": {"kind": "jsonl", "path": str(here / f"{task}.jsonl")},
            "format": {"kind": "sections", "sections": sections, "response": "=", "loss_from": "="},
            "length": 72,
            "validation": 0.01,
        },
        "optim": {"kind": "adamw", "learning_rate": 3e-3},
        "train": {"steps": steps, "batch": 16, "ema": None},
        "checkpoint": {"every": steps},
        "telemetry": {"every": 100},
        "device": {"kind": "cpu", "count": 1},
        "run": {"dir": run},
    }


def exact(run: str, prompts: list[str], answers: list[str]) -> float:
    """The share of prompts after which a run ends in the answer."""
    written = windlass.generate(run, prompts, tokens=30, temperature=0)
    return sum(a.split("\n")[-1] == b for a, b in zip(written, answers, strict=True)) / len(answers)
