"""Calls that rent machines, and list them."""

from typing import Any

from windlass.api.keywords import sections
from windlass.config import AnyRecipe, Overrides, words
from windlass.errors import UserError
from windlass.launch import find as find_target
from windlass.launch import preparing, records, running
from windlass.launch.records import Record


def launch(
    recipe: AnyRecipe,
    overrides: Overrides = (),
    *,
    on: str,
    to: str = "skypilot",
    dry_run: bool = False,
    **how: Any,
) -> str:
    """Rent a slice and train a recipe there, without confirmation; returns the file for it.

    `how` is the rest of what the command takes: `spot`, `region` or `zone`, `bucket`, `name`,
    `install` and `keep`, and sections to override. With `dry_run` nothing is rented.
    """
    target, (keys, rest) = find_target(to), sections(how)
    prepared = preparing.prepare(recipe, words(overrides, keys), on=on, **rest)
    target.check(prepared)
    if not dry_run and (code := running.start(prepared, to)):
        raise UserError(
            f"{target.PROGRAM} ended with {code}; `windlass launch --delete {prepared.name}` "
            "deletes what there is"
        )
    return target.write(prepared)


def launches() -> dict[str, Record]:
    """Records of launches that were not deleted, by name."""
    return records.every()
