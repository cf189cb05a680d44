"""A run with its data, and what is measured on it."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int, PyTree
from rich.console import Console

from windlass.data import Prepared, cache_of, prepare, reference, taught
from windlass.data.load import evaluation_batches
from windlass.data.split import Split
from windlass.data.streams.prepared import StreamedData
from windlass.errors import UserError
from windlass.evaluation.answers import make_predictions
from windlass.evaluation.loss import average, make_evaluation
from windlass.objectives import Carry, Tally
from windlass.processes import hosts, shared_folders
from windlass.program.built import Built
from windlass.program.described import Described
from windlass.program.length import Length
from windlass.program.programs import Programs
from windlass.program.step import Frozen
from windlass.run import Run
from windlass.run_folder import folder as folders
from windlass.starting import frozen_models
from windlass.telemetry.compiles import Program
from windlass.training.documents import documents_in_rows

NO_TEXT = "the data has blocks without a vocabulary, so that there is no text"
# What decides, of given documents, which rows a step has.
ROWS = ("stride", "packing", "shuffle", "validation", "test", "split_seed")


class Session:
    """A run with its data: what is needed to train it. To be used with its mesh set."""

    def __init__(self, built: Built, prepared: Prepared):
        run = built.run
        if (vocab := prepared.vocab) is not None and vocab > run.model.vocab:
            whose = (
                "tokenizer has" if prepared.vocabulary is not None else "rows of data.source have"
            )
            raise UserError(
                f"model.vocab is {run.model.vocab}; the {whose} {vocab} tokens, so it must be "
                f"{vocab} or more"
            )
        table = getattr(getattr(run.model, "prefix", None), "identifiers", None)
        if table is not None and (count := prepared.identifiers) is not None and count > table:
            raise UserError(
                f"model.prefix.identifiers is {table:,}; the rows of data.source have {count:,} "
                f"identifiers, so it must be {count} or more"
            )
        # Of documents that is known from the recipe; arrays may hold text, too.
        if not run.model.causal and (wrong := run.objective.problems_of_text(run.model)):
            if prepared.has_next_tokens:
                raise UserError(f"the objective does not fit model and data.source: {wrong[0]}")
        if run.train.sample is not None and prepared.vocabulary is None:
            raise UserError(
                f'train.sample is "{run.train.sample}", and {NO_TEXT}; train.sample=null leaves '
                "samples out"
            )
        self.built, self.run, self.prepared = built, run, prepared
        self.batches = built.described.batches
        self.length = Length.of(run.train, len(prepared.split("train")) // self.batches.rows)
        documents = documents_in_rows(prepared.split("train"))
        self.programs = Programs(built, self.length.steps, documents)

    def evaluation(self) -> Callable[..., Tally]:
        """The objective on a batch, to be compiled."""
        return make_evaluation(
            self.built.model,
            self.run.objective,
            steps=self.length.steps,
            helpers=self.built.joined,
        )

    @cached_property
    def identity(self) -> dict[str, str | int | float]:
        """Identity for checkpoints: what the run that resumes from one must agree on."""
        vocabulary = self.prepared.vocabulary
        return self.built.identity | {
            "tokenizer": "none" if vocabulary is None else vocabulary.described,
            "data": f"{self.prepared.fingerprint[:12]} in rows of {self.run.data.length}",
            **{f"data.{name}": _shown(getattr(self.run.data, name)) for name in ROWS},
            "optim": self.run.optim.kinds if self.run.optim else "none",
            "batch": self.batches.rows,
            "ema": self.run.train.ema or "none",
            "loss scale": "of float16" if self.programs.scales_loss else "none",
            "data.longer": self.run.data.lengthy,
            "seed": self.run.train.seed,
            **frozen_models.identity(self.run),
            **taught.identity(self.prepared),
        }


def open_session(described: Described, console: Console) -> Session:
    tokenizer = folders.tokenizer(described.folder, described.run.tokenizer)
    data = folders.streamed(described.folder, described.run.data)
    prepared = shared_folders.once(
        "preparing the data", cache_of(data), lambda: prepare(data, tokenizer, console=console)
    )
    check_same(prepared)
    if isinstance(prepared, StreamedData):
        is_shared = shared_folders.seen(cache_of(data))[hosts.index()]
        prepared.rows.waits = is_shared and not hosts.is_first()
    return Session(Built(described), joined(prepared, described.run, described.folder))


def joined(prepared: Prepared, run: Run, folder: Path) -> Prepared:
    """The data of a run with the columns that are stored beside its rows."""
    if run.data.teacher is not None:
        teacher = frozen_models.content_of_teacher(run.data.teacher)
        prepared = taught.joined(prepared, vocab=run.model.vocab, teacher=teacher)
    return reference.joined(prepared, folder, run.columns)


def check_same(prepared: Prepared) -> None:
    """Check that all processes have the same data, of which each reads its own rows."""
    vocabulary = prepared.vocabulary
    fingerprints = f"documents {prepared.fingerprint[:12]}"
    fingerprints += "" if vocabulary is None else f", tokenizer {vocabulary.fingerprint[:12]}"
    every = hosts.each("data", fingerprints)
    others = [number for number, theirs in enumerate(every) if theirs != every[0]]
    if others:
        raise UserError(
            f"hosts have different data: process 0 has {every[0]}, and process {others[0]} has "
            f"{every[others[0]]}; data.source and tokenizer must give every host the same"
        )


class Evaluator:
    """The loss on some rows, compiled once. To be used with the mesh set."""

    def __init__(self, session: Session, split: str):
        self.session, self.rows = session, session.prepared.split(split)
        self.function = Program(
            session.evaluation(),
            "evaluation",
            compiler_options=session.built.described.compiler_options,
        )

    def __call__(
        self, weights: PyTree, frozen: Frozen, carry: Carry, step: Int[Array, ""]
    ) -> dict[str, float]:
        """The averages of weights as they are trained: what the objective solves for is solved."""
        weights, rest = self.session.programs.finish(weights, frozen.model, carry)
        frozen = frozen._replace(model=rest)
        size = self.session.batches.per_device * self.session.batches.shards
        ahead = self.session.run.data.prefetch
        batches = evaluation_batches(self.rows, size, self.session.programs.place, prefetch=ahead)
        return average(self.function(weights, frozen, batch, carry, step) for batch in batches)


class Predictor:
    """Answers to rows, compiled once. To be used with the mesh set."""

    def __init__(self, session: Session):
        self.session = session
        self.function = Program(
            make_predictions(session.built.model, session.run.objective),
            "predictions",
            compiler_options=session.built.described.compiler_options,
        )

    def __call__(
        self, rows: Split, weights: PyTree, frozen: Frozen, carry: Carry
    ) -> dict[str, np.ndarray]:
        """The columns of all rows, and beside them what the objective predicts for each."""
        weights, rest = self.session.programs.finish(weights, frozen.model, carry)
        frozen = frozen._replace(model=rest)
        size = self.session.batches.per_device * self.session.batches.shards
        ahead = self.session.run.data.prefetch
        batches = evaluation_batches(rows, size, self.session.programs.place, prefetch=ahead)
        found = [jax.device_get(batch | self.function(weights, frozen, batch)) for batch in batches]
        return {
            name: np.concatenate([one[name] for one in found])[: len(rows)] for name in found[0]
        }


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower()
