"""As much of the hub as serves one data set over HTTP, and loses connections when it is told."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import datasets
import pytest
from datasets import config
from huggingface_hub import constants

from windlass.hub import download as downloads

NAME, COMMIT = "someone/corpus", "0123456789" * 4


class DatasetHub:
    """A data set at one commit; `cuts` connections are lost half-way through what they send."""

    def __init__(self, files: Mapping[str, bytes], *, cuts: int = 0, commit: str = COMMIT):
        self.files, self.cuts, self.commit = dict(files), cuts, commit
        self.ranges: list[tuple[str, int]] = []  # of files that were requested, from which byte on
        self.refuses: int | None = None  # a status in place of every file
        self.holds = ""  # the name of a file of which half is sent, and the rest when it is let go
        self.let_go = threading.Event()
        self._lock = threading.Lock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = unquote(self.path.partition("?")[0])
                if "/tree/" in path:
                    return self.json(hub.tree(path, "recursive=true" in self.path.lower()))
                if path.startswith("/api/datasets/"):
                    siblings = [{"rfilename": name} for name in hub.files]
                    return self.json({"id": NAME, "sha": hub.commit, "siblings": siblings})
                name = path.partition("/resolve/")[2].partition("/")[2]
                if name not in hub.files:
                    return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                self.file(name, hub.files[name])

            do_HEAD = do_GET

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                try:
                    paths = json.loads(body)["paths"]
                except ValueError:
                    paths = parse_qs(body)["paths"]
                self.json([hub.about(name) for name in paths if name in hub.files])

            def file(self, name: str, content: bytes) -> None:
                head = {"ETag": f'"{git_hash(content)}"', "X-Repo-Commit": hub.commit}
                begin = int((self.headers["Range"] or "bytes=0-")[6:].partition("-")[0])
                if self.command == "HEAD":
                    return self.answer(200, content, head)
                if hub.refuses is not None:
                    return self.answer(hub.refuses, b"{}", {})
                rest = content[begin:]
                hub.ranges.append((name, begin))
                span = f"bytes {begin}-{len(content) - 1}/{len(content)}"
                is_cut = hub.is_cut(name) or hub.holds == name
                self.answer(206, rest, head | {"Content-Range": span}, half=is_cut)
                if hub.holds == name:
                    self.wfile.flush()
                    hub.let_go.wait()

            def json(self, content: Any) -> None:
                kind = {"Content-Type": "application/json"}
                self.answer(200, json.dumps(content).encode(), kind)

            def answer(
                self, status: int, content: bytes, head: dict[str, str], half: bool = False
            ) -> None:
                self.send_response(status)
                for name, value in (head | {"Content-Length": str(len(content))}).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content[: len(content) // 2] if half else content)
                self.close_connection = half

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "DatasetHub":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.let_go.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def is_cut(self, name: str) -> bool:
        with self._lock:
            self.cuts -= (cut := self.cuts > 0 and not name.endswith(".md"))
            return cut

    def about(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}

    def tree(self, path: str, recursive: bool) -> list[dict[str, Any]]:
        """The files and folders below a folder of the repository."""
        below = path.partition("/tree/")[2].partition("/")[2]
        below = f"{below}/" if below else ""
        inside = [name for name in self.files if name.startswith(below)]
        folders = {
            below + rest.partition("/")[0]
            for name in inside
            if "/" in (rest := name.removeprefix(below))
        }
        listed = [{"type": "directory", "path": one, "oid": "0" * 40} for one in sorted(folders)]
        own = [name for name in inside if recursive or "/" not in name.removeprefix(below)]
        return [*listed, *map(self.about, own)]


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def keep_caches_below(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches of the hub's libraries, out of the user's home, and no bars on the terminal."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", folder / "library")
    datasets.disable_progress_bars()


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a connection that was lost tried again at once."""
    monkeypatch.setattr(downloads, "FIRST_WAIT", 0.001)


@contextmanager
def online(hub: DatasetHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process with the hub's libraries at a local one, as HF_ENDPOINT does at their import."""
    with monkeypatch.context() as patch, hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        patch.setattr(constants, "ENDPOINT", hub.address)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + template)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(config, "HF_ENDPOINT", hub.address)
        patch.setattr(config, "HF_HUB_OFFLINE", False)
        keep_caches_below(folder, patch)
        yield


def environment(hub: DatasetHub, folder: Path) -> dict[str, str]:
    """The same for processes of their own."""
    return {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "0"}


def corpus(documents: int = 120, files: int = 3) -> dict[str, bytes]:
    """Files of documents of text, each of another length."""
    texts = [
        f"{n}: " + " ".join(f"word{(n * k) % 97}" for k in range(5 + n % 13))
        for n in range(documents)
    ]
    lines = [json.dumps({"text": text, "number": n}) + "\n" for n, text in enumerate(texts)]
    each = -(-documents // files)
    return {
        f"data/train-{file:05}.jsonl": "".join(lines[file * each : (file + 1) * each]).encode()
        for file in range(files)
    } | {"README.md": b"# A corpus\n"}


def write_corpus(folder: Path) -> Path:
    """The files of such a data set, in a folder."""
    for name, content in corpus().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder
