"""Google Kubernetes Engine: a JobSet, one job a slice and one pod a host, and its recipe."""

import json
import shlex
from typing import Any

from windlass.devices.slices import region_of
from windlass.errors import UserError
from windlass.launch import gpus
from windlass.launch.asking import query
from windlass.launch.description import MOUNT, Launch, Rented
from windlass.launch.text import as_yaml

PROGRAM = "kubectl"
HOW = "https://cloud.google.com/kubernetes-engine/docs/how-to/cluster-access-for-kubectl"
SUFFIX = ".yaml"
IMAGE = "python:3.12"
RECIPE = "/recipe"
REFUSED = 2  # the exit code of windlass where the user has something to put right
# By whether the machines are spot machines. A JobSet cannot tell a preemption from a training that
# fails each time, on machines that cost each time.
RESTARTS = {True: 100, False: 10}
GRACE_SECONDS = 300  # between SIGTERM and the end, to finish a step and save
DAY_SECONDS = 86_400

# On TPU machines gcsfuse caches metadata for ever by default, and hosts look for files that others
# have just written. A checkpoint is committed by renaming its folder.
MOUNT_OPTIONS = (
    "implicit-dirs",
    "metadata-cache:ttl-secs:0",
    "metadata-cache:negative-ttl-secs:0",
    "file-system:kernel-list-cache-ttl-secs:0",
    "file-system:rename-dir-limit:200000",
)


def check(launch: Launch) -> None:
    gpus.refuse(launch)
    one = launch.slices.each
    if one.machine_type is None:
        raise UserError(f"GKE has no {one.name}; --to skypilot and --to tpu-vm rent it")
    if launch.slices.count > 1 and one.hosts == 1:
        raise UserError(
            f"GKE joins slices of several hosts, and {one.name} is one host; --to tpu-vm joins "
            "these, or take one larger slice"
        )
    if launch.bucket is None:
        raise UserError(
            "--to gke needs --bucket gs://NAME: of what a pod writes nothing is left when it ends"
        )
    if launch.is_kept:
        raise UserError("--keep is given, and on GKE the nodes are the cluster's: leave it out")


def obstacle(launch: Launch) -> None:
    return None


def write(launch: Launch) -> str:
    recipe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": launch.name},
        "data": {launch.file: launch.recipe.text},
    }
    return as_yaml(recipe, "kubectl apply") + "---\n" + as_yaml(job_set(launch), "kubectl apply")


def job_set(launch: Launch) -> dict[str, Any]:
    """The JobSet as plain data."""
    one = launch.slices.each
    metadata: dict[str, Any] = {"name": launch.name}
    if one.hosts > 1:
        # A slice is a node pool of its own, and the hosts of a job belong together.
        exclusive = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        metadata["annotations"] = {exclusive: "cloud.google.com/gke-nodepool"}
    rule = {
        "name": "refused",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    job = {
        "parallelism": one.hosts,
        "completions": one.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        # What the user has to put right is not tried again; everything else is.
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": "train",
                        "operator": "In",
                        "values": [REFUSED],
                    },
                }
            ]
        },
        "template": _pod(launch),
    }
    slices = {"name": "slice", "replicas": launch.slices.count, "template": {"spec": job}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {"maxRestarts": RESTARTS[launch.is_spot], "rules": [rule]},
            "ttlSecondsAfterFinished": DAY_SECONDS,
            "replicatedJobs": [slices],
        },
    }


def _pod(launch: Launch) -> dict[str, Any]:
    one, bucket = launch.slices.each, launch.bucket
    assert bucket is not None
    selector = {
        "cloud.google.com/gke-tpu-accelerator": one.label,
        "cloud.google.com/gke-tpu-topology": one.topology,
    }
    tolerations = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    if launch.is_spot:
        spot = "cloud.google.com/gke-spot"
        selector[spot] = "true"
        tolerations.append(
            {"key": spot, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        )
    if launch.is_narrowed and len(launch.zones) == 1:
        selector["topology.kubernetes.io/zone"] = launch.zones[0]
    elif launch.is_narrowed:
        selector["topology.kubernetes.io/region"] = region_of(launch.zones[0])
    train = shlex.join(launch.train)
    script = [
        "set -e",
        f"pip install --quiet --root-user-action=ignore {shlex.join(launch.packages)}",
        f"cd {RECIPE}",
        f"exec {train}",  # so that it is the one that gets the SIGTERM of a preemption
    ]
    container = {
        "name": "train",
        "image": IMAGE,
        # Kubernetes itself fills in $(NAME) here, and reads $$ as $.
        "command": ["bash", "-c", "\n".join([*script, ""]).replace("$", "$$")],
        # Tokens, where the user made this secret.
        "envFrom": [{"secretRef": {"name": "windlass", "optional": True}}],
        "resources": {
            "requests": {"google.com/tpu": one.chips_per_host},
            "limits": {"google.com/tpu": one.chips_per_host},
        },
        "volumeMounts": [
            {"name": "bucket", "mountPath": MOUNT},
            {"name": "recipe", "mountPath": RECIPE},
        ],
    }
    attributes = {"bucketName": bucket.name, "mountOptions": ",".join(MOUNT_OPTIONS)}
    fuse = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}
    return {
        "metadata": {
            "annotations": {
                "gke-gcsfuse/volumes": "true",
                # A checkpoint passes through here whole, on its way to the bucket.
                "gke-gcsfuse/ephemeral-storage-limit": "0",
                "gke-gcsfuse/memory-limit": "0",
            }
        },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "nodeSelector": selector,
            "tolerations": tolerations,
            "containers": [container],
            "volumes": [
                {"name": "bucket", "csi": fuse},
                {"name": "recipe", "configMap": {"name": launch.name}},
            ],
        },
    }


def does(launch: Launch) -> list[str]:
    one, count = launch.slices.each, launch.slices.count
    pools = "a node pool" if count == 1 else f"{count} node pools"
    spot = "spot " if launch.is_spot else ""
    return [
        f"a JobSet and a ConfigMap, both {launch.name}, in the current cluster of kubectl",
        f"it needs {pools} of {one.hosts} × {spot}{one.machine_type}, topology {one.topology}",
        f"begins again after a preemption or a failure, at most {RESTARTS[launch.is_spot]} times",
        "deletes itself a day after its end; the nodes go when the cluster scales down",
    ]


def where() -> str:
    return query(["kubectl", "config", "current-context"], "has no current cluster", HOW)


def clear(before: Rented) -> list[list[str]]:
    return []


def start(launch: Launch, rented: Rented) -> list[list[str]]:
    # One that has ended is not run again: its jobs cannot be changed. The pods of one that has not
    # are waited for, which save at their end: two at a time would write to the same run.
    deletion = ["delete", "jobset", rented.name, "--ignore-not-found", "--cascade=foreground"]
    return [_kubectl(rented, *deletion), _kubectl(rented, "apply", "--filename", str(rented.file))]


def status(rented: Rented) -> list[list[str]]:
    selector = f"jobset.sigs.k8s.io/jobset-name={rented.name}"
    return [
        _kubectl(rented, "get", "jobset", rented.name),
        _kubectl(rented, "get", "pods", "--selector", selector, "--output", "wide"),
    ]


def stop(rented: Rented) -> list[list[str]]:
    patch = json.dumps({"spec": {"suspend": True}})
    return [_kubectl(rented, "patch", "jobset", rented.name, "--type", "merge", "--patch", patch)]


def delete(rented: Rented) -> list[list[str]]:
    return [_kubectl(rented, "delete", "--ignore-not-found", "--filename", str(rented.file))]


def _kubectl(rented: Rented, *words: str) -> list[str]:
    assert rented.where is not None
    return ["kubectl", "--context", rented.where, *words]
