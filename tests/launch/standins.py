"""Stand-ins for programs that rent machines, which cannot be reached from a test."""

import atexit
import functools
import json
import os
import shutil
import tempfile
from pathlib import Path

# What a machine may have of its own, and no test may reach.
CLOUDS = ("gcloud", "gcsfuse", "gke-gcloud-auth-plugin", "gsutil", "kubectl", "sky", "uv")

# Notes its words as a line of JSON, and ends with the code it was told.
RECORDER = """\
#!/usr/bin/env python3
import json, os, sys
if "config" in sys.argv:
    print({where!r})
    sys.exit()
with open({log!r}, "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
sys.exit({code})
"""


def recorder(folder: Path, *names: str, code: int = 0, where: str = "here") -> Path:
    """A folder for PATH with programs that only note how they were called, and where they are."""
    folder.mkdir(exist_ok=True)
    for name in names:
        text = RECORDER.format(log=str(folder / "log"), code=code, where=where)
        executable(folder / name, text)
    return folder


def calls(folder: Path) -> list[list[str]]:
    """How the programs of a folder were called, in order."""
    log = folder / "log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def path(folder: Path, *, alone: bool = False) -> str:
    """PATH with a folder in front; `alone`: without what else a user may have installed."""
    return f"{folder}:{_without_clouds() if alone else os.environ['PATH']}"


@functools.cache
def _without_clouds() -> str:
    """A folder of links to the system's programs, but for those that rent machines.

    Debian's packages put kubectl and gcloud into /usr/bin, beside bash and grep.
    """
    folder = Path(tempfile.mkdtemp(prefix="windlass-path-"))
    atexit.register(shutil.rmtree, folder)
    for program in [*Path("/bin").iterdir(), *Path("/usr/bin").iterdir()]:
        link = folder / program.name
        if program.name not in CLOUDS and not link.is_symlink():
            link.symlink_to(program)
    return str(folder)


# A cloud in a folder: one queued resource with its state, and a home for each node.
GCLOUD = """\
#!/usr/bin/env bash
case "$*" in
  "config get-value project") echo here ;;
  *"tpu-vm ssh"*)
    grep -q ACTIVE "$CLOUD/state" || exit 255
    export HOME="$CLOUD/nodes/$5"
    mkdir -p "$HOME"
    for word; do [[ "$word" == --command=* ]] && exec bash -c "${word#--command=}"; done ;;
  *"queued-resources list"*) cat "$CLOUD/state" 2> /dev/null || true ;;
  *"queued-resources create"*)
    echo "$*" >> "$CLOUD/log"
    echo "${FOUND:-ACTIVE}" > "$CLOUD/state" ;;
  *"queued-resources delete"*)
    echo "$*" >> "$CLOUD/log"
    [[ "$(grep -c delete "$CLOUD/log")" -gt "${DEAF:-0}" ]] || exit 1
    # The processes of a machine end with it, but for one that deletes its own.
    for environ in $(grep -lszF "HOME=$CLOUD/nodes/" /proc/[0-9]*/environ); do
      process=${environ//[^0-9]/}
      [[ "$process" == $$ ]] || kill -KILL "$process" 2> /dev/null
    done
    rm -rf "$CLOUD/state" "$CLOUD/nodes" ;;
  *"queued-resources describe"*) echo "quota exceeded" ;;
esac
"""
# What a host has: uv installs the program that the test gives; a mounted bucket is closed to root.
UV = """\
#!/usr/bin/env bash
echo "$*" >> "$CLOUD/installed"
mkdir -p "$HOME/windlass/bin"
cp "$CLOUD/windlass" "$HOME/windlass/bin/windlass"
"""
HOST = {
    "gcloud": GCLOUD,
    "uv": UV,
    "mountpoint": '#!/bin/sh\n[ -e "$HOME/mounted" ]\n',
    "gcsfuse": '#!/bin/sh\n: > "$HOME/mounted"\n',
    "sudo": '#!/bin/sh\n[ ! -e "$HOME/mounted" ]\n',
}


def cloud(folder: Path, windlass: str) -> dict[str, str]:
    """The environment of a script on a cloud in a folder, whose hosts have this `windlass`."""
    (folder / "bin").mkdir(parents=True)
    for name, text in HOST.items():
        executable(folder / "bin" / name, text)
    executable(folder / "windlass", f"#!/usr/bin/env bash\n{windlass}")
    surroundings = {"CLOUD": str(folder), "POLL_SECONDS": "0.2", "USER": "me"}
    return {**surroundings, "PATH": path(folder / "bin", alone=True), "HOME": str(folder)}
