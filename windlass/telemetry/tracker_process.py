"""The process that a tracker lives in: a job in a line comes in, and an answer goes out."""

import json
import os
import re
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, TextIO

LONGEST = 300  # characters of a failure
_SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)
_QUERY = re.compile(rf"([?&][^=&\s]*(?:{_SECRET.pattern})[^=&\s]*=)[^&\s]+", re.IGNORECASE)
SHORTEST = 8  # characters of a value that may be a secret


class Tracker(Protocol):
    """A run in a tracker. Any method may raise, which ends the tracker and nothing else."""

    where: str  # for people: where the run is to be seen

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def page(self, step: int, name: str, html: str) -> None: ...

    def end(self, is_finished: bool) -> None: ...


def main() -> None:
    (name,), tracker = sys.argv[1:], None
    jobs, answers = _apart()
    warned, is_told = _warnings(name), False
    for line in jobs:
        try:
            answer, tracker = _done(name, tracker, json.loads(line))
        except Exception as error:  # whatever a tracker raises: it is reported where the run is
            answer = {"failed": told(error)}
        if warned and not is_told:
            answer, is_told = {**answer, "warned": told(warned[0])}, True
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "failed" in answer:
            os._exit(1)  # without what the tracker does at an exit, which may wait for ever
    if tracker is not None:
        tracker.end(is_finished=False)  # the run was killed


def _done(name: str, tracker: Tracker | None, job: dict[str, Any]) -> tuple[dict, Tracker | None]:
    match job.pop("do"):
        case "begin":
            tracker = import_module(f"windlass.telemetry.{name}").begin(**job)
            assert tracker is not None
            return {"where": tracker.where}, tracker
        case "end":
            assert tracker is not None
            tracker.end(**job)
            return {}, None
        case method:
            getattr(tracker, method)(**job)
            return {}, tracker


def _warnings(name: str) -> list[Warning | str]:
    """The warnings that a tracker gives, as they come."""
    found = []

    def show(message: Warning | str, kind: type[Warning], file: str, *_, **__) -> None:
        if kind is UserWarning and f"/{name}/" in file:
            found.append(message)

    warnings.showwarning = show
    return found


def told(error: Warning | Exception | str) -> str:
    """A failure in a line, without secrets of the environment or of a URL."""
    text = " ".join(str(error).split()) or type(error).__name__
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= SHORTEST:
            text = text.replace(value, "***")
    text = _QUERY.sub(r"\1***", text).rstrip(".")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _apart() -> tuple[TextIO, TextIO]:
    """Standard input and output for the jobs; what a tracker reads and prints leads nowhere."""
    jobs, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    return jobs, answers


if __name__ == "__main__":
    main()
