"""The programs that rent and delete machines, run as a user would run them."""

import shutil
import subprocess
from collections.abc import Sequence

from windlass.errors import UserError
from windlass.launch import Command, Launcher, find, installing, records, uploading
from windlass.launch.description import Launch
from windlass.launch.records import Record


def obstacle(launch: Launch, how: Launcher) -> str | None:
    """Reason that nothing is rented, although the file can be written."""
    return how.obstacle(launch) or installing.obstacle(launch)


def check(how: Launcher) -> None:
    """Refuse where the program that a target needs is not here."""
    if shutil.which(how.PROGRAM) is None:
        raise UserError(
            f"{how.PROGRAM} is not on this machine, and rents there ({how.HOW}); --dry-run needs "
            "nothing, and prints the file"
        )


def start(launch: Launch, target: str) -> int:
    """Rent the machines and train, or resume; returns the exit code of the program."""
    how = find(target)
    how.check(launch)
    if why := obstacle(launch, how):
        raise UserError(why)
    check(how)
    uploading.check(launch)
    before, record = records.every().get(launch.name), records.describe(launch, target)
    records.check(record, before)
    uploading.send(launch)
    if before is not None and (code := _run(how.clear(before.rented))):
        return code
    records.keep(record, how.write(launch))
    return _run(how.start(launch, record.rented))


def status(record: Record) -> int:
    """Show the status of a launch."""
    check(record.how)
    return _run(record.how.status(record.rented))


def stop(record: Record) -> int:
    """Stop the training; the same launch resumes it later."""
    check(record.how)
    return _run(record.how.stop(record.rented))


def delete(record: Record) -> int:
    """Delete the machines, and then the record of them; what is in the bucket stays."""
    check(record.how)
    code = _run(record.how.delete(record.rented))
    if code == 0:
        records.forget(record)
    return code


def _run(commands: Sequence[Command]) -> int:
    """Run each in turn, until one fails; returns its exit code."""
    for command in commands:
        code = subprocess.run(command).returncode
        if code:
            return code
    return 0
