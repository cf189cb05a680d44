"""What the commands do, each as one call in Python."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from windlass import data
from windlass.checkpoint.store import load, load_frozen
from windlass.config import json_schema
from windlass.data import Prepared, tokenizer
from windlass.evaluation.generate import Generator, Sampling
from windlass.run import Run
from windlass.training import folder as folders
from windlass.training.loop import Trained, train
from windlass.training.session import Built, Evaluator, Session, describe
from windlass.training.step import Frozen

__all__ = ["Trained", "evaluate", "generate", "prepare", "schema", "stream", "train"]


def prepare(
    recipe: str | Path | dict[str, Any],
    overrides: Sequence[str] = (),
    *,
    console: Console | None = None,
) -> Prepared:
    """The data of a recipe as the model will see it: tokenised, split and packed."""
    described = describe(recipe, overrides)
    return data.prepare(described.run.data, described.run.tokenizer, console=console)


def evaluate(
    run_dir: str | Path,
    overrides: Sequence[str] = (),
    *,
    split: str = "validation",
    step: int | None = None,
    console: Console | None = None,
) -> dict[str, float]:
    """The loss and perplexity of a run's newest checkpoint, or of one step, on held-out rows."""
    built = _built(run_dir, overrides)
    with jax.set_mesh(built.mesh):
        run = built.run
        session = Session(built, data.prepare(run.data, run.tokenizer, console=console))
        evaluator = Evaluator(session, split)
        reached, weights, frozen = _weights(run_dir, built, session.identity, step, console)
        return {"step": reached, **evaluator(weights, frozen)}


def generate(
    run_dir: str | Path,
    prompts: str | Sequence[str],
    sampling: Sampling | None = None,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
) -> list[str]:
    """What a run's model writes after each prompt."""
    built = _built(run_dir, overrides)
    with jax.set_mesh(built.mesh):
        generator = _generator(run_dir, built, step)
        return generator.generate(prompts, sampling or Sampling())


def stream(
    run_dir: str | Path,
    prompt: str,
    sampling: Sampling | None = None,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
) -> Iterator[str]:
    """What a run's model writes after a prompt, in pieces as they come."""
    built = _built(run_dir, overrides)
    with jax.set_mesh(built.mesh):
        yield from _generator(run_dir, built, step).stream(prompt, sampling or Sampling())


def schema() -> dict[str, Any]:
    """The JSON schema of a recipe."""
    return json_schema(Run)


def _built(run_dir: str | Path, overrides: Sequence[str]) -> Built:
    folder = Path(run_dir).expanduser()
    folders.stored(folder)
    return Built(describe(folder / folders.RECIPE, [f"run.dir={folder}", *overrides]))


def _generator(run_dir: str | Path, built: Built, step: int | None) -> Generator:
    _, weights, frozen = _weights(run_dir, built, built.identity, step, None)
    path = str(Path(run_dir).expanduser() / folders.TOKENIZER)
    tokeniser = tokenizer.load(path, built.run.tokenizer.eos)
    return Generator(built.model(weights, frozen.model), tokeniser)


def _weights(run_dir, built: Built, identity, step: int | None, console: Console | None):
    console = console or Console(stderr=True)
    weights, frozen = built.parted(built.abstract)
    restored = load(run_dir, {"weights": weights}, identity, say=console.print, step=step)
    if jax.tree.leaves(frozen):
        frozen = load_frozen(run_dir, frozen, built.identity)
    return restored.step, restored.state["weights"], Frozen(frozen, {})
