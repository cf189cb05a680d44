"""Provenance of a run: versions, commits and devices, noted each time it is started."""

import os
import platform
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
    "jax jaxlib equinox optax orbax-checkpoint grain numpy tokenizers tensorboard "
    "libtpu jax-cuda12-plugin jax-cuda13-plugin"
).split()
GIT_SECONDS = 5  # a repository that takes longer to say where it stands is not waited for


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
        return whole["starts"] if part == "starts" else whole.get(part, [])
    except (ValueError, KeyError):  # it is replaced whole, so somebody edited it
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
    """Git commits of the sources: those of windlass, if it runs from them, and the folder's own."""
    source = Path(__file__).parents[2]
    places = {"windlass": source, "folder": Path.cwd()}
    if not (source / ".git").exists():  # an installed copy, perhaps inside somebody's repository
        del places["windlass"]
    heads = {name: commit for name, place in places.items() if (commit := _commit(place))}
    if heads.get("windlass") == heads.get("folder"):
        heads.pop("folder", None)
    return heads


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
