"""Calls that cache what a teacher gives every token, for a student to learn from."""

from pathlib import Path
from typing import Any

from windlass.config import AnyRecipe, Overrides, words
from windlass.data import imported
from windlass.errors import UserError
from windlass.processes.clusters import Hosts
from windlass.processes.signals import Signals
from windlass.telemetry.console import ConsoleReport
from windlass.training import teaching
from windlass.training.teaching import Taught


def teach(
    recipe: AnyRecipe | None = None,
    overrides: Overrides = (),
    *,
    imports: str | Path | None = None,
    out: str | Path | None = None,
    hosts: Hosts | None = None,
    signals: Signals | None = None,
    report: ConsoleReport | None = None,
    **keys: Any,
) -> Taught:
    """Run the teacher of a recipe over its data, and write the cache that `data.teacher` names.

    What an earlier call of the same wrote is not computed again. In place of a recipe, `imports` is
    a folder of .npz or safetensors files with `input_ids`, `topk_idx` and `topk_logits`, which are
    written to the folder `out` as a cache that is a data set by itself.
    """
    if recipe is not None and imports is None and out is None:
        how = {"hosts": hosts, "signals": signals, "report": report}
        return teaching.teach(recipe, words(overrides, keys), **how)
    if recipe is not None or imports is None or out is None:
        raise UserError(
            "windlass teach takes a recipe with data.teacher, or --import FOLDER and --out FOLDER"
        )
    cache = imported.write(Path(imports).expanduser(), Path(out).expanduser())
    return Taught.of(cache, len(cache.shards))
