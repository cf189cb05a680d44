"""The folder of a run: its recipe, its lock, and its siblings of the same recipe."""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from windlass import files, seal
from windlass.checkpoint.store import best_step, folder_of, steps_in
from windlass.config import differences, listing, load, read, to_yaml, tree
from windlass.config.start import Weights
from windlass.data import Data
from windlass.data.tokenizer import Tokenizer
from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError
from windlass.processes import hosts, shared_folders
from windlass.run import Run, Train
from windlass.run.identity import essential

RECIPE, METRICS, COMPILES, PHASES, SAMPLES, ANSWERS, TOKENIZER, ABOUT, PLAN, REPORT, LOCK = (
    "recipe.yaml",
    "metrics.jsonl",
    "compile.jsonl",
    "phases.jsonl",
    "samples.txt",
    "answers.json",
    "tokenizer",
    "about.json",
    "plan.json",
    "report.html",
    "lock",
)
TASKS = "lm_eval"  # a folder: results files of tasks, by step
MODEL = "model"  # a folder: the small files of the published model that a run began with
TRACES = "plugins"  # a folder: where TensorBoard looks for the traces of a profile
SEAL = seal.NAME  # hashes of the three that the run computes from: recipe, tokenizer and model


def siblings(folder: Path, name: str, run: Run) -> list[str]:
    """Other runs of the same recipe beside this one: their step, and how they differ."""
    lines = []
    for other in sorted(folder.parent.glob(f"{name}-*")):
        if other == folder or not (other / RECIPE).is_file():
            continue
        try:
            theirs = essential(stored(other))
        except UserError:  # not as it was written: of no concern to this run
            continue
        keys = [
            f"{key} {show(there)}, here {show(here)}"
            for key, there, here in differences(theirs, essential(tree(run)))
        ]
        steps = steps_in(folder_of(other))
        where = f"at step {steps[-1]}" if steps else "without a checkpoint"
        lines.append(f"{other} ({where}; {'; '.join(keys) or 'the same keys'})")
    return lines


def compiles(folder: Path, name: str) -> list[Path]:
    """Compilation logs: of this run, then of others of the recipe, newest first."""
    others = [path for path in folder.parent.glob(f"{name}-*/{COMPILES}") if path.parent != folder]
    others.sort(key=lambda path: -path.stat().st_mtime)
    return [folder / COMPILES, *others]


def stored(folder: Path) -> dict[str, Any]:
    """The resolved recipe of a run."""
    path = folder / RECIPE
    if not path.is_file():
        raise UserError(f"{folder} is not a run: it has no {RECIPE}")
    check(folder, only=[RECIPE])
    return load(path).merged(None)


def store(
    folder: Path,
    run: Run,
    vocabulary: Vocabulary | None,
    prepared: Sequence[Path] = (),
    commit: str | None = None,
) -> None:
    """Write the resolved recipe and the tokenizer, and the hashes of all that a run computes from.

    `prepared` are the folders of its tokens, which have hashes of their own; `commit` is that of
    the repository that it streams.
    """
    if (folder / MODEL).is_dir():  # stored once: what is there now need not be what was
        check(folder, only=[name for name in damaged(folder) if name.startswith((MODEL, SEAL))])
    # Without a seal nothing is doubted; one that is half out of date would be a false alarm.
    (folder / SEAL).unlink(missing_ok=True)
    files.write(folder / RECIPE, to_yaml(run))
    if vocabulary is not None:
        vocabulary.save(folder / TOKENIZER)
    places = [str(place.absolute()) for place in prepared]
    about: dict[str, Any] = {"prepared": places}
    if commit is not None:
        about["streams"] = {"source": run.data.parts[0].source.described(), "commit": commit}
    seal.seal(folder, parts=(RECIPE, TOKENIZER, MODEL), **about)


def damaged(folder: Path, only: Collection[str] | None = None) -> list[str]:
    """Files that a run computes from and that are not as it wrote them; none without a seal."""
    return seal.broken(folder, only=only) if (folder / SEAL).is_file() else []


def check(folder: Path, only: Collection[str] | None = None) -> None:
    """Refuse to compute from files that are not as the run wrote them."""
    if broken := damaged(folder, only):
        names = listing((str(folder / name) for name in broken), "and")
        verb = "is" if len(broken) == 1 else "are"
        raise UserError(
            f"{names} {verb} not as the run wrote {'it' if len(broken) == 1 else 'them'}, and what "
            f"is computed from there may be of another model or of other data. {_mended(broken)}; "
            "keys can be changed on the command line instead"
        )


def _mended(broken: list[str]) -> str:
    """Advice on damaged files: the trainer writes some of them anew."""
    if broken == [SEAL]:
        return f"Put back a copy; {SEAL} has the hashes of others, and can go where they are good"
    if any(name.startswith(MODEL) for name in broken):
        return "Put back a copy"
    return (
        "Put back a copy, or give the command that trained the run again, which writes "
        f"{RECIPE} and a learned tokenizer anew"
    )


class WeightsAt(NamedTuple):
    """The step of a checkpoint, and the part of its state that has the weights."""

    step: int | None  # None: the newest
    part: Literal["weights", "ema"]


def best_by(folder: Path) -> str | None:
    """The `train.best` of a run, as it was stored."""
    return (stored(folder).get("train") or {}).get("best")


def measured_at(step: int, part: str) -> str:
    """Name of the folder with the results of tasks at a step, of weights or of their average."""
    return f"step-{step}" if part == "weights" else f"step-{step}-{part}"


def place_of(folder: Path, weights: str, step: int | None = None) -> WeightsAt:
    """The checkpoint of a run that has the requested weights.

    The best are those that were measured: of the average, where the run keeps one.
    """
    check(folder)
    if weights not in get_args(Weights):
        raise UserError(f"weights is {weights}; it must be {listing(get_args(Weights))}")
    train = read(Train, stored(folder)["train"], origin=str(folder / RECIPE))
    if weights == "ema" and train.ema is None:
        raise UserError(
            f"{folder} has no averaged weights, since its train.ema is null; "
            "weights can be last or best"
        )
    if weights == "last":
        return WeightsAt(step, "weights")
    if weights == "ema":
        return WeightsAt(step, "ema")
    if step is not None:
        raise UserError(f"weights=best has a step of its own; leave step {step} out")
    best = best_step(folder, train.watched)
    if best is None:
        lacks = train.best or train.watched.replace("_", " ")
        raise UserError(
            f"no checkpoint in {folder_of(folder)} has a {lacks}; "
            "weights can be last, or ema where train.ema keeps an average"
        )
    return WeightsAt(best, "weights" if train.ema is None else "ema")


def tokenizer(folder: Path, tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer of a run; the run's own copy of a hub's, or of a file that is gone."""
    own = folder / TOKENIZER
    is_gone = tokenizer.path is not None and not Path(tokenizer.path).expanduser().exists()
    if not own.is_dir() or not (is_gone or tokenizer.kind == "hub"):
        return tokenizer
    check(folder, only=[name for name in damaged(folder) if name.startswith((TOKENIZER, SEAL))])
    if tokenizer.kind == "hub":
        return Tokenizer(kind="file", path=str(own), eos=tokenizer.eos)
    return replace(tokenizer, path=str(own))


def streamed(folder: Path, data: Data) -> Data:
    """The data of a run; a stream at the commit that the run began with, whatever is newest."""
    if not data.is_streamed or not (folder / SEAL).is_file():
        return data
    check(folder, only=[SEAL] if damaged(folder, only=[SEAL]) else [])
    began, source = seal.opened(folder / SEAL).get("streams") or {}, data.source
    if source is None or began.get("commit") is None or began["source"] != source.described():
        return data
    return replace(data, source=source.at(began["commit"]))


def roomy(folder: Path) -> AbstractContextManager[None]:
    """Turn a full disk, whatever a run was writing, into a UserError."""

    def refusal(error: OSError) -> str:
        steps = steps_in(folder_of(folder))
        where = f"resumes from step {steps[-1]}" if steps else "starts it again"
        why = f"the run cannot be stored in {folder}: {error.strerror}"
        return f"{why}; make room there, and the same command {where}"

    return files.full_disk(refusal)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The lock of a run: one process trains it at a time, and the system frees it when that dies.

    Of several that train it together the first has the lock, for all of them.
    """
    if not hosts.is_first():
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"the run cannot be stored in {folder}: {error.strerror}") from None
    with file:
        if not files.lock(file):
            file.seek(0)
            raise UserError(
                f"{folder} is being trained by process {file.read().strip() or 'unknown'}; "
                "wait for it, or start another run with run.dir"
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def check_shared(folder: Path) -> None:
    """Refuse a folder that not all processes of a run see: each writes its own part there."""
    blind = [str(i) for i, sees in enumerate(shared_folders.seen(folder)) if not sees]
    if blind:
        raise UserError(
            f"process {listing(blind, 'and')} of {hosts.count()} does not see {folder}, where "
            "process 0 stores the run and each its own part of every checkpoint; run.dir must name "
            "a folder that all hosts share"
        )


def show(value: Any) -> str:
    return "absent" if value is None else str(value)
