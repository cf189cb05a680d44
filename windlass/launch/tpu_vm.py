"""TPU VMs: a script around a queued resource, which recovers from preemption, and deletes."""

import shlex
from importlib import resources

from windlass.errors import UserError
from windlass.launch import gpus, shell
from windlass.launch.asking import query
from windlass.launch.description import Launch, Rented

PROGRAM = "gcloud"
HOW = "https://cloud.google.com/sdk/docs/install"
SUFFIX = ".sh"

_HEAD = """\
#!/usr/bin/env bash
# shellcheck disable=SC2016  # what hosts run is not for this shell to read
# Written by windlass launch.
#
#   bash {file}          requests {slices} in {zone}, trains, begins again after
#   {blank}          a preemption, and {after}
#   bash {file} status   its status, and the last lines of the run
#   bash {file} stop     has the training save and end, and {after}
#   bash {file} delete   deletes the machines
#
# The project is gcloud's own: `gcloud config set project`, or CLOUDSDK_CORE_PROJECT.
NAME={name}
ZONE={zone}
ACCELERATOR_TYPE={accelerator}
RUNTIME_VERSION={runtime}
NODES=({nodes})
REQUEST=({request})
KEEP={keep}
"""

# What is started in the background gets SIGTERM alone, and by its own number.
_RUN = """\
{train} &
echo "$!" > pid
code=0
wait "$!" || code=$?
echo "$code" > code
"""
# For when whoever runs the script is gone, and nobody looks at how the training ended.
_LEFT = """\
ended=$(stat --format=%i-%Y code)
for ((waited = 0; waited < ${{LEFT_SECONDS:-1800}}; waited++)); do
  sleep 1
  [[ "$(stat --format=%i-%Y code 2> /dev/null)" == "$ended" ]] || exit 0
done
echo "nobody came to delete these machines: they delete themselves"
gcloud compute tpus queued-resources delete {name} --zone={zone} --force --quiet --async
"""


def check(launch: Launch) -> None:
    gpus.refuse(launch)
    if launch.slices.each.accelerator_type is None:
        raise UserError(
            f"Cloud TPU does not rent {launch.slices.name} as a TPU VM; --to gke rents it"
        )


def obstacle(launch: Launch) -> None:
    return None


def write(launch: Launch) -> str:
    one, count, name = launch.slices.each, launch.slices.count, launch.name
    assert one.accelerator_type is not None and one.runtime is not None
    nodes = [name] if count == 1 else [f"{name}-{number}" for number in range(count)]
    request = [f"--node-id={name}"]
    if count > 1:
        request = [f"--node-count={count}", f"--node-prefix={name}"]
    file = f"{name}{SUFFIX}"
    head = _HEAD.format(
        file=file,
        blank=" " * len(f"bash {file}"),
        slices=launch.slices.name,
        after="keeps the machines" if launch.is_kept else "deletes the machines",
        name=shlex.quote(name),
        zone=shlex.quote(launch.zones[0]),
        accelerator=shlex.quote(one.accelerator_type),
        runtime=shlex.quote(one.runtime),
        nodes=shlex.join(nodes),
        request=shlex.join([*request, *(["--spot"] if launch.is_spot else [])]),
        keep="yes" if launch.is_kept else "no",
    )
    body = resources.files("windlass.launch").joinpath("tpu_vm.sh").read_text(encoding="utf-8")
    return head + body.replace("@SETUP@", shell.heredoc(setup(launch)))


def setup(launch: Launch) -> str:
    """Setup script of a host, before the training."""
    bucket = [] if launch.bucket is None else [shell.mount(launch)]
    run = _RUN.format(train=shell.train(launch))
    if not launch.is_kept:
        run += _LEFT.format(name=launch.name, zone=launch.zones[0])
    return "\n".join(
        [
            "set -euo pipefail",
            *bucket,
            shell.install(launch),
            shell.write_file(launch.file, launch.recipe.text),
            shell.write_file("run.sh", run),
        ]
    )


def does(launch: Launch) -> list[str]:
    spot = "spot " if launch.is_spot else ""
    after = "stay, and cost until --delete" if launch.is_kept else "are deleted"
    again = "after a preemption it requests again and runs the same command, which goes on"
    return [
        f"a queued resource {launch.name}: {spot}{launch.slices.name} in {launch.zones[0]}, "
        f"{launch.slices.each.runtime}",
        "the script waits for it, installs, trains on every host, and shows its output",
        *([] if launch.bucket is None else [again]),
        f"when the training has ended, or at Ctrl-C once it is saved, the machines {after}",
    ]


def where() -> str:
    how = "gcloud config set project PROJECT"
    return query(["gcloud", "config", "get-value", "project"], "has no project", how)


def clear(before: Rented) -> list[list[str]]:
    return []  # the script goes on with what there is


def start(launch: Launch, rented: Rented) -> list[list[str]]:
    return [_script(rented)]


def status(rented: Rented) -> list[list[str]]:
    return [_script(rented, "status")]


def stop(rented: Rented) -> list[list[str]]:
    return [_script(rented, "stop")]


def delete(rented: Rented) -> list[list[str]]:
    return [_script(rented, "delete")]


def _script(rented: Rented, *words: str) -> list[str]:
    return ["env", f"CLOUDSDK_CORE_PROJECT={rented.where}", "bash", str(rented.file), *words]
