"""Live pages: a page of runs, served on this machine alone while they train."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.reports.run_summary import Account
from windlass.run_folder import folder as folders
from windlass.run_folder import runs

LOOPBACK = "127.0.0.1"
# Names under which a browser reaches this machine. Under another, a page from elsewhere that had
# its name point here would read the run.
HOSTS = (LOOPBACK, "localhost", "[::1]")
FILES = (
    *(folders.METRICS, folders.PHASES, folders.COMPILES, folders.SAMPLES, folders.ANSWERS),
    *(folders.ABOUT, folders.PLAN, folders.RECIPE, "checkpoints"),
)


class LivePage:
    """Page of some runs, made anew when their files have changed."""

    def __init__(
        self,
        places: Sequence[Path],
        account: Callable[[Path], Account],
        page: Callable[[Sequence[Account]], str],
    ):
        self._places, self._account, self._page = places, account, page
        self._lock = threading.Lock()
        self._seen: Any = None
        self._training: set[Path] = set()
        self._content = b""

    def get(self) -> tuple[str, bytes]:
        """The page and its fingerprint."""
        with self._lock:
            if (seen := [*map(self._state, self._places)]) != self._seen:
                every = [self._account(place) for place in self._places]
                self._training = {
                    one.standing.folder for one in every if one.standing.state == "training"
                }
                self._content = self._page(every).encode(errors="replace")
                self._seen = seen
            return hashlib.sha256(self._content).hexdigest()[:16], self._content

    def _state(self, place: Path) -> Any:
        """Sizes and times of the files of a run, and whether it lost the process that trained it.

        The lock is not touched before: a run that starts in that moment would be refused.
        """
        lives = place in self._training and runs.trained_by(place) is not None
        return lives == (place in self._training), [_stamp(place / name) for name in FILES]


class LiveServer(ThreadingHTTPServer):
    """HTTP server of one page, on the loopback interface; others on the network do not reach it."""

    daemon_threads = True

    def __init__(self, page: LivePage, port: int = 0):
        self.page = page
        try:
            super().__init__((LOOPBACK, port), PageHandler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"--port is {port}, which cannot be listened on: {why}; another one from 1024 to "
                "65535 may do, and without --port a free one is chosen"
            ) from None

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away in the middle of an answer is no error."""


class PageHandler(BaseHTTPRequestHandler):
    """Answers to a browser: the page, read-only."""

    server: LiveServer
    server_version, sys_version = "windlass", ""

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")
        if (host[0] or host[2]) not in HOSTS:
            return self._answer(403, f"this page is served to {LOOPBACK} alone")
        if self.path != "/":
            return self._answer(404, "there is one page here: /")
        try:
            tag, content = self.server.page.get()
        except UserError as error:
            return self._answer(503, str(error))
        if self.headers.get("If-None-Match") == f'"{tag}"':
            return self._answer(304, "")
        self._answer(200, content, tag)

    do_HEAD = do_GET

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # any other method
            return lambda: self._answer(405, "this page can only be read")
        raise AttributeError(name)

    def _answer(self, code: int, content: str | bytes, tag: str | None = None) -> None:
        kind = "html" if isinstance(content, bytes) else "plain"
        raw = content if isinstance(content, bytes) else f"{content}\n".encode()
        self.send_response(code)
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.send_header("Content-Length", "0" if code == 304 else str(len(raw)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if tag is not None:
            self.send_header("ETag", f'"{tag}"')
        if code == 405:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD" and code != 304:
            self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is the user's."""


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
