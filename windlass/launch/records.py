"""What was launched, and how: so that its name is enough to ask after it, and to delete it."""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from windlass import files
from windlass.config import folder as own
from windlass.config import listing
from windlass.config.reading import offer
from windlass.errors import UserError
from windlass.launch import Target, find
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
    def how(self) -> Target:
        return find(self.target)

    @property
    def rented(self) -> Rented:
        file = folder() / self.name / self.file
        return Rented(self.name, self.job, file, self.is_spot, self.where)

    def differs(self, other: "Record") -> str | None:
        """What it was, where another of the name would leave its machines out of reach."""
        said = {
            "target": f"by {self.target}",
            "is_spot": "with --spot" if self.is_spot else "without --spot",
            "zones": f"in {listing(self.zones)}",
            "where": f"in {self.where}",
            "run": f"for {self.run or 'a run on the machine alone'}",
        }
        if self.where is None:
            del said["where"]
        new = [what for key, what in said.items() if getattr(self, key) != getattr(other, key)]
        if not new and self.slices == other.slices:
            return None
        return ", ".join([f"on {self.slices}", *new])


def folder() -> Path:
    """Where records are: of the user, not of a project, since machines cost wherever one stands."""
    return own.folder() / "launches"


def describe(launch: Launch, target: str) -> Record:
    """What there will be to note of a launch that is about to begin."""
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
    """Note a launch before it begins, with its file."""
    place = folder() / record.name
    with files.writable(place):
        files.write(place / record.file, text)  # a shell may still be reading the one before
        files.write_json(place / RECORD, dataclasses.asdict(record))


def every() -> dict[str, Record]:
    """All launches that are noted, by name."""
    found = {}
    for path in sorted(folder().glob(f"*/{RECORD}")):
        try:
            record = Record(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise UserError(
                f"{path} is no record of a launch; what {path.parent.name} rented may still be "
                f"there. {LOST}; then delete that folder"
            ) from None
        found[record.name] = record
    return found


def named(name: str) -> Record:
    """The launch of a name."""
    found = every()
    if name not in found:
        there = offer(name, list(found)) if found else "nothing was launched from here"
        raise UserError(f"no launch is called {name}; {there}. {LOST}")
    return found[name]


def forget(record: Record) -> None:
    """Remove a record, of machines that are gone."""
    shutil.rmtree(folder() / record.name)
