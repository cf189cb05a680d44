"""What a program that rents machines knows already."""

import subprocess

from windlass.errors import UserError


def asked(command: list[str], why: str, how: str) -> str:
    """The one line that a program answers; a refusal where it has none."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    said = done.stdout.strip()
    if done.returncode or not said:
        raise UserError(f"{command[0]} {why}: {how}")
    return said
