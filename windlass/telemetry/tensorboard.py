"""The numbers of a run as TensorBoard reads them: event files in the folder of the run."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "events.out.tfevents."  # what TensorBoard looks for; it reads the files in order of name


class Events:
    """The event files of a run: one for every time it was started.

    An event is in the file when `write` returns. TensorBoard drops what an earlier file has of the
    steps that a later one takes again.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._path: Path | None = None

    def begin(self, step: int, now: float | None = None) -> None:
        """A new file, for the steps after this one."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        now = time.time() if now is None else now
        # A clock may have been set back, and a run started twice in a second.
        number = max([int(now), *(number + 1 for number in _numbers(self._folder))])
        self._path = self._folder / f"{NAME}{number}"
        self._add(wall_time=now, file_version="brain.Event:2")
        again = SessionLog(status=SessionLog.START)
        self._add(wall_time=now, step=step + 1, session_log=again)

    def write(self, step: int, now: float, numbers: Mapping[str, Any]) -> None:
        """The numbers of a record, each under its own name."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in numbers.items()
            if isinstance(value, int | float) and name not in ("step", "time")
        ]
        self._put(step, now, Summary(value=values))

    def text(self, step: int, now: float, name: str, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        # TensorBoard reads text as Markdown, in which an indented line stands as it is.
        verbatim = "".join(f"    {line}\n" for line in text.splitlines())
        words = TensorProto(dtype=DT_STRING, string_val=[verbatim.encode()])
        plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag=name, tensor=words, metadata=plugin)
        self._put(step, now, Summary(value=[value]))

    def _put(self, step: int, now: float, summary: Any) -> None:
        if self._path is None:
            self.begin(step - 1, now)
        self._add(wall_time=now, step=step, summary=summary)

    def _add(self, **fields: Any) -> None:
        # Not TensorBoard's own writer: it imports TensorFlow where that is installed, and writes
        # in a thread, which a killed process loses.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._path is not None
        with open(self._path, "ab") as file:
            RecordWriter(file).write(Event(**fields).SerializeToString())


def _numbers(folder: Path) -> list[int]:
    found = (re.fullmatch(rf"{re.escape(NAME)}(\d+)", path.name) for path in folder.iterdir())
    return [int(match[1]) for match in found if match]
