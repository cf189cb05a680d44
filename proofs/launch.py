"""What `windlass launch --dry-run` prints is what SkyPilot, JobSet and a shell accept.

SkyPilot takes a minute to install, so it has an environment of its own, made here and thrown away.
shellcheck must be on PATH.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jsonschema
import yaml

from windlass.devices import slices
from windlass.launch import TARGETS, find
from windlass.launch.preparing import prepare
from windlass.launch.tpu_vm import setup

TESTS = Path(__file__).parents[1] / "tests" / "launch"
NAMES = ("v5e-8", "v6e-1", "v6e-8", "v5p-8", "2xv6e-16")
UNKNOWN = "tpu-v6e-7"

# Run by the environment that has SkyPilot: what its parser makes of each file.
PARSER = """\
import json, sys, sky
found = {}
for file in sys.argv[1:]:
    try:
        task = sky.Task.from_yaml(file)
        (accelerator,) = {name for one in task.resources for name in one.accelerators}
        zones = sorted(one.zone for one in task.resources)
        runtimes = {one.accelerator_args["runtime_version"] for one in task.resources}
        found[file] = [accelerator, task.num_nodes, zones, sorted(runtimes)]
    except ValueError as error:
        found[file] = f"{type(error).__name__}: {error}"
print(json.dumps({"version": sky.__version__, "found": found}))
"""


def prove() -> dict:
    if shutil.which("shellcheck") is None:
        return {"holds": False, "why": "shellcheck is not on PATH"}
    with tempfile.TemporaryDirectory() as place:
        return _prove(Path(place))


def _prove(place: Path) -> dict:
    launches = {
        f"{name}{' spot' if spot else ''}": prepare(
            "quickstart", ["train.batch=64"], on=name, spot=spot, bucket="gs://mine/runs"
        )
        for name in NAMES
        for spot in (True, False)
    }
    files = {}
    for name, launch in launches.items():
        for target in TARGETS:
            file = place / f"{name.replace(' ', '-')}-{target}{find(target).SUFFIX}"
            file.write_text(find(target).write(launch))
            files[name, target] = file
        (place / f"{name.replace(' ', '-')}-setup.sh").write_text(f"#!/bin/bash\n{setup(launch)}\n")
    began = time.time()
    parsed = _parsed(place, [files[name, "skypilot"] for name in launches])
    seconds = round(time.time() - began, 1)
    tasks = {}
    for name, launch in launches.items():
        one = launch.slices.each
        wanted = [
            f"tpu-{one.accelerator_type}", launch.slices.count, sorted(one.zones), [one.runtime]
        ]  # fmt: skip
        found = parsed["found"][str(files[name, "skypilot"])]
        tasks[name] = found if found != wanted else "accepted"
    schema = yaml.safe_load((TESTS / "jobset.schema.yaml").read_text())
    manifests = {}
    for name in launches:
        job_set = list(yaml.safe_load_all(files[name, "gke"].read_text()))[1]
        problems = [
            each.message for each in jsonschema.Draft202012Validator(schema).iter_errors(job_set)
        ]
        manifests[name] = problems or "accepted"
    scripts = sorted(place.glob("*.sh"))
    checked = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
    unknown = _unknown(place, parsed)
    holds = (
        set(tasks.values()) == {"accepted"}
        and all(each == "accepted" for each in manifests.values())
        and checked.returncode == 0
        and unknown["parser"] == "accepts it"
        and unknown["catalogue"].startswith("there is no TPU slice")
    )
    return {
        "holds": holds,
        "skypilot": {"version": parsed["version"], "install_and_parse_seconds": seconds} | tasks,
        "jobset": manifests,
        "shellcheck": f"{len(scripts)} scripts: {checked.stdout or 'nothing found'}",
        UNKNOWN: unknown,
    }


def _parsed(place: Path, files: list[Path]) -> dict:
    """What SkyPilot's parser says, and of a slice that does not exist too."""
    wrong = place / "unknown.yaml"
    text = (
        files[0]
        .read_text()
        .replace(yaml.safe_load(files[0].read_text())["resources"]["accelerators"], UNKNOWN)
    )
    wrong.write_text(text)
    python = place / "sky" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", place / "sky"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-qq", "skypilot"], check=True)
    asked = [python, "-c", PARSER, *files, wrong]
    environment = {"HOME": str(place), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(asked, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _unknown(place: Path, parsed: dict) -> dict[str, str]:
    found = parsed["found"][str(place / "unknown.yaml")]
    try:
        slices.find(UNKNOWN)
        catalogue = "accepts it"
    except slices.UserError as error:
        catalogue = str(error)
    return {
        "parser": "accepts it" if found[0] == UNKNOWN else str(found),
        "catalogue": catalogue,
    }
