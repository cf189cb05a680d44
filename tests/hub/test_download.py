"""A file of a data set arrives whole, whatever becomes of the connection."""

import hashlib
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hub.dataset_server import COMMIT, NAME, DatasetHub, hurry, online
from windlass.errors import UserError
from windlass.hub import download as downloads
from windlass.hub.download import RemoteFile, Stopped, download

CONTENT = b"".join(hashlib.sha256(b"%d" % n).digest() for n in range(2**13))  # 256 KiB
FILE = RemoteFile(NAME, COMMIT, "data/train.jsonl")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DatasetHub]:
    hurry(monkeypatch)
    hub = DatasetHub({FILE.path: CONTENT})
    with online(hub, tmp_path, monkeypatch):
        yield hub


@pytest.fixture
def fetch(tmp_path: Path) -> Callable[..., Path]:
    def call(said: list[str] | None = None, stop: threading.Event | None = None, **how) -> Path:
        say = (lambda text: None) if said is None else said.append
        stop = stop or threading.Event()
        return download(FILE, tmp_path / "files/train.jsonl", say=say, stop=stop, **how)

    return call


def test_a_connection_that_is_lost_five_times_goes_on_at_the_byte_where_it_was(hub, fetch):
    hub.cuts, said = 5, []
    assert fetch(said).read_bytes() == CONTENT
    begins = [begin for _, begin in hub.ranges]
    # Each connection brings half of what is left.
    half, size = [0], len(CONTENT)
    for _ in range(5):
        half.append(half[-1] + (size - half[-1]) // 2)
    assert begins == half and len(said) == 5
    assert said[0].startswith("the connection to the hub was lost (")
    assert said[0].endswith(f"{FILE} goes on from byte {size // 2:,} in 0.0 s")


def test_a_file_that_is_here_is_checked_and_not_fetched_again(hub, fetch):
    place = fetch()
    hub.ranges.clear()
    assert fetch() == place and hub.ranges == []
    place.write_bytes(CONTENT[:-1] + b"?")
    assert fetch().read_bytes() == CONTENT and hub.ranges == [(FILE.path, 0)]


def test_what_was_stopped_or_killed_goes_on_where_it_was(hub, fetch, tmp_path):
    stop, seen = threading.Event(), []

    def half(done: int, total: int) -> None:
        seen.append((done, total))
        if done >= total // 2:
            stop.set()

    with pytest.raises(Stopped):
        fetch(stop=stop, received=half)
    (partial,) = (tmp_path / "files").iterdir()
    kept = partial.stat().st_size
    assert seen[-1] == (kept, len(CONTENT)) and kept >= len(CONTENT) // 2
    hub.ranges.clear()
    assert fetch().read_bytes() == CONTENT and hub.ranges == [(FILE.path, kept)]


def test_bytes_that_are_not_the_hubs_are_thrown_away(hub, fetch, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files/train.jsonl.partial").write_bytes(b"?" * 1000)  # of another file
    said: list[str] = []
    assert fetch(said).read_bytes() == CONTENT
    assert [begin for _, begin in hub.ranges] == [1000, 0]
    assert "its hash is not the one that the hub states" in said[0]


def refusal(fetch: Callable[..., Path]) -> str:
    with pytest.raises(UserError) as refused:
        fetch()
    return str(refused.value)


def test_what_no_further_try_changes_is_refused(hub, fetch, monkeypatch):
    hub.refuses = 403
    assert refusal(fetch).startswith(
        f"data.source.name is {NAME}; the hub refuses {FILE.path} at {COMMIT} ("
    )
    hub.refuses = 503
    monkeypatch.setattr(downloads, "PATIENCE", 0.01)
    said = refusal(fetch)
    assert said.startswith(f"data.source.name is {NAME}; the hub has not answered for 0.0 s (")
    assert said.endswith("What has arrived is kept: the same command again goes on from there")
    hub.refuses = None
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**13, before[1]))
    try:
        said = refusal(fetch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "does not fit into" in said and "data.cache" in said
