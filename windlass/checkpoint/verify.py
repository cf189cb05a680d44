"""Verification of checkpoints: every file and array of a run against its hash."""

from pathlib import Path
from typing import NamedTuple

from windlass.checkpoint import archive
from windlass.checkpoint.store import FROZEN, folder_of, steps_in
from windlass.errors import UserError


class Finding(NamedTuple):
    """One checkpoint and its damage."""

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
    """Every checkpoint of a run, oldest first; frozen arrays last."""

    folder: Path
    findings: list[Finding]

    @property
    def good(self) -> bool:
        return all(finding.good for finding in self.findings)

    def __str__(self) -> str:
        return "\n".join([f"{self.folder}", *(f"  {finding}" for finding in self.findings)])


def verify(run_dir: str | Path) -> VerifyReport:
    """Compare every file and array of a run's checkpoints with their hashes; change nothing."""
    folder = folder_of(run_dir)
    names = [str(step) for step in steps_in(folder)]
    if (folder / FROZEN).exists():
        names.append(FROZEN)
    if not names:
        raise UserError(f"no checkpoint in {folder}")
    return VerifyReport(folder, [Finding(name, archive.examine(folder / name)) for name in names])
