"""Records of launches: the name of one is enough to follow it up, and to delete it."""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from windlass import files
from windlass.config import folder as config_folder
from windlass.config import listing
from windlass.config.reading import offer
from windlass.errors import UserError
from windlass.launch import Launcher, find
from windlass.launch.description import Launch, Rented

RECORD = "launch.json"
LOST = (
    "`sky down NAME`, `sky jobs queue` and `sky jobs cancel`, `kubectl delete jobset,configmap "
    "NAME` and `gcloud compute tpus queued-resources delete NAME --zone=ZONE --force` delete "
    "what was launched elsewhere"
)


@dataclass(frozen=True)
class Record:
    """One launch: where it went, and what it was."""

    name: str
    job: str
    target: str
    slices: str
    is_spot: bool
    zones: list[str]
    where: str | None  # the project or the cluster
    run: str | None  # the folder in the bucket
    file: str  # that was written for it
    when: str

    @property
    def how(self) -> Launcher:
        return find(self.target)

    @property
    def rented(self) -> Rented:
        file = folder() / self.name / self.file
        return Rented(self.name, self.job, file, self.is_spot, self.where)

    def differs(self, other: "Record") -> str | None:
        """Earlier launch in words, where another of the name would lose track of its machines."""
        facts = {
            "target": f"by {self.target}",
            "is_spot": "with --spot" if self.is_spot else "without --spot",
            "zones": f"in {listing(self.zones)}",
            "where": f"in {self.where}",
            "run": f"for {self.run or 'a run on the machine alone'}",
        }
        if self.where is None:
            del facts["where"]
        changes = [what for key, what in facts.items() if getattr(self, key) != getattr(other, key)]
        if not changes and self.slices == other.slices:
            return None
        return ", ".join([f"on {self.slices}", *changes])


def folder() -> Path:
    """Folder of records: of the user, not of a project, since machines cost anywhere."""
    return config_folder.folder() / "launches"


def describe(launch: Launch, target: str) -> Record:
    """Record of a launch that is about to begin."""
    how = find(target)
    now = datetime.now().astimezone()
    return Record(
        name=launch.name,
        job=f"{launch.name}-{now:%m%d%H%M%S}",
        target=target,
        slices=launch.slices.name,
        is_spot=launch.is_spot,
        zones=list(launch.zones),
        where=how.where(),
        run=launch.run,
        file=f"{launch.name}{how.SUFFIX}",
        when=now.isoformat(timespec="seconds"),
    )


def check(record: Record, before: Record | None) -> None:
    """Refuse to replace the record of machines that are others, and may still be there."""
    what = None if before is None else before.differs(record)
    if what is not None:
        raise UserError(
            f"{record.name} was launched {what}, and may still be there; `windlass launch --delete "
            f"{record.name}` first, after which it goes on here, or give another --name"
        )


def keep(record: Record, text: str) -> None:
    """Write the record of a launch before it begins, with its file."""
    place = folder() / record.name
    with files.writable(place):
        files.write(place / record.file, text)  # a shell may still be reading the one before
        files.write_json(place / RECORD, dataclasses.asdict(record))


def every() -> dict[str, Record]:
    """Records of all launches, by name."""
    launches = {}
    for path in sorted(folder().glob(f"*/{RECORD}")):
        try:
            record = Record(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise UserError(
                f"{path} is no record of a launch; what {path.parent.name} rented may still be "
                f"there. {LOST}; then delete that folder"
            ) from None
        launches[record.name] = record
    return launches


def named(name: str) -> Record:
    """Record of a launch, by name."""
    launches = every()
    if name not in launches:
        there = offer(name, list(launches)) if launches else "nothing was launched from here"
        raise UserError(f"no launch is called {name}; {there}. {LOST}")
    return launches[name]


def forget(record: Record) -> None:
    """Remove a record, of machines that are gone."""
    shutil.rmtree(folder() / record.name)
