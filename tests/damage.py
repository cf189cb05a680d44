"""Damage to one file at a time: what is computed from it is refused by name, or is the same."""

import io
import os
import random
import re
import shutil
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console

import windlass
from windlass.data import integrity
from windlass.errors import UserError

HOW = ("flip", "truncation", "deletion")
# Files of a run that nothing is computed from: logs, pictures, plans.
ASIDE = ("metrics.jsonl", "compile.jsonl", "phases.jsonl", "samples.txt", "plan.json", "lock")
ASIDE += ("tfevents",)


class Subject(NamedTuple):
    """Files that are damaged in turn, and the calls that read them."""

    name: str
    folder: Path
    verify: Callable[[], str] | None  # what is found, by name; nothing where all is good
    answer: Callable[[Console], Any]  # of the call that computes from them


class Outcome(NamedTuple):
    """One try: what was done to which file, and what came of it."""

    kind: str  # of the file: its name without numbers and hashes
    how: str
    held: bool
    what: str


def kinds(folder: Path) -> dict[str, list[Path]]:
    """Files by kind."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".lock":
            name = str(path.relative_to(folder))
            found.setdefault(re.sub(r"[0-9a-f]{16,}|\d+", "N", name), []).append(path)
    return found


def campaign(subject: Subject, count: int, seed: int) -> Iterator[Outcome]:
    """Damage that goes round all kinds of files and all ways, until there were so many tries."""
    chance = random.Random(f"{subject.name} {seed}")
    expected = subject.answer(_console())
    by_kind = kinds(subject.folder)
    turns = [(kind, how) for how in HOW for kind in by_kind]
    chance.shuffle(turns)
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        shutil.copytree(subject.folder, whole, symlinks=True)
        for number in range(count):
            kind, how = turns[number % len(turns)]
            file = chance.choice(by_kind[kind])
            damage(file, how, chance)
            yield tried(subject, f"{subject.name}/{kind}", how, file, expected)
            shutil.rmtree(subject.folder)
            shutil.copytree(whole, subject.folder, symlinks=True)


def damage(file: Path, how: str, chance: random.Random) -> None:
    """A bit flipped, the end cut off, or all of it gone; an empty file can only go."""
    about, content = file.stat(), bytearray(file.read_bytes())
    if how == "deletion" or not content:
        file.unlink()
        return
    place = chance.randrange(len(content))
    if how == "flip":
        content[place] ^= 1 << chance.randrange(8)
    file.write_bytes(content if how == "flip" else content[:place])
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))  # a disk that fails leaves it


def tried(subject: Subject, kind: str, how: str, file: Path, expected: Any) -> Outcome:
    """Outcome of verification and of the call, with a damaged file."""
    console, names = _console(), (file.name, file.parent.name)
    try:
        found = file.name if subject.verify is None else subject.verify()
    except UserError as refused:
        found = str(refused)
    except Exception:
        return Outcome(kind, how, False, f"verify: {_last()}")
    is_made_again = how == "deletion" and file.parent.name in integrity.ENTRIES
    is_aside = is_made_again or any(name in file.name for name in ASIDE)
    if not is_aside and not any(name in found for name in names):
        return Outcome(kind, how, False, "not found by verify")
    try:
        answer = subject.answer(console)
    except UserError as refused:
        told = f"{_said(console)}{refused}"
        is_named = any(name in told for name in names)
        return Outcome(kind, how, is_named, "named" if is_named else f"unnamed: {refused}")
    except Exception:
        return Outcome(kind, how, False, f"call: {_last()}")
    is_told = "damaged" in _said(console)
    if answer == expected:
        return Outcome(kind, how, True, "the same, and told" if is_told else "the same")
    return Outcome(kind, how, False, "another, and told" if is_told else "silently different")


def run(folder: Path) -> Subject:
    """A run: verified, and evaluated."""

    def answer(console: Console) -> Any:
        return windlass.evaluate(folder, console=console)

    return Subject("run", folder, lambda: _found(folder), answer)


def cache(folder: Path, of: Path) -> Subject:
    """The prepared data of a run, which evaluates with what is there or is made again."""

    def answer(console: Console) -> Any:
        return windlass.evaluate(of, console=console)

    return Subject("cache", folder, lambda: _found(folder), answer)


def export(folder: Path) -> Subject:
    """An export, as a start of another run."""

    def answer(_: Console) -> Any:
        from windlass.starting import origin
        from windlass.starting.describe import describe

        described = describe({**START, "model": {"path": str(folder)}})
        assert described.run.start is not None
        origin.check(described.run.start)
        return described.run

    return Subject("export", folder, lambda: _found(folder), answer)


def compiled(folder: Path, of: Path) -> Subject:
    """The compiled programs of a run, which are read from disk anew, or compiled again."""

    def answer(console: Console) -> Any:
        jax.clear_caches()
        compilation_cache.reset_cache()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX says that it could not read one
            return windlass.evaluate(of, console=console)

    return Subject("compiled", folder, None, answer)


START = {
    "data": {"source": {"kind": "stories", "count": 8}, "length": 16},
    "optim": {"kind": "adamw", "learning_rate": 1e-3},
    "train": {"steps": 1, "batch": 1},
    "device": {"kind": "cpu", "count": 1},
}


def totals(outcomes: list[Outcome]) -> dict[str, Any]:
    """Figures of a campaign."""
    failed = [f"{one.kind}, {one.how}: {one.what}" for one in outcomes if not one.held]
    return {
        "holds": not failed,
        "tried": len(outcomes),
        "held": len(outcomes) - len(failed),
        "outcomes": dict(Counter(one.what for one in outcomes if one.held).most_common()),
        "by_kind": dict(sorted(Counter(one.kind for one in outcomes).items())),
        "failures": failed,
    }


def _found(folder: Path) -> str:
    report = windlass.verify(folder)
    return "" if report.good else str(report)


def _console() -> Console:
    return Console(file=io.StringIO(), width=10_000)


def _said(console: Console) -> str:
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def _last() -> str:
    return traceback.format_exc().strip().splitlines()[-1]
