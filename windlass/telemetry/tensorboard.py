"""TensorBoard event files, in the folder of the run."""

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

NO_CURVE = ("step", "time", "token_hash")
NAME = "events.out.tfevents."  # what TensorBoard looks for; it reads the files in order of name


class Events:
    """The event files of a run: one for every time it was started.

    An event is in the file when `write` returns. TensorBoard drops what an earlier file has of the
    steps that a later one takes again.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._path: Path | None = None

    def begin(self, step: int, now: float) -> None:
        """A new file, for the steps after this one."""
        # A clock may have been set back, and a run started twice in a second.
        number = max([int(now), *(number + 1 for number in _numbers(self._folder))])
        self._path = self._folder / f"{NAME}{number}"
        self._add(wall_time=now, file_version="brain.Event:2")
        log = _messages("event").SessionLog
        self._add(wall_time=now, step=step + 1, session_log=log(status=log.START))

    def write(self, step: int, now: float, numbers: Mapping[str, Any]) -> None:
        """The numbers of a record, each under its own name."""
        summary = _messages("summary").Summary
        values = [
            summary.Value(tag=name, simple_value=value)
            for name, value in numbers.items()
            if isinstance(value, int | float) and name not in NO_CURVE
        ]
        self._put(step, now, summary(value=values))

    def text(self, step: int, now: float, name: str, text: str) -> None:
        messages, kind = _messages("summary"), _messages("types").DT_STRING
        # TensorBoard reads text as Markdown, in which an indented line stands as it is.
        verbatim = "".join(f"    {line}\n" for line in text.splitlines())
        tensor = _messages("tensor").TensorProto(dtype=kind, string_val=[verbatim.encode()])
        plugin = messages.SummaryMetadata(plugin_data={"plugin_name": "text"})
        value = messages.Summary.Value(tag=name, tensor=tensor, metadata=plugin)
        self._put(step, now, messages.Summary(value=[value]))

    def _put(self, step: int, now: float, summary: Any) -> None:
        if self._path is None:
            self.begin(step - 1, now)
        self._add(wall_time=now, step=step, summary=summary)

    def _add(self, **fields: Any) -> None:
        # Not TensorBoard's own writer: it imports TensorFlow where that is installed, and writes
        # in a thread, which a killed process loses.
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._path is not None
        with open(self._path, "ab") as file:
            RecordWriter(file).write(_messages("event").Event(**fields).SerializeToString())


def _messages(name: str) -> Any:
    """The generated classes of one of TensorBoard's files of messages."""
    return import_module(f"tensorboard.compat.proto.{name}_pb2")


def _numbers(folder: Path) -> list[int]:
    matches = (re.fullmatch(rf"{re.escape(NAME)}(\d+)", path.name) for path in folder.iterdir())
    return [int(match[1]) for match in matches if match]
