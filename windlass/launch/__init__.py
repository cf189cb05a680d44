"""Runs on machines that are rented for them: files and commands for three ways to rent them."""

from importlib import import_module
from typing import Protocol, cast, runtime_checkable

from windlass.config.reading import offer
from windlass.errors import UserError
from windlass.launch.description import Launch, Rented

TARGETS = {"skypilot": "skypilot", "gke": "gke", "tpu-vm": "tpu_vm"}  # by the name of their file

Command = list[str]


@runtime_checkable
class Launcher(Protocol):
    """Target: the file that says what to rent, and the commands that follow it."""

    PROGRAM: str  # that the commands need
    HOW: str  # to get that program
    SUFFIX: str  # of the file

    def check(self, launch: Launch) -> None:
        """Refuse what cannot be had this way."""
        ...

    def obstacle(self, launch: Launch) -> str | None:
        """Reason not to run the file although it is right; None: there is none."""
        ...

    def write(self, launch: Launch) -> str:
        """File contents: a task, a manifest or a script."""
        ...

    def does(self, launch: Launch) -> list[str]:
        """Effects in words, a line each: what is created, what happens to it, what is left."""
        ...

    def where(self) -> str | None:
        """Project or cluster that the program is set to; None where it keeps track itself."""
        ...

    def clear(self, before: Rented) -> list[Command]:
        """Commands that end an earlier launch before the same one begins again."""
        ...

    def start(self, launch: Launch, rented: Rented) -> list[Command]:
        """Commands that create the machines and train, or resume what was launched before."""
        ...

    def status(self, rented: Rented) -> list[Command]:
        """Commands that show the status."""
        ...

    def stop(self, rented: Rented) -> list[Command]:
        """Commands that stop the training, so that the same launch resumes it later."""
        ...

    def delete(self, rented: Rented) -> list[Command]:
        """Commands that delete the machines."""
        ...


def find(name: str) -> Launcher:
    """Target by name."""
    if name not in TARGETS:
        raise UserError(f'there is no target "{name}"; {offer(name, list(TARGETS))}')
    return cast(Launcher, import_module(f"windlass.launch.{TARGETS[name]}"))
