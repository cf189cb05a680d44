"""An export reaches the hub as it is, or stays where it is with a word on what to do."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import trained
from tests.release import hub

SCRIPT = """\
import sys
from pathlib import Path
from windlass.errors import UserError
from windlass.release import push
folder, name, private = sys.argv[1:]
try:
    push.check(name)
    print(push.push(Path(folder), name, private == "True"))
except UserError as error:
    print(error)
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    place = tmp_path / "mine"
    place.mkdir()
    (place / "README.md").write_text("---\nlibrary_name: transformers\n---\n# mine\n")
    (place / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    return place


def pushed(folder: Path, name: str, *, private: bool = False, **environment: str) -> str:
    """What a process of its own says, since the hub's client reads its settings when it starts."""
    without = ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT")
    plain = {key: x for key, x in trained.environment().items() if key not in without}
    home = {"HF_HOME": str(folder.parent / "hub")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), name, str(private)],
        env=plain | home | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "secret" not in done.stdout + done.stderr
    return done.stdout.strip()


def test_every_file_is_committed_to_a_repository_that_is_made(folder):
    with hub.running() as server:
        found = pushed(
            folder, "me/mine", private=True, HF_ENDPOINT=server.address, HF_TOKEN="secret"
        )
        assert found == f"{server.address}/me/mine"
        assert server.repositories["me/mine"]["visibility"] == "private"
        assert server.tokens == {"Bearer secret"}
    assert server.files == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_hub_that_refuses_is_told_with_what_it_says(folder):
    with hub.running(status=403) as server:
        found = pushed(folder, "you/mine", HF_ENDPOINT=server.address, HF_TOKEN="secret")
    assert found == (
        f"{folder} is written, and not pushed: the hub answered 403: not yours. The login on this "
        "machine may not write you/mine; `hf auth login` changes it. Once that is put right, "
        f"`hf upload you/mine {folder}` uploads it"
    )


def test_a_hub_that_cannot_be_reached_leaves_the_folder(folder):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        found = pushed(folder, "me/mine", private=True, HF_ENDPOINT=address, HF_TOKEN="secret")
    assert found == (
        f"{folder} is written, and not pushed: the hub cannot be reached from here ([Errno 111] "
        f"Connection refused). Once that is put right, `hf upload me/mine {folder} --private` "
        "uploads it"
    )
    assert len(os.listdir(folder)) == 2


def test_whoever_is_not_logged_in_is_told_how_before_anything_is_written(folder):
    assert pushed(folder, "me/mine") == (
        "--push needs an account of the hub, and nobody is logged in on this machine; "
        "`hf auth login` does that, with a token that may write"
    )
    assert pushed(folder, "me/mine", HF_HUB_OFFLINE="1") == (
        "--push needs the hub, which is not contacted, since HF_HUB_OFFLINE is set; without --push "
        "the folder is written, and `hf upload me/mine FOLDER` uploads it later"
    )
    assert pushed(folder, "me/mine/it") == (
        "--push is me/mine/it; it must be OWNER/NAME, as the hub writes it"
    )
