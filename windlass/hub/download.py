"""Resumable download of one file of a repository: byte ranges, backoff, its hash at the end."""

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from windlass import seal
from windlass.errors import UserError
from windlass.files import FULL, PARTIAL
from windlass.units import duration

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before another try; each wait is twice the last
PATIENCE = 1800.0  # seconds without a byte, after which a file is given up
CHUNK = 2**20  # bytes that are hashed at a time
TIMEOUT = 30.0  # seconds without an answer, which count as a lost connection
WRONG_HASHES = 3  # downloads of a file with another hash than the hub's, after which it is given up
TRANSIENT = (408, 429)  # statuses below 500 that pass; those from 500 on do too


class Stopped(Exception):
    """A download that was told to stop; what has arrived is kept for the next one."""


class RemoteFile(NamedTuple):
    """A file of a data set of the hub, at one commit."""

    repository: str
    revision: str
    path: str

    def __str__(self) -> str:
        return f"{self.path} of {self.repository}"


class Backoff:
    """Exponential backoff: waits that double, and begin anew once something has arrived."""

    def __init__(self, file: RemoteFile, say: Callable[[str], None], stop: threading.Event):
        self._file, self._say, self._stop = file, say, stop
        self.arrived()

    def arrived(self) -> None:
        self._wait, self._since = FIRST_WAIT, time.monotonic()

    def lost(self, why: Any, received: int) -> None:
        """Wait before another try, or give up."""
        reason = str(why).strip().partition("\n")[0] or type(why).__name__
        if time.monotonic() - self._since + self._wait > PATIENCE:
            raise UserError(
                f"data.source.name is {self._file.repository}; the hub has not answered for "
                f"{duration(PATIENCE)} ({reason}). What has arrived is kept: the same command "
                "again goes on from there"
            )
        self._say(
            f"the connection to the hub was lost ({reason}); {self._file} goes on from byte "
            f"{received:,} in {duration(self._wait)}"
        )
        if self._stop.wait(self._wait):
            raise Stopped
        self._wait = min(2 * self._wait, LONGEST_WAIT)


def download(
    file: RemoteFile,
    to: Path,
    *,
    say: Callable[[str], None],
    stop: threading.Event,
    received: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """A file of a repository as `to`, from the byte on at which an earlier call was cut off.

    A lost connection is tried again with backoff, and a kill loses nothing that was written. The
    whole file is compared with the hub's own hash of it, and again whenever it is found here.
    `received` is called with the bytes that are here and those that there will be.
    """
    about = to.with_name(f"{to.name}.json")
    if _is_whole(to, about):
        return to
    to.unlink(missing_ok=True)
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.with_name(to.name + PARTIAL)
    backoff, wrong, expected = Backoff(file, say, stop), 0, None
    while True:
        size = partial.stat().st_size if partial.exists() else 0
        try:
            expected = expected or _expected(file)
            if size < expected["size"]:
                _receive(file, partial, size, expected["size"], backoff, stop, received)
                size = partial.stat().st_size
            partial.touch()
        except _errors() as error:
            _refuse_for_good(file, error)
            backoff.lost(error, partial.stat().st_size if partial.exists() else 0)
            continue
        except OSError as error:
            if error.errno in FULL:
                raise UserError(
                    f"{file} does not fit into {to.parent} ({error.strerror}); make room there, or "
                    "name another folder with data.cache or WINDLASS_CACHE"
                ) from None
            raise
        if _digest(partial, expected["kind"]) == expected["hash"]:
            break
        wrong += 1
        partial.unlink()
        if wrong == WRONG_HASHES:
            raise UserError(
                f"{file} was downloaded {wrong} times, and each time its hash is not the one that "
                "the hub states; a proxy on the way may change it"
            )
        backoff.lost("its hash is not the one that the hub states", 0)
    partial.replace(to)
    seal.write_signed(about, expected)
    return to


def forget(to: Path) -> None:
    """Delete a downloaded file, whole or not."""
    for path in (to, to.with_name(f"{to.name}.json"), to.with_name(to.name + PARTIAL)):
        path.unlink(missing_ok=True)


def _receive(
    file: RemoteFile,
    partial: Path,
    begin: int,
    total: int,
    backoff: Backoff,
    stop: threading.Event,
    received: Callable[[int, int], None],
) -> None:
    """Append what is missing of a file, by a byte range."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    name, revision = file.repository, file.revision
    url = hf_hub_url(
        name, file.path, repo_type="dataset", revision=revision, endpoint=constants.ENDPOINT
    )
    # Compressed on the way, a range would be one of other bytes.
    headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={begin}-"}
    how: dict[str, Any] = {"headers": headers, "timeout": TIMEOUT, "follow_redirects": True}
    with get_session().stream("GET", url, **how) as response:
        hf_raise_for_status(response)
        done = begin if response.status_code == 206 else 0  # 200: a server without ranges
        # Unbuffered: a kill loses nothing that has arrived.
        with partial.open("ab" if done else "wb", buffering=0) as out:
            for chunk in response.iter_bytes():
                out.write(chunk)
                done += len(chunk)
                backoff.arrived()
                received(done, total)
                if stop.is_set():
                    raise Stopped


def _expected(file: RemoteFile) -> dict[str, Any]:
    """Size and hash of a file, as the hub states them: SHA-256 of a large one, else git's own."""
    from huggingface_hub import HfApi, constants

    api = HfApi(endpoint=constants.ENDPOINT)
    found = api.get_paths_info(
        file.repository, [file.path], revision=file.revision, repo_type="dataset"
    )
    if not found:
        raise UserError(f"{file} is not there at {file.revision}")
    about: Any = found[0]
    if about.lfs is not None:
        return {"size": about.size, "kind": "sha256", "hash": about.lfs.sha256}
    return {"size": about.size, "kind": "git", "hash": about.blob_id}


def _digest(path: Path, kind: str) -> str:
    # Of git's hash no secret depends: it is the name of the content.
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(usedforsecurity=False)
    if kind == "git":
        digest.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as content:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _is_whole(path: Path, about: Path) -> bool:
    try:
        expected = seal.opened(about)
        return _digest(path, expected["kind"]) == expected["hash"]
    except (FileNotFoundError, ValueError):
        return False


def _errors() -> tuple[type[BaseException], ...]:
    from huggingface_hub import errors

    client: Any = errors.HfHubHTTPError.__bases__[0]  # of its HTTP client, whichever it is
    return (client, ConnectionError, TimeoutError)


def _refuse_for_good(file: RemoteFile, error: BaseException) -> None:
    """Refuse what no further try will change."""
    from huggingface_hub import constants, errors

    where = f"data.source.name is {file.repository}"
    if isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        raise UserError(
            f"{where}; {file.path} is needed next, and the hub is not contacted, since "
            "HF_HUB_OFFLINE is set"
        ) from None
    status = getattr(getattr(error, "response", None), "status_code", 500)
    if status < 500 and status not in TRANSIENT:
        raise UserError(
            f"{where}; the hub refuses {file.path} at {file.revision} "
            f"({str(error).strip().partition(chr(10))[0]})"
        ) from None
