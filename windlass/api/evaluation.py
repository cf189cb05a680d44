"""Calls that measure a model: loss, perplexity and scores."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

from windlass.api.generation import build_generator, check_generates
from windlass.config import Overrides, listing, tree, words
from windlass.data import Prepared, prepare, reference
from windlass.data.blocks import BlockRows
from windlass.data.split import SPLITS, Split
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.evaluation import answers, harness, published_model
from windlass.evaluation.likelihood import Scorer
from windlass.evaluation.published_model import PublishedModel, open_model, open_on_data
from windlass.evaluation.verdict import verdict
from windlass.models import Diagnosed, Diagnosis
from windlass.objectives import Carry
from windlass.program.built import Built
from windlass.program.programs import solves
from windlass.program.step import Frozen
from windlass.run import OBJECTIVES, Run
from windlass.run_folder import folder as folders
from windlass.run_folder.runs import find
from windlass.starting import frozen_models
from windlass.telemetry import about as abouts
from windlass.telemetry.about import About
from windlass.terminal import Terminal
from windlass.training.session import Evaluator, Predictor, Session, joined

PLACE = re.compile(r"(device|mesh|precision)\b")  # keys of where a model computes, not of which


def evaluate(
    run: str | Path | None,
    overrides: Overrides = (),
    *,
    split: str = "validation",
    weights: str = "last",
    step: int | None = None,
    data: str | Path | Mapping[str, Any] | None = None,
    beside: str | Path | Sequence[str | Path] = (),
    votes: int | None = None,
    save: str | Path | None = None,
    console: Console | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """Loss and perplexity of a run's newest checkpoint, or of one step, on held-out data.

    In place of a run it may be a model: a folder, an export or OWNER/NAME. `data` then names what
    it is measured on: a run or a recipe whose data it is, a file, a folder or OWNER/NAME. As a
    mapping it is the section of that name, overridden.

    `weights` are those of the `last` step, the `best` (of the lowest validation loss) or their
    average over the steps, `ema`. Where not all tokens are trained on, `over` says what loss and
    perplexity are of. On the test split validation is measured too, with a verdict on
    both, and the run counts the `looks`: each makes it less of a test.

    Other runs and models `beside` it are measured on the same rows by the same objective, and are
    in the answer under that name, by theirs.

    Where the objective predicts answers by row, `votes` of so many variants of a row (relabelled
    and turned puzzles, copies of an ARC task) elect one: `pass@1` is the share of rows that it is
    right for, `pass@2` that it or the second is. `save` names a .npz file for the rows, the answers
    to them after every pass, the probability that each is right, and what was elected.
    """
    if split not in SPLITS:
        raise UserError(f"split is {split}; it must be {listing(SPLITS)}")
    if save is not None:
        answers.check_file(Path(save))
    if isinstance(data, Mapping):
        keys, data = keys | {"data": data}, None
    opened = open_on_data(run, data, words(overrides, keys), weights=weights, step=step)
    is_run = not isinstance(opened, PublishedModel)
    folder, built = opened.folder, opened.built
    with opened.scope():
        described = built.run
        documents = folders.streamed(folder, described.data) if is_run else described.data
        prepared = prepare(documents, _tokenizer(folder, described), console=console)
        if split not in prepared.splits:
            has = listing(prepared.splits, "and")
            what = "rows" if described.data.has_blocks else "documents"
            raise UserError(f"{folder} holds out no {split} {what}; it has {has} ones")
        prepared = joined(prepared, described, folder)
        session = Session(built, prepared)
        splits = [split] if split != "test" else ["validation", "test"]
        reference.check(prepared, folder, splits)
        if votes is not None or save is not None:
            _check_answers(session, prepared.split(split), votes)
        evaluators = {name: Evaluator(session, name) for name in splits if name in prepared.splits}
        # Other rows in other batches are no other model; other tokens are.
        agreed = ("tokenizer", *map(frozen_models.key, described.helpers))
        identity = {name: session.identity[name] for name in agreed}
        loaded = opened.load(identity=identity)
        loaded = loaded.with_helpers(frozen_models.take(built, prepared.vocabulary)[0])
        reached = loaded.step
        if is_run:
            written = str(loaded.identity.get("data", ""))
            _warn_of_changed_documents(folder, described, prepared, written, console)
        measured = {name: one(*loaded.arguments) for name, one in evaluators.items()}
        answer: dict[str, Any] = {"step": reached, **measured[split]}
        if votes is not None or save is not None:
            answer |= _answers(session, prepared.split(split), loaded, votes, save)
        if "perplexity" in answer and prepared.is_weighted:
            answer["over"] = "the tokens that are trained on, each by its weight"
        if split == "test":
            if is_run:
                look = {"step": reached, "weights": weights}
                answer["looks"] = _note_look(folder, described, console, **look)
            if "validation" in measured:
                answer |= {f"validation_{k}": x for k, x in measured["validation"].items()}
                losses = (one.get("cross_entropy", one["loss"]) for one in measured.values())
                known, new = losses
                is_of_tokens = described.objective.unit == "token"
                unigram = prepared.unigram_entropy if is_of_tokens else None
                names = ("test", "validation")
                answer["verdict"] = verdict(new, known, names=names, unigram=unigram)
    if others := [beside] if isinstance(beside, str | Path) else [*beside]:
        if solves(session.run.objective):
            raise UserError(
                f"the objective of {folder} solves for weights of its own model, and so measures "
                "no other; evaluate each by itself"
            )
        requested = words(overrides, keys)
        answer["beside"] = {str(name): _beside(name, requested, session, split) for name in others}
    return answer


def _check_answers(session: Session, rows: Split, votes: int | None) -> None:
    """Refuse what has no answers by row, or none that could vote."""
    if not answers.predicts(type(session.run.objective)):
        able = [one for one in OBJECTIVES.names() if answers.predicts(OBJECTIVES.load(one))]
        raise UserError(
            "--save and --votes are of answers by row, and the objective "
            f"{_kind(session.run.objective)} has none; {listing(able)} has"
        )
    if votes is None:
        return
    if votes < 1:
        raise UserError(f"--votes is {votes}; it is a number of variants of each row, 1 or more")
    if not isinstance(rows, BlockRows):
        raise UserError(
            f"--votes is {votes}, and variants of a row are of one source of blocks, such as "
            "puzzles; this data has none"
        )
    if votes > (most := rows.source.variants):
        has = "no variant but itself: leave it out"
        if most > 1:
            has = f"{most:,} variants, itself included; {most} or less would do"
        kind = _kind(rows.source)
        raise UserError(f"--votes is {votes}, and a row of data.source.kind {kind} has {has}")


def _answers(
    session: Session, rows: Split, loaded: Any, votes: int | None, save: str | Path | None
) -> dict[str, Any]:
    """Results of votes on the answers to all rows; answers are saved where a file is named."""
    predictor, arguments = Predictor(session), (loaded.weights, loaded.frozen, loaded.carry)
    found, metrics = predictor(rows, *arguments), {}
    if votes is not None:
        assert isinstance(rows, BlockRows)
        ballot = answers.Ballot(len(rows))
        for copy in range(votes):
            variant = rows.variant(copy)
            one = predictor(variant, *arguments) if copy else found
            ballot.cast(variant.restored(one["answers"][:, -1]), one["halt"][:, -1])
        ranked = ballot.ranked()
        metrics = {"votes": votes, **ranked.passed(found["targets"], found["weight"])}
        found |= {"elected": ranked.answers, "votes": ranked.votes}
    if save is not None:
        answers.save(Path(save), found)
        metrics["saved"] = str(save)
    return metrics


def _kind(section: Any) -> str:
    return type(section).__module__.rpartition(".")[2]


def _beside(
    name: str | Path, overrides: Sequence[str], session: Session, split: str
) -> dict[str, Any]:
    """Metrics of another run or model on the rows of a session, by its objective."""
    other = open_model(name, [word for word in overrides if PLACE.match(word)])
    sections = {part: getattr(session.run, part) for part in ("data", "objective", "helpers")}
    built = Built(replace(other.built.described, run=replace(other.run, **sections)))
    prepared, ours = session.prepared, session.prepared.vocabulary
    with other.scope():
        if ours is not None and (theirs := other.vocabulary) is not None:
            if (number := ours.first_difference(theirs)) is not None:
                raise UserError(
                    f"--beside {name}: token {number} is {theirs.name(number)!r} in its vocabulary "
                    f"and {ours.name(number)!r} in that of {session.built.described.folder}; what "
                    "is measured side by side has one vocabulary"
                )
        evaluator = Evaluator(Session(built, prepared), split)
        step, weights, frozen = other.used()
        whole = Frozen(frozen, frozen_models.take(built, ours)[0])
        return {"step": step, **evaluator(weights, whole, Carry(), jax.numpy.int32(step))}


def diagnose(
    run: str | Path | None,
    overrides: Overrides = (),
    *,
    weights: str = "last",
    step: int | None = None,
    **keys: Any,
) -> Diagnosis:
    """Measures of a model that need no data, where its family has such."""
    opened = open_model(run, words(overrides, keys), weights=weights, step=step)
    if not isinstance(opened.abstract, Diagnosed):
        family = type(opened.run.model).__module__.rpartition(".")[2]
        raise UserError(
            f"--diagnose is of models that can be measured without data, and family {family} "
            "declares no such measure; windlass evaluate without it measures the loss"
        )
    with opened.scope():
        return opened.model().diagnose()


def subject(run: str | Path | None) -> tuple[str, str]:
    """Kind and name of what is evaluated: a run and its folder, or a model."""
    is_run = published_model.find(run) is None
    return ("run", str(find(run))) if is_run else ("model", str(run))


def tasks(
    run: str | Path | None,
    names: str | Sequence[str],
    overrides: Overrides = (),
    *,
    limit: int | None = None,
    shots: int | None = None,
    folder: str | Path | None = None,
    chat: bool | None = None,
    weights: str = "last",
    step: int | None = None,
    batch: int = 8,
    **keys: Any,
) -> dict[str, dict[str, float]]:
    """Scores of a run's model on lm-evaluation-harness tasks, and their standard errors.

    At most `limit` examples are measured per task, each after `shots` solved ones; `folder` has
    one's own tasks. `chat` applies the chat template: by default, where the run was trained on
    chats. The results file of the harness goes to the folder of the run.
    """
    every = [names] if isinstance(names, str) else names
    opened = open_model(run, words(overrides, keys), weights=weights, step=step)
    check_generates(opened)
    tasks = harness.Harness(every, limit=limit, shots=shots, folder=folder)
    with opened.scope():
        reached, *arrays = opened.used()
        generator = build_generator(opened, opened.built.model(*arrays))
        scorer = Scorer(generator.model, longest=opened.context_length, batch=batch)
        is_chat = harness.uses_chat(opened.run.data.format, generator.vocabulary, chat)
        measured = tasks(scorer, generator, chat=is_chat)
    if not isinstance(opened, PublishedModel):
        place = opened.folder / folders.TASKS / folders.measured_at(reached, opened.part)
        harness.write(measured.results, place)
    return {name: dict(_with_errors(scores)) for name, scores in measured.scores.items()}


def _with_errors(scores: Mapping[str, harness.Score]) -> Iterator[tuple[str, float]]:
    for metric, score in scores.items():
        yield metric, score.value
        if score.stderr is not None:
            yield f"{metric}_stderr", score.stderr


def _tokenizer(folder: Path, run: Run) -> Tokenizer:
    """Tokenizer of a run: what was learned from a corpus is not learned again from another."""
    if run.tokenizer.kind != "bpe":
        return folders.tokenizer(folder, run.tokenizer)
    return Tokenizer(kind="file", path=str(folder / folders.TOKENIZER))


def _warn_of_changed_documents(
    folder: Path, run: Run, prepared: Prepared, written: str, console: Console | None
) -> None:
    """Warn when a run's own documents are no longer those that it was trained on."""
    is_other = _is_other_data(folder, run)
    if not is_other and not written.startswith(prepared.fingerprint[:12]):
        _say(console, f"the documents of {folder} changed since it was trained: these are measured")


def _is_other_data(folder: Path, run: Run) -> bool:
    """Test for other documents than a run's own."""
    stored, ours = folders.stored(folder)["data"], tree(run.data)
    return any(stored.get(name) != ours[name] for name in ("source", "mixture"))


def _note_look(folder: Path, run: Run, console: Console | None, **facts: Any) -> int:
    """Record in a run that its own test split was evaluated; returns how often it has been."""
    about = About(folder / folders.ABOUT)
    if _is_other_data(folder, run):
        return len(abouts.read(about.path, "looks"))
    try:
        return about.looked(**facts)
    except OSError as error:
        _say(console, f"{about.path} cannot be written ({error.strerror}): this look is not noted")
        return 1 + len(abouts.read(about.path, "looks"))


def _say(console: Console | None, text: str) -> None:
    console = console or Terminal(stderr=True, soft_wrap=True)
    console.print(Text(text))
