"""Files that are whole whatever kills the writer, and disks that are full."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import trained
from windlass import files
from windlass.errors import UserError


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing beyond so many bytes fails, as on a disk that is full."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def killed_at(call: str, script: str, *words: str | Path) -> None:
    """Run a script in a process that is killed, with -9, where it would make a call of `os`."""
    begin = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom windlass import files\n"
        f"os.{call} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", begin + script, *map(str, words)], env=trained.environment()
    )
    assert done.returncode == -signal.SIGKILL


def test_a_kill_between_writing_and_renaming_leaves_the_old_file_whole(tmp_path: Path):
    file = tmp_path / "new" / "notes.json"
    files.write_json(file, {"a": 1})
    killed_at("fsync", "files.write(Path(sys.argv[1]), 'half')", file)
    assert json.loads(file.read_text()) == {"a": 1}
    assert sorted(path.suffix for path in file.parent.iterdir()) == [".json", ".partial"]
    files.write(file, b"\x00\xff")
    assert file.read_bytes() == b"\x00\xff"


def test_text_is_written_as_it_is_and_nothing_is_left_beside_it(tmp_path: Path):
    files.write(tmp_path / "a.txt", "é\r\n\n")
    assert (tmp_path / "a.txt").read_bytes() == "é\r\n\n".encode()
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    files.write(tmp_path / "a", "old")
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
        files.write(tmp_path / "a", "x" * 2000)
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_full_disk_is_one_clear_message_and_other_errors_stay_what_they_are(tmp_path: Path):
    with files_of_at_most(1000), pytest.raises(UserError) as full, files.full_disk(str):
        files.write(tmp_path / "a", "x" * 2000)
    assert str(full.value) == "[Errno 27] File too large"
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError), files.full_disk(str):
        files.write(tmp_path / "file" / "a", "")


def test_a_place_that_may_not_be_written_is_named_and_advice_is_for_full_disks(tmp_path: Path):
    place = tmp_path / "file"
    place.touch()
    with pytest.raises(UserError) as refused, files.writable(place, "; make room"):
        (place / "a").touch()
    assert str(refused.value) == f"{place} cannot be written: Not a directory"
    with files_of_at_most(1), pytest.raises(UserError) as refused:
        with files.writable(place, "; make room"):
            files.write(place, "xyz")
    assert str(refused.value) == f"{place} cannot be written: File too large; make room"


def test_a_folder_is_published_at_once_in_the_place_of_another(tmp_path: Path):
    to = tmp_path / "deep" / "mine"
    for content in ("one", "two"):
        partial = tmp_path / "partial"
        (partial / "sub").mkdir(parents=True)
        (partial / "sub" / "a").write_text(content)
        files.publish(partial, to)
        assert (to / "sub" / "a").read_text() == content
    assert os.listdir(tmp_path) == ["deep"] and os.listdir(to.parent) == ["mine"]


def test_a_kill_before_publishing_leaves_the_folder_that_was_there(tmp_path: Path):
    to, partial = tmp_path / "mine", tmp_path / "partial"
    for place, content in ((to, "old"), (partial, "new")):
        place.mkdir()
        (place / "a").write_text(content)
    killed_at("fsync", "files.publish(Path(sys.argv[1]), Path(sys.argv[2]))", partial, to)
    assert (to / "a").read_text() == "old"
    files.publish(partial, to)
    assert (to / "a").read_text() == "new"


def test_a_lock_is_exclusive_or_shared_and_goes_with_its_holder(tmp_path: Path):
    with (tmp_path / "lock").open("w") as mine, (tmp_path / "lock").open() as other:
        assert files.lock(mine)
        assert not files.lock(other) and not files.lock(other, shared=True)
        assert files.lock(mine, shared=True) and files.lock(other, shared=True)
    with (tmp_path / "lock").open() as free:
        assert files.lock(free, wait=True)


def test_what_other_killed_builds_left_is_removed_but_not_what_is_being_built(tmp_path: Path):
    with files.building(tmp_path / "alive", pytest.fail) as alive:
        (tmp_path / "dead").mkdir()
        (tmp_path / "dead" / "tokens.bin").write_bytes(b"left")
        (tmp_path / "dead.lock").touch()
        with files.building(tmp_path / "mine", pytest.fail):
            assert alive.is_dir()
            assert not (tmp_path / "dead").exists()
    assert sorted(os.listdir(tmp_path)) == ["alive.lock", "dead.lock", "mine.lock"]
