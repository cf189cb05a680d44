"""Queries of the programs that rent machines."""

import subprocess

from windlass.errors import UserError


def query(command: list[str], why: str, how: str) -> str:
    """One line of output of a command; a refusal where it has none."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    answer = done.stdout.strip()
    if done.returncode or not answer:
        raise UserError(f"{command[0]} {why}: {how}")
    return answer
