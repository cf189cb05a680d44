"""Verification of checkpoints: every file and array of a run against its hash."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from windlass.checkpoint import archive
from windlass.checkpoint.store import FROZEN, folder_of, steps_in
from windlass.errors import UserError
from windlass.files import folder_lock


class Finding(NamedTuple):
    """A checkpoint, or something else that a run computes from, and its damage."""

    name: str
    damage: archive.Damage

    @property
    def good(self) -> bool:
        return not any(self.damage)

    def __str__(self) -> str:
        title = "frozen arrays" if self.name == FROZEN else self.name
        title = f"step {title}" if title.isdigit() else title
        return f"{title}: good" if self.good else f"{title}: damaged ({self.damage})"


class VerifyReport(NamedTuple):
    """Findings about a run, its checkpoints first, or about a cache of prepared data."""

    folder: Path
    findings: list[Finding]

    @property
    def good(self) -> bool:
        return all(finding.good for finding in self.findings)

    def __str__(self) -> str:
        return "\n".join([f"{self.folder}", *(f"  {finding}" for finding in self.findings)])


def verify(run_dir: str | Path) -> VerifyReport:
    """Compare every file and array of a run's checkpoints with their hashes; change nothing.

    One that a trainer removes before it is looked at is no finding.
    """
    folder = folder_of(run_dir)
    findings: list[Finding] = []
    while not findings and (names := _names(folder)):
        findings = list(_findings(folder, names))
    if not findings:
        raise UserError(f"no checkpoint in {folder}")
    return VerifyReport(folder, findings)


def _names(folder: Path) -> list[str]:
    frozen = [FROZEN] if (folder / FROZEN).exists() else []
    return [*map(str, steps_in(folder)), *frozen]


def _findings(folder: Path, names: Iterable[str]) -> Iterator[Finding]:
    for name in names:
        try:
            with folder_lock(folder / name, shared=True):
                damage = archive.examine(folder / name)
        except FileNotFoundError:
            continue
        if (folder / name).is_dir():
            yield Finding(name, damage)
