"""Files come from the hub or from its cache; where they cannot, it says what to do."""

import json
import resource
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from windlass.errors import UserError
from windlass.hub.fetch import CONFIGS, TOKENIZER, WEIGHTS, fetch

NAME, COMMIT = "someone/tiny", "0123456789" * 4
NOBODY = "http://127.0.0.1:1"  # where nothing answers
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hello",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same again",
    "modeling_tiny.py": b"print('a program')",
    "original/model.safetensors": b"another",
}
WRONG = {
    "someone/secret": (404, "RepoNotFound"),
    "someone/gated": (403, "GatedRepo"),
    f"{NAME}/revision/elsewhere": (404, "RevisionNotFound"),
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as answers for one model."""

    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = self.path.partition("?")[0]
        if "someone/broken" in path:
            self.wfile.write(b"this is not how a hub speaks\r\n\r\n")
            self.close_connection = True
            return
        for part, (status, code) in WRONG.items():
            if part in path:
                return self.answer(status, b"{}", {"X-Error-Code": code})
        if path.startswith("/api/") and "/tree/" in path:
            listed = [
                {"type": "file", "path": name, "size": len(text), "oid": str(number) * 40}
                for number, (name, text) in enumerate(FILES.items())
            ]
            return self.answer(200, json.dumps(listed).encode(), {})
        if path.startswith("/api/"):
            about = {"id": NAME, "sha": COMMIT, "siblings": []}
            return self.answer(200, json.dumps(about).encode(), {})
        text = FILES[path.partition(f"/resolve/{COMMIT}/")[2]]
        self.answer(200, text, {"ETag": f'"{hash(text):x}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def answer(self, status: int, text: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(text))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def there(tmp_path, monkeypatch) -> Path:
    """The cache of the hub's own library."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def hub(there, monkeypatch) -> Iterator[type[Hub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    place_at(f"http://127.0.0.1:{server.server_port}", monkeypatch)
    Hub.asked.clear()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


def place_at(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_ENDPOINT does, which is read when the library is imported."""
    files = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + files)


def refused(name: str, revision: str | None = None, **how) -> str:
    with pytest.raises(UserError) as refusal:
        fetch(name, revision, CONFIGS, **how)
    return str(refusal.value)


def test_only_files_that_run_nothing_are_fetched_and_then_they_are_in_the_cache(hub, there):
    found = fetch(NAME, None, CONFIGS + TOKENIZER)
    assert found.revision == COMMIT and found.folder.is_relative_to(there)
    assert {path.name for path in found.folder.iterdir()} == {
        *("config.json", "tokenizer.json", "chat_template.jinja")
    }
    fetch(NAME, "main", WEIGHTS)
    assert {path.name for path in found.folder.rglob("*") if path.is_file()} == {
        *("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")
    }
    hub.asked.clear()
    assert fetch(NAME, COMMIT, CONFIGS + WEIGHTS) == found
    assert hub.asked == []


def test_what_is_in_the_cache_is_there_without_the_hub(hub, there, monkeypatch):
    found = fetch(NAME, None, CONFIGS)
    place_at(NOBODY, monkeypatch)
    assert fetch(NAME, None, CONFIGS) == found
    with pytest.raises(UserError) as refusal:
        fetch(NAME, None, CONFIGS + WEIGHTS)
    assert f"and it is only a part of it in {there}, which has {NAME}." in str(refusal.value)


def test_what_the_hub_refuses_is_said_with_what_to_do(hub):
    assert refused("someone/secret") == (
        "model.hub is someone/secret; the hub has no model of that name that may be read from "
        "here. The spelling is OWNER/NAME; a private one needs `hf auth login` with an account "
        "that may read it"
    )
    assert refused("someone/gated") == (
        "model.hub is someone/gated, which is open only to those who accept its terms: do so on "
        f"{constants.ENDPOINT}/someone/gated, and then `hf auth login` on this machine"
    )
    assert refused(NAME, "elsewhere") == (
        f"model.revision is elsewhere; {NAME} has no branch, tag or commit of that name"
    )
    assert refused("some/one/tiny") == (
        "model.hub is some/one/tiny; it must be OWNER/NAME, as the hub writes it"
    )


def test_a_hub_that_breaks_off_or_a_full_disk_is_said(hub, there):
    said = refused("someone/broken")
    assert said.startswith("model.hub is someone/broken; the hub stopped answering (")
    assert said.endswith("); the same command again goes on with what is missing")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        said = refused(NAME)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said == (
        f"model.hub is {NAME}; there is no room for it in {there}: File too large. HF_HOME names "
        "another place, and `hf cache` lists what is there"
    )


def test_without_the_hub_it_says_what_is_there_and_how_to_bring_more(there, monkeypatch):
    how = (
        "Where there is a connection, `hf download someone/tiny` fills that folder, which can be "
        "copied here, and with --local-dir FOLDER makes one that a recipe names by its path"
    )
    assert refused(NAME) == (
        "model.hub is someone/tiny; the hub is not contacted, since HF_HUB_OFFLINE is set, and it "
        f"is not in {there}, which has no model. {how}"
    )
    for name in ("models--a--one", "models--b--two--three", "datasets--c--rows"):
        (there / name).mkdir()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    place_at(NOBODY, monkeypatch)
    assert refused(NAME) == (
        "model.hub is someone/tiny; the hub cannot be reached from here ([Errno 111] Connection "
        f"refused), and it is not in {there}, which has a/one and b/two--three. {how}"
    )
    assert refused(NAME, kind="dataset", key="data.source.name") == (
        "data.source.name is someone/tiny; the hub cannot be reached from here ([Errno 111] "
        f"Connection refused), and it is not in {there}, which has c/rows. Where there is a "
        "connection, `hf download someone/tiny --repo-type dataset` fills that folder, which can "
        "be copied here, and with --local-dir FOLDER makes one that a recipe names by its path"
    )
