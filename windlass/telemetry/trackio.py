"""Trackio: a run in its local store, or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say."""

import html as markup
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from windlass.config.sections import flat
from windlass.telemetry import PROJECT


class TrackioRun:
    """A run of Trackio, which knows it by its name in a project."""

    def __init__(self, run: Any, library: Any):
        self._run, self._library = run, library
        self.where = f"`trackio show --project {run.project}` shows it as {run.name}"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self.page(step, name, f"<pre>{markup.escape(text)}</pre>")

    def page(self, step: int, name: str, html: str) -> None:
        self._run.log({name: self._library.Html(html)}, step=step)

    def end(self, is_finished: bool) -> None:
        self._run.finish()


def begin(
    *, id: str, name: str, folder: str, project: str | None, config: Mapping[str, Any]
) -> TrackioRun:
    """A run by its name and id, new or as it was left."""
    library = import_module("trackio")
    run = library.init(
        project=project or PROJECT,
        name=f"{name}-{id}",
        config=flat(dict(config)),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return TrackioRun(run, library)
