"""Runs in a folder: finding, listing and deleting them."""

import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from windlass import files
from windlass.checkpoint.store import folder_of, steps_in
from windlass.config import Layers, listing
from windlass.config.reading import closest
from windlass.data import reference
from windlass.errors import UserError
from windlass.processes import shared_folders
from windlass.run_folder import folder as folders
from windlass.telemetry import about, compile_debug, metrics, tensorboard, trackers

LINES = (folders.METRICS, folders.SAMPLES, folders.COMPILES, folders.PHASES)  # files that grow
REPLACED = (*LINES, folders.ANSWERS, folders.ABOUT, folders.PLAN, folders.SEAL, folders.RECIPE)
REPLACED += (trackers.NAME,)
# What a run writes. Anything else in its folder is somebody's, and stays when the run goes.
WRITTEN = (
    *(*LINES, folders.ANSWERS, folders.TOKENIZER, folders.ABOUT),
    *(folders.PLAN, folders.REPORT, folders.LOCK),
    folders.SEAL,
    *("checkpoints", reference.FOLDER, folders.MODEL, f"{tensorboard.NAME}*"),
    *(trackers.NAME, trackers.WANDB_FOLDER, compile_debug.FOLDER, folders.TRACES, folders.TASKS),
    # Left by a kill.
    *(f"{name}.*{files.PARTIAL}" for name in REPLACED),
    *(f"{name}{files.DAMAGED}*" for name in LINES),
    *(f"{reference.FOLDER}{files.PARTIAL}", f".{reference.FOLDER}.former"),
    f"{shared_folders.PROBE}*",
    folders.RECIPE,  # the last to go: what is half deleted is still a run, to be deleted again
)


RUNS = Path("runs")  # where runs are stored unless a recipe says otherwise
NAMED = 8  # runs in a message, the newest


@dataclass(frozen=True)
class Standing:
    """The state of a run, as its folder has it."""

    folder: Path
    recipe: str
    state: Literal["training", "finished", "stopped", "damaged"]
    step: int  # the newest checkpoint's, or while training the last reported
    steps: int | None  # None: the recipe cannot be read
    loss: float | None
    validation_loss: float | None
    size_bytes: int
    changed: float  # time of the last write, in seconds since 1970
    damage: str | None = None  # why its state is not known


def within(place: Path) -> list[Path]:
    """The runs in a folder, newest first."""
    recipes = place.glob(f"*/{folders.RECIPE}")
    return [path.parent for path in sorted(recipes, key=lambda path: -path.stat().st_mtime)]


def of_recipe(layers: Layers) -> list[Path]:
    """The runs of a recipe that are here: the one it names, or all those in `runs`."""
    place = layers.merged(None).get("run", {}).get("dir")
    own = [Path(place).expanduser()] if place else sorted(RUNS.glob(f"{layers.name}-*"))
    return [folder for folder in own if is_run(folder)]


def find(run: str | Path | None) -> Path:
    """The folder of a run: given as it is, or as the recipe that has one run in `runs`."""
    if run is None:
        raise UserError(f"which run? {_available('')}")
    if (place := of_folder(run)) is not None:
        return place
    folder = Path(run).expanduser()
    name = folder.stem if folder.suffix in (".yaml", ".yml") else str(run)
    of_recipe = [place for place in within(RUNS) if place.name.rpartition("-")[0] == name]
    if len(of_recipe) == 1:
        return of_recipe[0]
    if of_recipe:
        raise UserError(f"{run} has {len(of_recipe)} runs: {listing(map(_standing, of_recipe))}")
    why = f"it has no {folders.RECIPE}" if folder.is_dir() else "there is no such folder"
    raise UserError(f"{run} is not a run: {why}; {_available(str(run))}")


def of_folder(run: str | Path) -> Path | None:
    """The folder of a run that is named by its folder, here or in `runs`; None: by its recipe."""
    folder = Path(run).expanduser()
    return next((place for place in (folder, RUNS / folder) if is_run(place)), None)


def is_run(folder: Path) -> bool:
    return (folder / folders.RECIPE).is_file()


def _available(word: str) -> str:
    runs = within(RUNS)
    if not runs:
        return f"nothing is in {RUNS}/ here yet, and `windlass train RECIPE` makes a run"
    meant = closest(word, map(str, runs)) or closest(word, [place.name for place in runs])
    hint = f"did you mean {meant}? " if meant else ""
    names = listing(map(_standing, runs[:NAMED]), "and")
    more = f", and {len(runs) - NAMED} older ones" if len(runs) > NAMED else ""
    return f"{hint}there {'is' if len(runs) == 1 else 'are'} {names}{more}"


def _standing(folder: Path) -> str:
    steps = steps_in(folder_of(folder))
    return f"{folder} ({f'step {steps[-1]}' if steps else 'no checkpoint'})"


def standing(folder: Path) -> Standing:
    """The state of a run; one that somebody edited is listed as damaged, and can be deleted."""
    records, saved = folder / folders.METRICS, steps_in(folder_of(folder))
    newest = records if records.exists() else folder / folders.RECIPE
    found = Standing(
        folder=folder,
        recipe=re.sub("-[0-9a-f]{8}$", "", folder.name),
        state="stopped",
        step=saved[-1] if saved else 0,
        steps=steps_of(folder),
        loss=None,
        validation_loss=None,
        size_bytes=size_of(folder),
        changed=newest.stat().st_mtime,
    )
    try:
        starts, record = about.read(folder / folders.ABOUT), metrics.last(records) or {}
        losses = {name: metrics.last(records, name) or {} for name in ("loss", "validation_loss")}
    except UserError as error:
        return replace(found, state="damaged", damage=str(error))
    found = replace(found, **{name: record.get(name) for name, record in losses.items()})
    if starts:
        is_finished = starts[-1].get("is_finished", False)
        recipe, state = str(starts[0].get("recipe")), "finished" if is_finished else "stopped"
        found = replace(found, recipe=recipe, state=state)
    if trained_by(folder) is not None:
        found = replace(found, state="training", step=max(found.step, record.get("step", 0)))
    return found


def check_checkpoints(folder: Path) -> None:
    """Refuse to start at step 0 in the folder of a run whose checkpoints somebody took away."""
    checkpoints = folder_of(folder)
    if steps_in(checkpoints) or any(checkpoints.glob(f"*{files.DAMAGED}*")):
        return
    starts = about.read(folder / folders.ABOUT)
    # A start after step 0 had restored one, and an end had saved one. Records alone may be of a
    # start that was killed before its first was saved, but its folder was there by then.
    reached = [start.get(name) or 0 for start in starts for name in ("step", "at")]
    if not checkpoints.exists():
        reached.append((metrics.last(folder / folders.METRICS) or {}).get("step", 0))
    if step := max(reached, default=0):
        raise UserError(
            f"{folder} was trained to step {step}, and has no checkpoint any more; put back "
            f"{checkpoints}, start another run with run.dir, or start again at step 0 once "
            f"`windlass runs --delete {folder}` has deleted what is left"
        )


def trained_by(folder: Path) -> str | None:
    """The process that trains a run now; None where none does."""
    try:
        file = open(folder / folders.LOCK, encoding="utf-8")  # noqa: SIM115
    except FileNotFoundError:
        return None
    with file:
        return None if files.lock(file, shared=True) else file.read().strip() or "unknown"


def size_of(folder: Path) -> int:
    """The bytes of all files under a folder; one that vanishes meanwhile counts as none."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
    return total


def check_deletable(folder: Path) -> None:
    if folder.is_symlink():
        raise UserError(
            f"{folder} is a link to {folder.resolve()}; name that folder to delete the run"
        )
    if (process := trained_by(folder)) is not None:
        raise UserError(
            f"{folder} is being trained by process {process}; stop that first: Ctrl-C, or "
            f"kill {process}"
        )


def delete(folder: Path) -> list[Path]:
    """Delete what a run wrote, and its folder; what else is in there stays, and is returned."""
    check_deletable(folder)
    try:
        for pattern in WRITTEN:
            for path in folder.glob(pattern):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        left = sorted(folder.iterdir())
        if not left:
            folder.rmdir()
    except OSError as error:
        what = f"{folder} cannot be deleted, and is there still or in part"
        raise UserError(f"{what}: {error.filename}: {error.strerror}") from None
    return left


def steps_of(folder: Path) -> int | None:
    """Number of steps of a run; of one in epochs, as it was counted when it last started."""
    try:
        steps = folders.stored(folder).get("train", {}).get("steps")
        starts = about.read(folder / folders.ABOUT)
        return starts[-1].get("steps") if steps is None and starts else steps
    except UserError:  # somebody edited it: the others are listed all the same
        return None
