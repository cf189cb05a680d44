"""Verification of all that a run computes from: checkpoints, recipe, tokenizer, prepared data."""

from pathlib import Path

from windlass import seal, teacher_cache
from windlass.checkpoint import verify as checkpoints
from windlass.checkpoint.archive import Damage
from windlass.checkpoint.verify import Finding, VerifyReport
from windlass.data import integrity, reference
from windlass.errors import UserError
from windlass.run_folder import folder as folders
from windlass.telemetry import about

FILES, PREPARED, TEACHER = "recipe and tokenizer", "prepared data", "teacher's cache"


def verify(run: Path) -> VerifyReport:
    """Compare every file that a run computes from with its hash; change nothing.

    Prepared data that is no longer there would be made again, and is left out.
    """
    found = [*checkpoints.verify(run).findings, _finding(FILES, _own(run))]
    for place in _prepared(run):
        if parts := integrity.parts_of(place):  # of a stream
            found += [_finding(f"{PREPARED} {one}", seal.broken(one)) for one in parts]
            found.append(_finding(f"{PREPARED} {place}", integrity.broken_entries(place)))
        else:
            found.append(_finding(f"{PREPARED} {place}", seal.broken(place)))
    return VerifyReport(run, found)


def verify_cache(cache: Path) -> VerifyReport:
    """Compare every file of a cache of prepared data with its hash; change nothing."""
    found = [_finding(name, broken) for name, broken in integrity.damage(cache).items()]
    return VerifyReport(cache, found)


def verify_teacher(folder: Path) -> VerifyReport:
    """Compare every file of a teacher's cache with its hash; change nothing."""
    return VerifyReport(folder, [_finding(_shards(folder), teacher_cache.damaged(folder))])


def _own(run: Path) -> list[str]:
    """Damaged files of the run's own, beside its checkpoints."""
    broken = [*seal.broken(run), *reference.damaged(run)]
    path = run / folders.ABOUT
    try:
        is_good = bool(about.read(path))
    except UserError:
        is_good = False
    return broken if is_good else [*broken, folders.ABOUT]


def _prepared(run: Path) -> list[Path]:
    try:
        places = seal.opened(run / folders.SEAL)["prepared"]
    except (ValueError, LookupError, FileNotFoundError):
        return []
    return [place for place in map(Path, places) if place.is_dir()]


def _shards(folder: Path) -> str:
    """Title of a teacher's cache, with how much of it is there."""
    try:
        cache = teacher_cache.find(folder)
    except UserError:
        cache = None
    if cache is None:
        return TEACHER
    there = len(cache.shards) - len(cache.missing)
    return f"{TEACHER}, {there:,} of {len(cache.shards):,} shards"


def _finding(name: str, broken: list[str]) -> Finding:
    return Finding(name, Damage(broken, []))
