"""A published model, used as a run is: a folder, an export, or one of the hub."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from windlass import config
from windlass.checkpoint.store import Identity
from windlass.config import tree
from windlass.config.sections import flat
from windlass.data.corpus import given_vocabulary
from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError
from windlass.evaluation.finished_run import FinishedRun, Loaded, open_run
from windlass.hub import config as configs
from windlass.hub import peft
from windlass.program.described import Described
from windlass.run_folder import folder as folders
from windlass.run_folder import runs
from windlass.run_folder.folder import WeightsAt
from windlass.starting import hugging_face, origin, tuning
from windlass.starting.describe import describe

# What a recipe must have, and a model that is only used does not need. The optimizer is the one
# whose state is the smallest.
UNTRAINED = {
    "data": {"source": {"kind": "stories"}},
    "optim": {"kind": "adafactor", "learning_rate": 1e-3},
    "train": {"steps": 1, "batch_per_device": 8},
}


class PublishedModel(FinishedRun):
    """A model as it was published: what a run would be at step 0."""

    def __init__(self, name: str, described: Described):
        super().__init__(Path(name), lambda: WeightsAt(None, "weights"), described)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        return tree(self.run)

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        return given_vocabulary(self.run.tokenizer)

    def came_with(self, name: str) -> dict[str, Any] | None:
        assert self.run.start is not None
        path = hugging_face.weights(self.run.start) / name
        return configs.mapping(path) if path.is_file() else None

    def load(
        self,
        *,
        identity: Identity | None = None,
        frozen: bool = True,
        as_stored: bool = False,
    ) -> Loaded:
        """The arrays of the model's files, each in its sharding."""
        taken = origin.take(self.built, "", lambda text: None)  # of files there is nothing to say
        state, rest = self.programs.init(taken.arrays)
        return Loaded(0, state.weights, rest, state.carry, identity or {})


def open_model(
    name: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    weights: str = "last",
    step: int | None = None,
) -> FinishedRun:
    """A run, or else a model: a folder, an export, or OWNER/NAME of the hub."""
    sections = find(name)
    if sections is None:
        return open_run(name, overrides, weights=weights, step=step)
    return _opened(str(name), UNTRAINED | sections, overrides, weights, step)


def open_on_data(
    name: str | Path | None,
    data: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    weights: str = "last",
    step: int | None = None,
) -> FinishedRun:
    """The same, to be measured on held-out data: of a run its own, of a model what is named.

    That is a run or a recipe whose data it is, or a file, a folder or OWNER/NAME, as for training.
    """
    sections = find(name)
    if sections is None:
        if data is not None:
            raise UserError(
                f"{name} is a run, which is measured on its own data, and --data is {data}; "
                "data.source.path=FILE overrides its own"
            )
        return open_run(name, overrides, weights=weights, step=step)
    if data is not None:
        sections = sections | {"data": _data(sections["model"], str(data))}
    elif not any(key.startswith("data.") for key in flat(config.load({}, overrides).command_line)):
        raise UserError(
            f"{name} is a model, which has no held-out data of its own; --data names it: a run or "
            "a recipe whose data it is, a file, a folder, or OWNER/NAME on the hub"
        )
    return _opened(str(name), UNTRAINED | sections, overrides, weights, step)


def find(name: str | Path | None) -> dict[str, Any] | None:
    """The sections of a recipe that name a published model; None where it is a run."""
    try:
        runs.find(name)
    except UserError:
        sections = None if name is None else _sections(str(name))
        if sections is None:
            raise
        return sections
    return None


def _sections(name: str) -> dict[str, Any] | None:
    folder = Path(name).expanduser()
    if (folder / configs.FILE).is_file():
        return {"model": {"path": name}}
    if (folder / peft.CONFIG).is_file():
        return _adapter(name, peft.read(folder).base or "")
    # What lies in a folder that is here is a path, misspelt.
    is_path = folder.exists() or folder.parent.is_dir()
    return {"model": {"hub": name}} if tuning.A_NAME.fullmatch(name) and not is_path else None


def _adapter(name: str, base: str) -> dict[str, Any]:
    """An adapter on the model that it was made for, with the tokenizer that came with it."""
    if Path(base).expanduser().is_dir():
        model = {"path": base}
    elif tuning.A_NAME.fullmatch(base):
        model = {"hub": base}
    else:
        raise UserError(
            f"{name} is an adapter, and the model that it was made for is {base or 'not named'}; "
            "`windlass export RUN --as merged` writes a whole model"
        )
    sections = {"model": model, "adapter": {"path": name}}
    if (Path(name).expanduser() / hugging_face.TOKENIZER).is_file():
        sections["tokenizer"] = {"kind": "file", "path": name}
    return sections


def _data(model: dict[str, str], data: str) -> dict[str, Any]:
    """The section of data that is a run's, a recipe's, or chosen for a model and files."""
    recipe = _recipe(data)
    if recipe is None:
        (name,) = model.values()
        recipe = config.load(tuning.chosen(name, data, ["adapter=null"])).merged(None)
    objective = recipe.get("objective") or {}
    kind = objective.get("kind") if isinstance(objective, dict) else objective
    if kind not in (None, "next_token"):
        raise UserError(
            f"--data is {data}, which trains by {kind}, and a model has no loss of that kind; "
            f"`windlass evaluate {data} --step 0` measures where the run began"
        )
    return recipe["data"]


def _recipe(data: str) -> dict[str, Any] | None:
    """The recipe of a run, or a recipe; None where it is neither."""
    if Path(data).suffix in (".yaml", ".yml") or data in config.shipped():
        return config.load(data).merged(None)
    try:
        return folders.stored(runs.find(data))
    except UserError:
        return None


def _opened(
    name: str, recipe: dict[str, Any], overrides: Sequence[str], weights: str, step: int | None
) -> PublishedModel:
    if weights != "last" or step is not None:
        which = f"step {step}" if step is not None else f"{weights} weights"
        raise UserError(f"{name} is a model, which has no {which}: those are of a run")
    try:
        return PublishedModel(name, describe(recipe, overrides, is_trained=False))
    except UserError as refused:
        if "hub" not in recipe["model"]:
            raise
        raise UserError(f"{name} is no run or folder here, and {refused}") from None
