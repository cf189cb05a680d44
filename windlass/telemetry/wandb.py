"""Weights & Biases: a run there, or in files that `wandb sync` sends later."""

import html as markup
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from windlass.telemetry import PROJECT


class WandbRun:
    """A run of Weights & Biases, with our steps as its own.

    Its login, server, entity and mode are those of the environment, as `wandb login` and
    WANDB_MODE leave them.
    """

    def __init__(self, run: Any, library: Any):
        self._run, self._library = run, library
        self.where = run.url or f"offline; `wandb sync {run.settings.sync_dir}` sends it"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self.page(step, name, f"<pre>{markup.escape(text)}</pre>")

    def page(self, step: int, name: str, html: str) -> None:
        self._run.log({name: self._library.Html(html, inject=False)}, step=step)

    def end(self, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)


def begin(
    *, id: str, name: str, folder: str, project: str | None, config: Mapping[str, Any]
) -> WandbRun:
    """A run with this id, new or as it was left; what it keeps is in the folder of ours."""
    library = import_module("wandb")
    settings = library.Settings(
        silent=True,
        console="off",
        disable_git=True,  # it would run the git of a folder that may be somebody else's
        disable_code=True,
        disable_job_creation=True,
    )
    run = library.init(
        id=id,
        name=name,
        project=project or os.environ.get("WANDB_PROJECT") or PROJECT,
        config=dict(config),
        dir=folder,
        resume="allow",
        settings=settings,
    )
    return WandbRun(run, library)
