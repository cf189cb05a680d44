"""Pipes between a trainer and the process that started it: signals down, facts up."""

import json
import os
from typing import Any, NamedTuple


class Pipe(NamedTuple):
    """The trainer's end of the pipes, as file descriptors."""

    signals: int  # come in here, each a byte; at its end the parent is gone
    facts: int  # go out here, each a line of JSON
    log: str  # path of the file of what libraries print, and of faults

    def send(self, **facts: Any) -> None:
        os.write(self.facts, json.dumps(facts).encode() + b"\n")


def facts(reads: int) -> dict[str, Any]:
    """The facts that a trainer sent before it ended."""
    os.set_blocking(reads, False)  # some process that it started may still hold the other end
    try:
        lines = os.read(reads, 1 << 16).splitlines()
    except BlockingIOError:
        lines = []
    return {name: value for line in lines for name, value in json.loads(line).items()}
