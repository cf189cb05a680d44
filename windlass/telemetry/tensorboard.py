"""TensorBoard event files, in the folder of the run."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.telemetry import event_file, panels

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
        event_file.append(self._path, event_file.event(now, version=event_file.VERSION))
        event_file.append(self._path, event_file.event(now, step + 1, start=True))

    def write(self, step: int, now: float, numbers: Mapping[str, Any]) -> None:
        """The numbers of a record, each under its name in panels."""
        points = panels.curves(numbers).items()
        self._put(step, now, *(event_file.scalar(name, value) for name, value in points))

    def text(self, step: int, now: float, name: str, text: str) -> None:
        # TensorBoard reads text as Markdown, in which an indented line stands as it is.
        verbatim = "".join(f"    {line}\n" for line in text.splitlines())
        self._put(step, now, event_file.text(name, verbatim))

    def hyperparameters(self, step: int, now: float, values: Mapping[str, Any]) -> None:
        """Hyper-parameters by their full keys, for the HParams panel."""
        self._put(step, now, event_file.hparams_start(_scalars(values), now))

    def end(self, step: int, now: float, is_finished: bool) -> None:
        """The end of a start, for the HParams panel."""
        self._put(step, now, event_file.hparams_end(is_finished, now))

    def _put(self, step: int, now: float, *values: bytes) -> None:
        if self._path is None:
            self.begin(step - 1, now)
        assert self._path is not None
        event_file.append(self._path, event_file.summary(now, step, *values))


def _scalars(values: Mapping[str, Any]) -> dict[str, event_file.Scalar]:
    """Values that the panel can show: a list, or none, as it is written in a recipe."""
    return {
        name: value if isinstance(value, event_file.Scalar) else json.dumps(value, default=str)
        for name, value in values.items()
    }


def _numbers(folder: Path) -> list[int]:
    matches = (re.fullmatch(rf"{re.escape(NAME)}(\d+)", path.name) for path in folder.iterdir())
    return [int(match[1]) for match in matches if match]
