"""Launch, whichever way: a recipe with its keys, on slices, and the bucket it is stored in."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from windlass.config import Written
from windlass.devices.slices import Slices
from windlass.errors import UserError

MOUNT = "/bucket"  # where every machine sees the bucket


class Bucket(NamedTuple):
    """A bucket of Cloud Storage, and a folder in it."""

    name: str
    path: str  # without slashes at its ends; empty: the bucket itself

    @classmethod
    def read(cls, text: str) -> "Bucket":
        """Parse `gs://NAME` or `gs://NAME/PATH`."""
        match = re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]{1,61}[a-z0-9])((?:/[\w.-]+)*)/?", text)
        if match is None or ".." in match[2].split("/"):
            raise UserError(
                f"--bucket is {text}; it must be gs://NAME or gs://NAME/PATH, in letters, digits, "
                "dots, underscores and hyphens"
            )
        return cls(match[1], match[2].strip("/"))

    def __str__(self) -> str:
        return f"gs://{self.name}/{self.path}".rstrip("/")

    @property
    def folder(self) -> str:
        """Mount path on a machine."""
        return f"{MOUNT}/{self.path}".rstrip("/")

    def within(self, path: str) -> "Bucket":
        """A folder in this one."""
        return Bucket(self.name, f"{self.path}/{path}".lstrip("/"))


class Upload(NamedTuple):
    """A file, a folder or a pattern of files of this computer, and its place in the bucket."""

    source: Path
    name: str  # in that place
    to: Bucket
    size_bytes: int
    is_built: bool = False  # the source is a clone of this package, and what is sent a wheel of it

    @property
    def path(self) -> str:
        """Path on a machine."""
        return f"{self.to.folder}/{self.name}"


class Rented(NamedTuple):
    """Handle of a launch that was begun, for the commands of its target."""

    name: str
    job: str  # of a managed job, unique: launches may share a name
    file: Path
    is_spot: bool
    where: str | None  # the project or the cluster; None: the program knows


@dataclass(frozen=True)
class Launch:
    """A recipe with its keys on slices; the same launch again goes on with the same run."""

    name: str  # of the launch, the run's folder and the machines
    recipe: Written
    keys: tuple[str, ...]  # as on the command line, those that the launch adds included
    slices: Slices
    zones: tuple[str, ...]  # where it may be
    is_narrowed: bool  # a zone or a region was requested
    bucket: Bucket | None
    is_spot: bool
    is_kept: bool  # the machines, when the training has ended
    packages: tuple[str, ...]  # that the machines install
    needs_hub: bool
    uploads: tuple[Upload, ...] = ()  # before anything is rented

    @property
    def train(self) -> list[str]:
        """The command that every host runs, at every start."""
        return ["windlass", "train", self.file, *self.keys]

    @property
    def file(self) -> str:
        return f"{self.recipe.name}.yaml"

    @property
    def run(self) -> str | None:
        """The folder of the run in the bucket."""
        return None if self.bucket is None else f"{self.bucket}/{self.name}"
