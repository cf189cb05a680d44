"""Reference log-probabilities: of every target under the initial weights, before training."""

import hashlib
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree
from rich.console import Console

from windlass import files, seal
from windlass.checkpoint.fingerprint import measure
from windlass.data import Prepared, beside, reference
from windlass.data.load import evaluation_batches
from windlass.data.pack import Sequences
from windlass.data.progress import progress
from windlass.processes import hosts
from windlass.program.step import Frozen, State
from windlass.telemetry.compiles import Program
from windlass.training.session import Session


def ensure(session: Session, state: State, frozen: Frozen, run: Path, console: Console) -> None:
    """Make the column before the first step, and after it check that it is what it was.

    The files are there all at once or not at all: a run that was killed meanwhile makes them anew.
    """
    prepared = session.prepared
    if not reference.is_made(prepared):
        return
    if int(state.step):
        if hosts.is_first():
            reference.check(prepared, run)
        return
    weights = _digest(measure((state.weights, frozen.model)))
    if hosts.broadcast("has the reference", lambda: _is_there(weights, prepared, run)):
        return
    partial = run / f"{reference.FOLDER}{files.PARTIAL}"
    if hosts.is_first():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    about = {"weights": weights, "rows": _computed(session, state, frozen, partial, console)}
    if hosts.is_first():
        seal.write_signed(partial / reference.ABOUT, about)
        files.publish(partial, run / reference.FOLDER)
    hosts.barrier("the reference is written")


def make_reference(model: Callable[..., Any]) -> Callable[..., Float[Array, "batch seq"]]:
    """The log-probability of every target that is trained on, to be compiled."""

    def log_probabilities(weights: PyTree, frozen: Frozen, batch: dict[str, Array]):
        whole = model(weights, frozen.model)
        hidden, _, _ = whole(batch)
        log_p = whole.head.log_probabilities(hidden, batch["targets"])
        # Whole on every device, so that any process can write it.
        return jax.sharding.reshard(jnp.where(batch["weight"] > 0, log_p, 0.0), PartitionSpec())

    return log_probabilities


def _computed(
    session: Session, state: State, frozen: Frozen, place: Path, console: Console
) -> dict[str, dict[str, str]]:
    """Write the column of all rows; of each file, whose rows it has and its hash."""
    function = Program(
        make_reference(session.built.model),
        reference.COLUMN,
        compiler_options=session.built.described.compiler_options,
    )
    size = session.batches.per_device * session.batches.shards
    parts, about, done = beside.parts(session.prepared), {}, 0
    with progress(console, "reference log-probabilities", sum(map(len, parts.values()))) as advance:

        def values(part: Sequences) -> Iterator[np.ndarray]:
            nonlocal done
            ahead, left = session.run.data.prefetch, len(part)
            plain = part.with_beside({})
            for batch in evaluation_batches(plain, size, session.programs.place, prefetch=ahead):
                chunk = np.asarray(function(state.weights, frozen, batch))[:left]
                left, done = left - len(chunk), done + len(chunk)
                yield chunk
                advance(done, "rows")

        for name, part in parts.items():
            file = place / f"{name}.npy"
            if not hosts.is_first():  # every process computes its part, and one writes
                deque(values(part), maxlen=0)
                continue
            column = part.columns[reference.COLUMN]
            content = reference.write(file, len(part), column, values(part))
            about[name] = {"rows": part.fingerprint, "content": content}
    return about


def _is_there(weights: str, prepared: Prepared, run: Path) -> bool:
    """Return True if a run has the reference of these weights for its rows."""
    about = reference.read(run)
    return (
        about is not None
        and about["weights"] == weights
        and all(
            about["rows"].get(name, {}).get("rows") == part.fingerprint
            and reference.is_whole(run, name, about["rows"])
            for name, part in beside.parts(prepared).items()
        )
    )


def _digest(values: dict[str, int]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
