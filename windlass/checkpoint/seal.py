"""The hash of every file of a folder, kept in one more file that answers for itself too."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NAME = "files.json"
PARTIAL = "files.json.partial"


def signed(content: dict) -> dict:
    """The same content with its own hash, for `opened` to check."""
    text = json.dumps(content, sort_keys=True)
    return {**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def opened(file: Path) -> dict:
    """What a file of signed JSON holds; ValueError when any byte of it is not as written."""
    text = file.read_text()
    content = json.loads(text)
    if isinstance(content, dict) and "sha256" in content:
        content = {key: value for key, value in content.items() if key != "sha256"}
        if json.dumps(signed(content)) == text:
            return content
    raise ValueError(f"{file} does not hold what was written")


def seal(folder: Path) -> None:
    """Hash every file of the folder into its seal."""
    text = json.dumps(signed({"files": _hashes(folder, _files(folder))}))
    partial = folder / PARTIAL
    partial.write_text(text)
    os.replace(partial, folder / NAME)


def ensure(folder: Path) -> None:
    """Seal a folder whose save was killed after the commit; its arrays were found good."""
    if not (folder / NAME).exists():
        seal(folder)


def broken(folder: Path) -> list[str] | None:
    """The files that are missing or not as they were sealed; None when there is no seal."""
    if not (folder / NAME).exists():
        return None
    try:
        expected = opened(folder / NAME)["files"]
    except ValueError:
        return [NAME]
    present = _hashes(folder, [name for name in expected if (folder / name).is_file()])
    return [name for name in expected if present.get(name) != expected[name]]


def _files(folder: Path) -> list[str]:
    files = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in files if name not in (NAME, PARTIAL))


def _hashes(folder: Path, names: list[str]) -> dict[str, str]:
    def sha256(name: str) -> str:
        with open(folder / name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as threads:  # hashing leaves the interpreter free
        return dict(zip(names, threads.map(sha256, names), strict=True))
