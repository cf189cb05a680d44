"""Reading a recipe, with what it starts from, for the devices that are here."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import jax

from windlass.config import AnyRecipe, Layers
from windlass.devices import selection
from windlass.devices.selection import Device, DeviceChoice
from windlass.errors import UserError
from windlass.program.described import Described, read_for
from windlass.run import Run
from windlass.starting import origin


def describe(
    recipe: AnyRecipe,
    overrides: Sequence[str] = (),
    *,
    is_trained: bool = True,
    doing: Callable[[str], AbstractContextManager] = nullcontext,
) -> Described:
    """Read a recipe, choose the devices, and check that one goes with the other.

    Of a run that is not trained here, the batch size is not checked. `doing` is told what goes on:
    a model of the hub is looked up, and an accelerator may take minutes to start.
    """
    with doing("reading the recipe"):
        layers = origin.load(recipe, overrides)
    with doing("starting the devices"):
        chosen = choose_devices(layers)
    return read_for(layers, chosen, selection.devices(chosen), is_trained=is_trained)


def choose_devices(layers: Layers) -> DeviceChoice:
    """The devices of this machine that a recipe requests."""
    requested = layers.peek("device", Device) or Device()
    if requested.kind == "cpu":
        # An accelerator that is not requested is not taken from whoever else may use it.
        jax.config.update("jax_platforms", "cpu")
    try:
        return selection.choose_here(requested)
    except UserError:
        layers.read(Run, None)  # what is wrong with the keys comes first, and all at once
        raise
