"""Runs on machines that are rented for them: files and commands for three ways to rent them."""

from importlib import import_module
from typing import Protocol, cast, runtime_checkable

from windlass.config.reading import offer
from windlass.errors import UserError
from windlass.launch.description import Launch, Rented

TARGETS = {"skypilot": "skypilot", "gke": "gke", "tpu-vm": "tpu_vm"}  # by the name of their file

Command = list[str]


@runtime_checkable
class Target(Protocol):
    """One way to rent machines: the file that says what to rent, and commands that follow it."""

    PROGRAM: str  # that the commands need
    HOW: str  # to get that program
    SUFFIX: str  # of the file

    def check(self, launch: Launch) -> None:
        """Refuse what cannot be had this way."""
        ...

    def obstacle(self, launch: Launch) -> str | None:
        """Why the file is right, and yet is not to be run."""
        ...

    def write(self, launch: Launch) -> str:
        """The file."""
        ...

    def does(self, launch: Launch) -> list[str]:
        """What is created, what happens to it, and what is left, a line each."""
        ...

    def where(self) -> str | None:
        """Which project or cluster the program speaks to now, where it can be told another."""
        ...

    def clear(self, before: Rented) -> list[Command]:
        """What must end before the same launch begins again."""
        ...

    def start(self, launch: Launch, rented: Rented) -> list[Command]:
        """What creates the machines and begins, or goes on where it was launched before."""
        ...

    def status(self, rented: Rented) -> list[Command]:
        """What shows how it stands."""
        ...

    def stop(self, rented: Rented) -> list[Command]:
        """What ends the training, so that the same launch goes on later."""
        ...

    def delete(self, rented: Rented) -> list[Command]:
        """What deletes the machines."""
        ...


def find(name: str) -> Target:
    """The target of a name."""
    if name not in TARGETS:
        raise UserError(f'there is no target "{name}"; {offer(name, list(TARGETS))}')
    return cast(Target, import_module(f"windlass.launch.{TARGETS[name]}"))
