"""Checks of access: credentials, which are never shown, the hub, and the speed of a data path."""

import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from windlass.api.checkup.check import Check, absent, well, wrong
from windlass.errors import UserError
from windlass.sources import files
from windlass.units import size

PATIENCE = 5.0  # seconds for the hub to answer, and of reading
WRITTEN = 32 * 2**20  # bytes of a file to read back, where no data is named
MOST = 256 * 2**20  # bytes that are read of data that is named
CHUNK = 4 * 2**20
SLOWEST = 10 * 2**20  # bytes a second, below which reading data may hold training up


def credentials() -> Iterator[Check]:
    """Presence of credentials; none is read."""
    from huggingface_hub import get_token

    if get_token():
        yield well("HF token", "present")
    else:
        how = "private and gated models need one: `hf auth login`, or HF_TOKEN"
        yield absent("HF token", "none", how)
    login = "`gcloud auth application-default login`"
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    folder = Path(os.environ.get("CLOUDSDK_CONFIG") or "~/.config/gcloud").expanduser()
    if named and not Path(named).expanduser().is_file():
        found = "GOOGLE_APPLICATION_CREDENTIALS names a file that is not there"
        yield wrong("Google Cloud", found, f"correct it, or unset it and {login}")
    elif named or (folder / "application_default_credentials.json").is_file():
        yield well("Google Cloud", "credentials present")
    else:
        yield absent("Google Cloud", "no credentials", f"gs:// needs some: {login}")
    files = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"
    if os.environ.get("AWS_ACCESS_KEY_ID") or Path(files).expanduser().is_file():
        yield well("AWS", "credentials present")
    else:
        yield absent("AWS", "no credentials", "s3:// needs some: `aws configure`")


def network() -> Check:
    """The hub, as it answers from here."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        how = "unset HF_HUB_OFFLINE to download models and data"
        return absent("hub", "not contacted, since HF_HUB_OFFLINE is set", how)
    began = time.monotonic()
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        with urllib.request.urlopen(request, timeout=PATIENCE):
            pass
    except urllib.error.HTTPError as error:  # it answers
        error.close()
    except OSError as error:  # of the network, or a timeout
        reason = getattr(error, "reason", None) or error
        how = (
            "models and data of the hub need it: check the connection, HTTPS_PROXY, or HF_ENDPOINT "
            "for a mirror; on a machine without one, HF_HUB_OFFLINE=1 uses what is in the cache, "
            "which `hf download` fills elsewhere"
        )
        return absent("hub", f"{constants.ENDPOINT} cannot be reached ({reason})", how)
    return well("hub", f"{constants.ENDPOINT} answers in {time.monotonic() - began:.1f} s")


def check_there(data: str) -> None:
    """Refuse a file or a folder that is nowhere."""
    if "://" not in data and not Path(data).expanduser().exists():
        raise UserError(f"--data is {data}, which is not there; name a file, a folder or a URL")


def data_path(data: str | None) -> Check:
    """Reading speed of a file, a folder or a URL that is named, or of the disk of the cache."""
    if data is None:
        return _cache_disk()
    if "://" in data:
        return _remote(data)
    place = Path(data).expanduser()
    inside = [place] if place.is_file() else sorted(filter(Path.is_file, place.rglob("*")))
    try:
        return _speed(data, *_read(open(one, "rb", buffering=0) for one in inside))
    except OSError as error:
        where = error.filename or data
        return wrong("data path", f"{where}: {error.strerror}", f"`ls -l {where}` shows who may")


def _cache_disk() -> Check:
    place = Path(os.environ.get("WINDLASS_CACHE") or "~/.cache/windlass").expanduser()
    try:
        place.mkdir(parents=True, exist_ok=True)
        return _speed(str(place), *_written(place))
    except OSError as error:
        how = "WINDLASS_CACHE=FOLDER names another folder"
        return wrong("data path", f"{place}: {error.strerror}", how)


def _speed(where: str, read: int, seconds: float) -> Check:
    if not read:
        return wrong("data path", f"{where} holds nothing to read", "name a folder with files")
    rate = read / max(seconds, 1e-6)
    found = f"{size(rate)}/s from {where} ({size(read)} read)"
    if rate < SLOWEST:
        how = "reading may hold training up: copy the data to a disk of this machine"
        return wrong("data path", found, how)
    return well("data path", found)


def _written(place: Path) -> tuple[int, float]:
    """Bytes of a new file in a folder, and the seconds to read it back from the disk."""
    with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
        file.write(os.urandom(WRITTEN))
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # of Linux: or it would be read from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _read([open(file.name, "rb", buffering=0)])


def _read(files: Iterable[Any]) -> tuple[int, float]:
    """Bytes read of some opened files, and the seconds that took."""
    began, done = time.monotonic(), 0
    for file in files:
        with file:
            while chunk := file.read(CHUNK):
                done += len(chunk)
                if done >= MOST or time.monotonic() - began > PATIENCE:
                    return done, time.monotonic() - began
    return done, time.monotonic() - began


def _remote(url: str) -> Check:
    """Reading speed of a URL, through whichever package reads its protocol."""
    how = "`gcloud auth application-default login` logs in; "
    how += f"`gcloud storage ls {url}` shows whether that account may read it"
    try:
        return _speed(url, *_read(file.open() for file in files(url, "", "--data")))
    except UserError as error:
        return wrong("data path", str(error), how)
    except OSError as error:
        return wrong("data path", f"{url} cannot be read: {error}", how)
