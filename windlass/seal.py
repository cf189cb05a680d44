"""Checksums: SHA-256 of every file of a folder, in one more file that has its own too."""

import hashlib
import json
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from windlass.files import parse_json, write

NAME = "files.json"
EXPORT = "windlass.json"  # of an export, with what it was made from


def signed(content: dict) -> dict:
    """The same content with its own hash, for `opened` to check."""
    text = json.dumps(content, sort_keys=True)
    return {**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def opened(file: Path) -> dict:
    """The content of a JSON file with its hash; ValueError when any byte is not as written."""
    try:
        text = file.read_text()
    except (IsADirectoryError, NotADirectoryError) as error:
        raise ValueError(f"{file} is no file") from error
    content = parse_json(text)
    if isinstance(content, dict) and "sha256" in content:
        content = {key: value for key, value in content.items() if key != "sha256"}
        if text in (json.dumps(signed(content)), _laid_out(content)):
            return content
    raise ValueError(f"{file} does not hold what was written")


def write_signed(file: Path, content: dict) -> None:
    """Atomic write of JSON with its own hash, laid out for people to read."""
    write(file, _laid_out(content))


def seal(
    folder: Path,
    *,
    leave: Collection[str] = (),
    parts: Collection[str] = ("",),
    name: str = NAME,
    **about: Any,
) -> None:
    """Hash every file of the folder but those to leave, which are still to be written.

    `parts` are files and folders in it where not all is meant, `name` is that of the seal, and
    `about` is what else it says.
    """
    below = (path for part in parts for path in (folder / part, *(folder / part).rglob("*")))
    paths = (str(path.relative_to(folder)) for path in below if path.is_file())
    files = _hashes(folder, sorted(path for path in paths if path not in leave))
    write(folder / name, json.dumps(signed({**about, "files": files})))


def extend(folder: Path, names: Collection[str]) -> None:
    """Add the hashes of files that were left, unless the seal has them already."""
    known = hashes(folder / NAME)
    if late := [name for name in names if name not in known]:
        files = {**known, **_hashes(folder, late)}
        write(folder / NAME, json.dumps(signed({"files": files})))


def hashes(file: Path) -> dict[str, str]:
    """The hashes of a seal, by the name of the file; ValueError when it is not as written."""
    files = opened(file).get("files")
    if not isinstance(files, dict):
        raise ValueError(f"{file} has no hashes of files")
    return files


def broken(folder: Path, name: str = NAME, *, only: Collection[str] | None = None) -> list[str]:
    """The files, or those of them that are named, that are missing or not as they were sealed."""
    try:
        expected = hashes(folder / name)
    except (ValueError, FileNotFoundError):
        return [name]
    if only is not None:
        expected = {name: expected[name] for name in only if name in expected}
    present = _hashes(folder, [name for name in expected if (folder / name).is_file()])
    return [name for name in expected if present.get(name) != expected[name]]


def _laid_out(content: dict) -> str:
    return json.dumps(signed(content), indent=2) + "\n"


def _hashes(folder: Path, names: list[str]) -> dict[str, str]:
    def sha256(name: str) -> str:
        with open(folder / name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as threads:  # hashing leaves the interpreter free
        return dict(zip(names, threads.map(sha256, names), strict=True))
