"""A folder is there when it is whole, replaces only what was exported, and fits on its disk."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

import windlass
from tests import trained
from tests.test_files import files_of_at_most
from windlass import seal
from windlass.errors import UserError
from windlass.release import folder


def write(to: Path, text: str = "new") -> None:
    with folder.written(to) as partial:
        (partial / "a.txt").write_text(text)
        folder.mark(partial, windlass="0")


def refused(to: Path, *, force: bool = False) -> str:
    with pytest.raises(UserError) as error:
        folder.check_vacant(to, force)
    return str(error.value)


def test_a_folder_appears_whole_and_an_earlier_export_is_replaced_when_asked(tmp_path):
    to = tmp_path / "deep" / "mine"
    folder.check_vacant(to, force=False)
    write(to, "old")
    assert refused(to) == (
        f"{to} holds an earlier export; --force replaces it, or name a new folder with --to"
    )
    folder.check_vacant(to, force=True)
    (to / "left.txt").write_text("of the earlier one")
    write(to, "new")
    assert sorted(os.listdir(to)) == ["a.txt", "windlass.json"]
    assert os.listdir(to.parent) == ["mine"]
    marked = json.loads((to / "windlass.json").read_text())
    assert marked["files"] == {"a.txt": sha256(b"new").hexdigest()}


def test_every_byte_of_an_export_is_verified(tmp_path):
    to = tmp_path / "mine"
    write(to)
    assert str(windlass.verify(to)) == f"{to}\n  good"
    (to / "a.txt").write_text("nev")
    assert str(windlass.verify(to)) == f"{to}\n  damaged: a.txt"
    assert not windlass.verify(str(to)).good
    for content in ({}, {"files": ["a.txt"]}):  # with a hash, and yet no seal
        seal.write_signed(to / "windlass.json", content)
        assert str(windlass.verify(to)) == f"{to}\n  damaged: windlass.json"


def test_what_is_somebodys_is_never_replaced(tmp_path):
    (tmp_path / "full").mkdir()
    folder.check_vacant(tmp_path / "full", force=False)
    (tmp_path / "full" / "thesis.tex").touch()
    for force in (False, True):
        assert refused(tmp_path / "full", force=force) == (
            f"{tmp_path}/full is not empty, and what is in it was not exported by windlass; "
            "name a new folder with --to"
        )
    (tmp_path / "file").touch()
    assert refused(tmp_path / "file", force=True) == (
        f"{tmp_path}/file is a file; an export is a folder, to be named with --to"
    )
    assert refused(Path("."), force=True) == (
        ". has no name of its own; an export is a new folder, named with --to"
    )


def test_a_failure_leaves_nothing_and_a_kill_nothing_under_the_name(tmp_path):
    to = tmp_path / "mine"
    with pytest.raises(ZeroDivisionError), folder.written(to) as partial:
        (partial / "half").touch()
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []

    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom windlass.release import folder\n"
        "with folder.written(Path(sys.argv[1])) as partial:\n"
        "    (partial / 'half').touch()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(to)], env=trained.environment())
    assert done.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == [".mine.partial"]
    write(to)
    assert os.listdir(tmp_path) == ["mine"]
    assert sorted(os.listdir(to)) == ["a.txt", "windlass.json"]


def test_two_processes_do_not_write_to_the_same_place(tmp_path):
    partial = tmp_path / ".mine.partial"
    partial.mkdir()
    with open(partial / folder.LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError) as error:
            write(tmp_path / "mine")
    assert str(error.value) == f"another process exports to {tmp_path}/mine now; wait for it"
    assert partial.is_dir()


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    folder.check_room(tmp_path / "a" / "b", free // 2, "")
    with pytest.raises(UserError) as error:
        folder.check_room(tmp_path / "a" / "b", 2**60, "; --dtype bfloat16 takes 512 PiB")
    told = str(error.value)
    assert told.startswith(f"the export takes 1048576.0 TiB, and the disk of {tmp_path}/a/b has ")
    assert told.endswith(
        "iB free; make room there, or name another folder with --to; --dtype bfloat16 takes 512 PiB"
    )
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_full_meanwhile_leaves_nothing_half(tmp_path):
    to = tmp_path / "mine"
    with files_of_at_most(1000), pytest.raises(UserError) as error:
        write(to, "x" * 2000)
    assert str(error.value) == (
        f"{to} cannot be written: File too large; nothing was left there. "
        "Make room, or name another folder with --to"
    )
    assert os.listdir(tmp_path) == []


def test_a_place_that_may_not_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as error:
        write(tmp_path / "file" / "mine")
    assert str(error.value) == f"{tmp_path}/file/mine cannot be written: Not a directory"
