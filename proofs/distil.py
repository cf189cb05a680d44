"""Distil and quantise, from the command line: teach, train on low bits, repair, compare, export.

A teacher of two layers learns a language of order two. Its matrices become indices of two bits, and
of four, times scales of low rank; distillation from the teacher's cached logits trains the scales,
and then small adapters, while the indices stay.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from windlass.checkpoint import store

ROOT = Path(__file__).parent.parent
MODEL = dict(
    family="llama",
    **dict(vocab=257, embed=64, mlp=192, layers=2, heads=4, kv_heads=4, head_dim=16, theta=1e4),
)
DATA = {"source": {"kind": "markov"}, "length": 128, "validation": 0.05}
TEACHER = {"path": "cache", "model": {"run": "teacher"}, "top_k": 16}
LOWERED, REPAIRED, NEAR = 4.0, 0.85, 1.05  # least fall, most that is left, most perplexity


def prove(steps: int = 600, quantised: int = 200, repaired: int = 200) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        write(here / "teacher.yaml", recipe("teacher", 3e-3, steps) | {"model": MODEL})
        windlass_of(here, "train", "teacher.yaml")
        write(here / "bits.yaml", student("bits", 2))
        windlass_of(here, "teach", "bits.yaml")
        found = {bits: of_bits(here, bits, quantised, repaired) for bits in (2, 4)}
        return {"holds": all(one["holds"] for one in found.values()), "bits": found}


def of_bits(here: Path, bits: int, quantised: int, repaired: int) -> dict[str, Any]:
    """Both runs of a width, what each gave, and whether its indices stayed."""
    rounded, trained, mended = (f"{name}-{bits}" for name in ("rounded", "quantised", "repaired"))
    write(here / f"{rounded}.yaml", student(rounded, bits, steps=1, rate=1e-30))
    write(here / f"{trained}.yaml", student(trained, bits, steps=quantised))
    lora = {"kind": "lora", "rank": 4, "init": "normal"}
    repair = student(mended, bits, steps=repaired) | {"model": {"run": trained}}
    repair["adapter"] = [repair["adapter"] | {"trains": "none"}, lora]
    write(here / f"{mended}.yaml", repair)
    for name in (rounded, trained, mended):
        windlass_of(here, "train", f"{name}.yaml")
    names = (mended, trained, rounded, "teacher")
    said = windlass_of(here, "evaluate", mended, "--beside", ",".join(names[1:]))
    divergence, perplexity = (
        dict(zip(names, column(said, name), strict=True)) for name in ("divergence", "perplexity")
    )
    exported = windlass_of(here, "export", mended, "--to", f"{mended}-export")
    low, after = divergence[trained], divergence[mended]
    indices = {name: hash_of_indices(here / name) for name in (trained, mended)}
    figures = {
        "divergence": divergence,
        "perplexity": perplexity,
        "times_lower_by_distillation": round(divergence[rounded] / low, 2),
        "lower_by_adapters": round(1 - after / low, 3),
        "perplexity_above_the_teacher": round(perplexity[mended] / perplexity["teacher"] - 1, 4),
        "indices_are_the_same_bits": len(set(indices.values())) == 1,
        "exported": exported.strip().splitlines()[-2:],
    }
    holds = divergence[rounded] >= LOWERED * low and after <= REPAIRED * low
    holds &= perplexity[mended] <= NEAR * perplexity["teacher"]
    return {"holds": holds and figures["indices_are_the_same_bits"], **figures}


def student(name: str, bits: int, steps: int = 1, rate: float = 3e-3) -> dict[str, Any]:
    """A recipe of the teacher's own weights as indices, distilled from its cache."""
    levels = {"kind": "lookup", "levels": 2**bits, "rank": 8, "group": 16}
    return recipe(name, rate, steps) | {
        "model": {"run": "teacher"},
        "adapter": levels,
        "data": DATA | {"teacher": TEACHER},
        "objective": {"kind": "distil", "tail": "drop"},
    }


def recipe(name: str, rate: float, steps: int) -> dict[str, Any]:
    return {
        "data": DATA,
        "optim": {"kind": "adamw", "learning_rate": rate, "weight_decay": 0.0},
        "train": {"steps": steps, "batch": 16},
        "device": {"kind": "cpu", "count": 1},
        "run": {"dir": name},
    }


def write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1))  # which is YAML


def windlass_of(here: Path, *words: str) -> str:
    """Output of a command, with the language of the tests among the sources."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "tests.strangers", *words],
        cwd=here,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"windlass {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def column(said: str, metric: str) -> list[float]:
    """Values of a metric in the table of an evaluation, for each that was measured."""
    *_, line = (line for line in said.splitlines() if line.split() and line.split()[0] == metric)
    return [float(word) for word in line.split()[1:]]


def hash_of_indices(run: Path) -> str:
    """Hash of what the checkpoint has of every index, whatever was added on top."""
    arrays = store.contents(run, store.FROZEN)["arrays"]
    stored = {name.replace(".base.", "."): x for name, x in arrays.items() if "indices" in name}
    return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()[:12]
