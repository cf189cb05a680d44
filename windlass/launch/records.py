"""What was launched, and how: so that its name is enough to ask after it, and to delete it."""

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from windlass.config.reading import offer
from windlass.errors import UserError
from windlass.launch import Target, find
from windlass.launch.description import Launch

RECORD = "launch.json"


@dataclass(frozen=True)
class Record:
    """One launch: where it went, and what it was."""

    name: str
    target: str
    slices: str
    is_spot: bool
    run: str | None  # the folder in the bucket
    file: str  # that was written for it
    when: str

    @property
    def how(self) -> Target:
        return find(self.target)

    @property
    def place(self) -> Path:
        return folder() / self.name / self.file


def folder() -> Path:
    """Where records are: of the user, not of a project, since machines cost wherever one stands."""
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(config).expanduser() / "windlass" / "launches"


def keep(launch: Launch, target: str) -> Record:
    """Note a launch before it begins, with its file; an earlier one of the name is replaced."""
    how = find(target)
    when = datetime.now().astimezone().isoformat(timespec="seconds")
    record = Record(
        name=launch.name,
        target=target,
        slices=launch.slices.name,
        is_spot=launch.is_spot,
        run=launch.run,
        file=f"{launch.name}{how.SUFFIX}",
        when=when,
    )
    before = every().get(launch.name)
    if before is not None and (before.target, before.slices) != (target, record.slices):
        raise UserError(
            f"{launch.name} was launched on {before.slices} by {before.target}, and may still be "
            f"there; `windlass launch --delete {launch.name}` first, after which it goes on here, "
            "or give another --name"
        )
    place = folder() / launch.name
    try:
        place.mkdir(parents=True, exist_ok=True)
        record.place.write_text(how.write(launch), encoding="utf-8")
        text = json.dumps(dataclasses.asdict(record), indent=2)
        (place / RECORD).write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{place} cannot be written: {error.strerror}") from None
    return record


def every() -> dict[str, Record]:
    """All launches that are noted, by name."""
    found = {}
    for path in sorted(folder().glob(f"*/{RECORD}")):
        record = Record(**json.loads(path.read_text(encoding="utf-8")))
        found[record.name] = record
    return found


def named(name: str) -> Record:
    """The launch of a name."""
    found = every()
    if name not in found:
        there = offer(name, list(found)) if found else "nothing was launched from here"
        raise UserError(f"no launch is called {name}; {there}")
    return found[name]


def forget(record: Record) -> None:
    """Remove a record, of machines that are gone."""
    shutil.rmtree(folder() / record.name)
