"""SkyPilot: a task in YAML, as a managed job on spot machines, which recovers, or on a cluster."""

import os
from typing import Any

from windlass.config import listing
from windlass.devices.slices import region_of
from windlass.errors import UserError
from windlass.launch import shell
from windlass.launch.description import MOUNT, Launch, Rented
from windlass.launch.gpus import JOINED, GpuHosts
from windlass.launch.text import as_yaml

PROGRAM = "sky"
HOW = "pip install 'windlass-lm[cloud]', then `sky check gcp`"
SUFFIX = ".yaml"
RESTARTS = 3  # when the training itself fails; after a preemption there is no limit

# SkyPilot joins the hosts of a slice, but not the slices: what libtpu needs to know of the others.
# Its list of hosts begins with the first of one slice; the others of that slice may come later, but
# those of every other slice are together, so that the place of its first says which it is.
_SLICES = """\
about=worker-network-endpoints
first=$(curl -sSf -H 'Metadata-Flavor: Google' \\
  "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$about" |
  cut -d , -f 1)
first=$(getent ahostsv4 "${{first##*:}}" | awk 'NR == 1 {{ print $1 }}')
place=$(grep -nxF -- "$first" <<< "$SKYPILOT_NODE_IPS" | cut -d : -f 1)
export MEGASCALE_NUM_SLICES={count}
export MEGASCALE_SLICE_ID=$((place == 1 ? 0 : 1 + (place - 2) / {hosts}))
MEGASCALE_COORDINATOR_ADDRESS=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")
export MEGASCALE_COORDINATOR_ADDRESS"""


def check(launch: Launch) -> None:
    if launch.slices.each.accelerator_type is None:
        raise UserError(
            f"SkyPilot has no {launch.slices.name}, which is rented through GKE: --to gke"
        )
    if launch.is_spot and launch.is_kept:
        raise UserError(
            "--keep is given, and a managed job, which --spot makes, always deletes its machines; "
            "leave one of them out"
        )


def obstacle(launch: Launch) -> str | None:
    # Seen in 0.14.1: what does not end in -8 counts as several hosts, and a job that takes N slices
    # requests N times the hosts of all of them.
    kind = launch.slices.each.accelerator_type or ""
    is_gpu = isinstance(launch.slices, GpuHosts)
    if launch.slices.count == 1 or kind.endswith("-8") or is_gpu:
        return None
    also = ", as does --to gke" if launch.slices.each.hosts > 1 else ""
    return (
        f"SkyPilot counts the hosts of {launch.slices.name} once for every slice, and would wait "
        f"for more of them than there are while these cost; --to tpu-vm rents them{also}"
    )


def write(launch: Launch) -> str:
    return as_yaml(task(launch), f"sky {'jobs ' if launch.is_spot else ''}launch")


def task(launch: Launch) -> dict[str, Any]:
    """The task as plain data."""
    one = launch.slices.each
    is_gpu = isinstance(launch.slices, GpuHosts)
    infra = [f"gcp/{region_of(zone)}/{zone}" for zone in launch.zones]
    resources: dict[str, Any] = {
        "accelerators": f"tpu-{one.accelerator_type}",
        # SkyPilot's own choice for v5e is the image of v5p.
        "accelerator_args": {"runtime_version": one.runtime},
        "use_spot": launch.is_spot,
    }
    if is_gpu:
        infra = [*launch.zones]
        resources = {"accelerators": one.accelerator_type, "use_spot": launch.is_spot}
    if launch.is_spot:
        recovery = {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": RESTARTS}
        resources["job_recovery"] = recovery
    if len(infra) == 1:
        resources["infra"] = infra[0]
    elif infra:
        resources["any_of"] = [{"infra": each} for each in infra]
    document: dict[str, Any] = {
        "name": launch.name,
        "num_nodes": launch.slices.count,
        "resources": resources,
    }
    if launch.bucket is not None:
        source = f"gs://{launch.bucket.name}"
        document["file_mounts"] = {MOUNT: {"source": source, "mode": "MOUNT"}}
    # SkyPilot's shell is interactive, and to it an exclamation mark means something.
    strict = ["set +H", "set -eo pipefail"]
    setup = [shell.install(launch), shell.write_file(launch.file, launch.recipe.text)]
    document["setup"] = "\n".join([*strict, *setup, ""])
    run = [shell.train(launch)]
    if launch.slices.count > 1:
        joined = _SLICES.format(count=launch.slices.count, hosts=one.hosts)
        run.insert(0, JOINED if is_gpu else joined)
    document["run"] = "\n".join([*strict, *run, ""])
    return document


def does(launch: Launch) -> list[str]:
    place = f"in {listing(launch.zones)}" if launch.zones else "on the cheapest cloud that has it"
    what = f"{launch.slices.name} {place}"
    if launch.is_spot:
        return [
            f"a managed job {launch.name}: spot {what}, and a small machine that watches over it",
            "after a preemption SkyPilot rents again and runs the same command, which goes on",
            "deletes the machines when the training has ended",
        ]
    after = "stays when the training has ended, and costs until --delete"
    if not launch.is_kept:
        after = "is deleted when the training has ended"
    return [f"a cluster {launch.name}: {what}", f"it {after}"]


def where() -> None:
    return None  # SkyPilot keeps track of where each of its clusters and jobs is


def clear(before: Rented) -> list[list[str]]:
    # Two at a time would write to the same run.
    return stop(before) if before.is_spot else []


def start(launch: Launch, rented: Rented) -> list[list[str]]:
    # The value of a secret is taken from the environment, and is in no file and on no command line.
    secret = ["--secret", "HF_TOKEN"] if launch.needs_hub and "HF_TOKEN" in os.environ else []
    how = ["--yes", "--detach-run", *secret, str(rented.file)]
    if launch.is_spot:
        return [["sky", "jobs", "launch", "--name", rented.job, *how]]
    down = [] if launch.is_kept else ["--down"]
    return [["sky", "launch", "--cluster", rented.name, *down, *how]]


def status(rented: Rented) -> list[list[str]]:
    if rented.is_spot:
        return [["sky", "jobs", "queue"]]
    return [["sky", "status", rented.name], ["sky", "queue", rented.name]]


def stop(rented: Rented) -> list[list[str]]:
    if rented.is_spot:
        return [["sky", "jobs", "cancel", "--name", rented.job, "--yes"]]
    return [["sky", "cancel", rented.name, "--all", "--yes"]]


def delete(rented: Rented) -> list[list[str]]:
    return stop(rented) if rented.is_spot else [["sky", "down", rented.name, "--yes"]]
