"""One check of a machine, and its outcome."""

from typing import Literal, NamedTuple


class Check(NamedTuple):
    """One thing that was looked at."""

    name: str
    state: Literal["well", "wrong", "absent"]  # absent: it is not there, and need not be
    found: str
    advice: str | None = None  # what to do, where something is wrong or absent

    @property
    def is_well(self) -> bool:
        return self.state != "wrong"


def well(name: str, found: str) -> Check:
    return Check(name, "well", found)


def wrong(name: str, found: str, advice: str) -> Check:
    return Check(name, "wrong", found, advice)


def absent(name: str, found: str, advice: str) -> Check:
    return Check(name, "absent", found, advice)
