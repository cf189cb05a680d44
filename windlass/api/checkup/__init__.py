"""Checkup of a machine: what is here, what is wrong, and what to do about it."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from windlass.api.checkup import access, machine
from windlass.api.checkup.check import Check
from windlass.api.checkup.smoke import RECIPE, smoke_test
from windlass.config import AnyRecipe, Overrides, credentials, words
from windlass.errors import UserError
from windlass.processes.signals import Signals


def doctor(
    *,
    expect: int | None = None,
    data: str | None = None,
    smoke: AnyRecipe | bool = False,
    overrides: Overrides = (),
    say: Callable[[Check], Any] | None = None,
    signals: Signals | None = None,
) -> list[Check]:
    """Checks of this machine: versions, devices, memory, disk, credentials, network, data path.

    `expect` is the number of devices that must be here, `data` a folder or a URL whose reading
    speed is measured. `smoke` is a recipe, or True for one that ships, of which a reduced model is
    trained, saved and resumed. `say` is called with each check when it is done.
    """
    if expect is not None and expect < 1:
        raise UserError(f"expect is {expect}; it must be 1 or more")
    if data is not None:
        credentials.refuse({"--data": data}, "the command line")
        access.check_there(data)
    checks, done = _checks(expect, data), []
    if smoke:
        recipe = RECIPE if smoke is True else smoke
        checks = chain(checks, smoke_test(recipe, words(overrides, {}), signals or Signals()))
    for check in checks:
        done.append(check)
        if say is not None:
            say(check)
    return done


def _checks(expect: int | None, data: str | None) -> Iterator[Check]:
    yield machine.versions()
    yield from machine.devices(expect)
    yield from machine.memory()
    yield from machine.disk()
    yield machine.compiled()
    yield from access.credentials()
    yield access.network()
    yield access.data_path(data)
