"""A hub as small as it can be: it makes repositories, and takes commits of files."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Hub(ThreadingHTTPServer):
    """What was asked of it: repositories with what was said of each, and files by repository."""

    def __init__(self, status: int = 200):
        super().__init__(("127.0.0.1", 0), Answers)
        self.status = status
        self.repositories: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.tokens.add(self.headers["authorization"])
        if self.server.status != 200:
            return self.answer({"error": "not yours"}, self.server.status)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.repositories[name] = asked
            return self.answer({"url": f"{self.server.address}/{name}"})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": x, "uploadMode": "regular", "shouldIgnore": False} for x in paths]
            return self.answer({"files": files})
        assert "/commit/" in self.path, self.path
        for line in body.splitlines():
            part = json.loads(line)
            if part["key"] == "file":
                content = base64.b64decode(part["value"]["content"])
                self.server.files[part["value"]["path"]] = content
        return self.answer(
            {"commitUrl": f"{self.server.address}/me/mine/commit/1", "commitOid": "1"}
        )

    def answer(self, content: dict[str, Any], status: int = 200) -> None:
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def running(status: int = 200) -> Iterator[Hub]:
    with Hub(status) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
