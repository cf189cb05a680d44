"""A real browser that tests open pages in: Chromium, driven by chromedriver over plain HTTP."""

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError

from tests.spawn import free_port

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
MISSING = "Chromium and its driver are not installed (Debian: chromium, chromium-driver)"
KEYS = {"ArrowRight": "\ue014", "ArrowLeft": "\ue012", "Home": "\ue011", "Tab": "\ue004"}
FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars"


class Browser:
    """A window of Chromium, and all that its pages logged and requested."""

    def __init__(self, url: str):
        self._url, self._session = url, ""
        options = {"binary": CHROMIUM, "args": FLAGS.split()}
        always = {"goog:chromeOptions": options}
        always |= {"goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": always}})
        self._session = f"/session/{made['sessionId']}"

    def open(self, address: str | Path) -> None:
        url = address.absolute().as_uri() if isinstance(address, Path) else address
        self._call("POST", f"{self._session}/url", {"url": url})

    def resize(self, width: int, height: int = 900) -> None:
        """Width of the page, as a device of that size has it."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.tell("Emulation.setDeviceMetricsOverride", **size)

    def dark(self, is_dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])

    def tell(self, command: str, **params: Any) -> Any:
        """Send a command of the DevTools protocol."""
        place = f"{self._session}/goog/cdp/execute"
        return self._call("POST", place, {"cmd": command, "params": params})

    def ask(self, script: str, *args: Any) -> Any:
        """The value of an expression in the page."""
        whole = {"script": f"return ({script})", "args": [*args]}
        return self._call("POST", f"{self._session}/execute/sync", whole)

    def until(self, script: str, seconds: float = 60.0) -> Any:
        """The value of an expression, once it is true."""
        return wait(lambda: self.ask(script), seconds, script)

    def press(self, key: str) -> None:
        """Press a key in the element that has the focus."""
        keys = [{"type": kind, "value": KEYS[key]} for kind in ("keyDown", "keyUp")]
        self._act({"type": "key", "id": "keys", "actions": keys})

    def point(self, x: float, y: float) -> None:
        """Move the pointer to a place in the window."""
        move = {"type": "pointerMove", "x": round(x), "y": round(y), "duration": 0}
        self._act({"type": "pointer", "id": "mouse", "actions": [move]})

    def picture(self, file: Path) -> None:
        """Screenshot of the whole page."""
        size = self.tell("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.tell("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def errors(self) -> list[str]:
        """All that was written to the console so far."""
        return [one["message"] for one in self._log("browser")]

    def requests(self) -> list[str]:
        """Addresses that were requested since the last call."""
        events = [json.loads(one["message"])["message"] for one in self._log("performance")]
        sent = [one["params"] for one in events if one["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent]

    def forget(self) -> None:
        """Forget what was logged and requested so far."""
        for kind in ("browser", "performance"):
            self._log(kind)

    def close(self) -> None:
        self._call("DELETE", self._session)

    def _act(self, *actions: dict[str, Any]) -> None:
        self._call("POST", f"{self._session}/actions", {"actions": [*actions]})

    def _log(self, kind: str) -> list[dict[str, Any]]:
        return self._call("POST", f"{self._session}/se/log", {"type": kind})

    def _call(self, method: str, place: str, body: dict[str, Any] | None = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + place, content, headers, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["value"]


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own, which does not outlive the block."""
    assert DRIVER is not None, MISSING
    port = free_port()
    with tempfile.TemporaryFile() as log:
        driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            wait(lambda: _answers(f"{url}/status"), 60.0, "chromedriver")
            window = Browser(url)
            try:
                yield window
            finally:
                window.close()
        finally:
            driver.terminate()
            driver.wait()


def wait(value: Callable[[], Any], seconds: float, what: str) -> Any:
    """A value, once it is true."""
    until = time.monotonic() + seconds
    while not (found := value()):
        assert time.monotonic() < until, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return found


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (URLError, ConnectionError):
        return False
