"""Provenance of a run: versions, commits and devices, noted each time it is started."""

import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from windlass import seal
from windlass.errors import UserError
from windlass.processes import hosts
from windlass.version import __version__

PACKAGES = (
    "jax jaxlib equinox optax orbax-checkpoint grain numpy tokenizers "
    "libtpu jax-cuda12-plugin jax-cuda13-plugin"
).split()
GIT_SECONDS = 5  # a repository that takes longer to say where it stands is not waited for
PACKED_BYTES = 2**24  # of packed-refs; a branch behind them is not looked for


class About:
    """Provenance file with every start of a run and every look at its test rows: `about.json`.

    It holds nothing of the environment but what is named here, and so no token. Of several
    processes the first alone writes.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time):
        self.path, self._clock = path, clock
        self._is_writer = hosts.is_first()

    def begin(self, **facts: Any) -> None:
        """Note that the run starts, or resumes."""
        if not self._is_writer:
            return
        start = {"began": self._now(), **facts, "versions": versions(), "commits": commits()}
        system = f"{platform.system()} {platform.machine()}"
        start["host"] = {"system": system, "cores": cores()}
        self._store(starts=[*read(self.path), start])

    def end(self, **facts: Any) -> None:
        """Note that the last start came to its end, which one that was killed never does."""
        if self._is_writer:
            *before, start = read(self.path)
            self._store(starts=[*before, start | {"ended": self._now(), **facts}])

    def looked(self, **facts: Any) -> int:
        """Note a look at the test rows; return how many there have been, this one included."""
        looks = [*read(self.path, "looks"), {"at": self._now(), **facts}]
        if self._is_writer:
            self._store(looks=looks)
        return len(looks)

    def _now(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._clock()))

    def _store(self, **changed: list[dict[str, Any]]) -> None:
        whole = {"starts": read(self.path), "looks": read(self.path, "looks")} | changed
        seal.write_signed(self.path, whole)


def read(path: Path, part: Literal["starts", "looks"] = "starts") -> list[dict[str, Any]]:
    """The starts of a run, or the looks at its test rows, the newest last."""
    if not path.exists():
        return []
    try:
        whole = seal.opened(path)
        found = whole["starts"] if part == "starts" else whole.get(part, [])
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise ValueError(f"{part} is no list of mappings")
        return found
    except (ValueError, LookupError):  # it is replaced whole, so somebody edited it
        raise UserError(
            f"{path} is not as it was written; put back a copy, or remove it: it says when the run "
            "was started and its test rows were looked at, and nothing is computed from it"
        ) from None


def cores() -> int:
    """CPU cores that this process may use, which need not be all: as many threads XLA has."""
    affinity = getattr(os, "sched_getaffinity", None)  # of Linux alone
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Versions of what a run is computed with; what is not installed is absent."""
    installed = {"windlass": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def commits() -> dict[str, dict[str, Any]]:
    """Git commits of the sources: those of windlass, if it runs from them, and the folder's own.

    The folder may be somebody else's, and its `.git/config` can name programs that git runs
    (`core.fsmonitor`, filters): there no git is called, and so changes are not known. The commit
    is read from its files.
    """
    source, folder = Path(__file__).parents[2], repository(Path.cwd())
    heads = {}
    # An installed copy may be inside somebody's repository, and is not that repository's.
    if (source / ".git").exists() and (own := _commit(source)):
        heads["windlass"] = own
    if folder and folder != source and (commit := head(folder)):
        heads["folder"] = {"commit": commit, "is_changed": None}
    return heads


def repository(place: Path) -> Path | None:
    """Root of the git repository that a folder is in."""
    return next((one for one in (place, *place.parents) if (one / ".git").exists()), None)


def head(root: Path) -> str | None:
    """Commit that is checked out in a repository, read as files; None where they do not say."""
    try:
        git = root / ".git"
        if git.is_file():  # of a worktree or a submodule
            git = root / _start(git).removeprefix("gitdir:").strip()
        found = _start(git / "HEAD").strip()
        if found.startswith("ref:"):
            found = _referred(git, found.removeprefix("ref:").strip())
    except (OSError, ValueError):  # no text, or a name that no file can have
        return None
    return found if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", found) else None


def _referred(git: Path, name: str) -> str:
    shared = git / "commondir"  # a worktree has its refs in the repository that it is of
    for place in (git, git / _start(shared).strip()) if shared.is_file() else (git,):
        if (place / name).is_file():
            return _start(place / name).strip()
        if (place / "packed-refs").is_file():
            lines = _start(place / "packed-refs", PACKED_BYTES).splitlines()
            found = [line.split()[0] for line in lines if line.split()[1:] == [name]]
            if found:
                return found[0]
    return ""


def _start(file: Path, size: int = 4096) -> str:
    """Text of a plain file, of which no more than its beginning is read."""
    if not file.is_file():
        return ""
    with file.open("rb") as opened:
        return opened.read(size).decode()


def _commit(place: Path) -> dict[str, Any] | None:
    """The commit that is checked out, and whether what git knows was changed since."""
    commit = _git(place, "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _git(place, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "is_changed": None if changed is None else bool(changed)}


def _git(place: Path, *words: str) -> str | None:
    command = ["git", "-C", str(place), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):  # there is no git, or it hangs
        return None
    return done.stdout.strip() if done.returncode == 0 else None
