"""Files of this computer that the machines read: their place in the bucket, and copying them."""

import glob
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from windlass.errors import UserError
from windlass.launch import installing
from windlass.launch.description import Bucket, Launch, Upload

PROGRAM, HOW = "gcloud", "https://cloud.google.com/sdk/docs/install"
LETTERS = 12  # of the hash that names the folder of an upload


def find(value: str, bucket: Bucket) -> Upload | None:
    """Upload of a file, a folder or a pattern of files; None where there is none here."""
    place = Path(value).expanduser().absolute()
    if place.is_dir():
        place = place.resolve()  # gcloud follows a link to a file, whose name has the format
    stats = [(file, file.stat()) for path in named(value) for file in _files(path)]
    # In a bucket the files of several folders would lie in one.
    if not stats or not place.exists() and glob.has_magic(str(place.parent)):
        return None
    states = [f"{file} {about.st_size} {about.st_mtime_ns}" for file, about in stats]
    size = sum(about.st_size for _, about in stats)
    return Upload(place, place.name, _folder(bucket, states), size)


def named(value: str) -> list[Path]:
    """Files and folders of this computer that a path or a pattern names; none where it is empty."""
    place = Path(value).expanduser().absolute()
    if value and place.exists():
        return [place]
    return [Path(path) for path in glob.glob(str(place))] if value else []


def clone(bucket: Bucket) -> Upload | None:
    """Upload of this package, to be built from the clone it runs from; None: it is in none."""
    root = installing.clone()
    if root is None:
        return None
    files = [root / "pyproject.toml", *_files(root / "windlass")]
    states = [f"{file.relative_to(root)} {_hash(file)}" for file in files]
    size = sum(file.stat().st_size for file in files)
    return Upload(root, installing.WHEEL, _folder(bucket, states), size, is_built=True)


def check(launch: Launch) -> None:
    """Refuse where the program that uploads is not here."""
    if launch.uploads and shutil.which(PROGRAM) is None:
        raise UserError(
            f"{PROGRAM} is not on this machine, and uploads to {launch.bucket} ({HOW}); "
            "--dry-run needs nothing, and prints the file"
        )


def send(launch: Launch) -> None:
    """Copy what is not in the bucket yet, or refuse."""
    for upload in launch.uploads:
        with tempfile.TemporaryDirectory() as place:
            built = installing.build(upload.source, Path(place)) if upload.is_built else None
            # Its folder is named by what is in it: what is there already is the same.
            how = ["storage", "cp", "--recursive", "--no-clobber"]
            command = [PROGRAM, *how, str(built or upload.source), f"{upload.to}/"]
            if code := subprocess.run(command).returncode:
                raise UserError(
                    f"{upload.source} could not be uploaded to {upload.to}: {PROGRAM} ended with "
                    f"{code}; nothing was rented"
                )


def _folder(bucket: Bucket, states: Iterable[str]) -> Bucket:
    digest = hashlib.sha256("\n".join(sorted(states)).encode()).hexdigest()
    return bucket.within(f"uploads/{digest[:LETTERS]}")


def _files(path: Path) -> list[Path]:
    """The files at a path, but for those that Python has compiled."""
    if path.is_file():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
