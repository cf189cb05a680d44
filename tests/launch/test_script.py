"""The script of a queued resource, run whole, on a cloud that is a folder."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch import standins
from windlass.launch import find
from windlass.launch.preparing import prepare

TRAINS = 'echo "$*" >> "$CLOUD/trained"\n'
LATER = 60  # seconds after which something that is waited for does not come any more


def script(folder: Path, name: str = "v6e-1", **how) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "launch.sh"
    how = {"spot": True, "bucket": "gs://mine", "name": "mine", "install": "windlass-lm"} | how
    file.write_text(find("tpu-vm").write(prepare("quickstart", ["train.batch=64"], on=name, **how)))
    return file


def verbs(folder: Path) -> list[str]:
    """What was done to queued resources."""
    log = folder / "log"
    return [line.split()[3] for line in log.read_text().splitlines()] if log.exists() else []


def run(file: Path, windlass: str, *words: str, **environment: str) -> subprocess.CompletedProcess:
    surroundings = standins.cloud(file.parent / "cloud", windlass) | environment
    return subprocess.run(
        ["bash", file, *words], env=surroundings, capture_output=True, text=True, timeout=LATER
    )


def wait_for(file: Path) -> None:
    limit = time.monotonic() + LATER
    while not file.exists() and time.monotonic() < limit:
        time.sleep(0.1)


def trained(folder: Path) -> list[str]:
    return (folder / "trained").read_text().splitlines()


def test_a_preempted_run_goes_on_by_the_same_command_and_nothing_is_left(tmp_path):
    taken_away = (
        TRAINS + 'if [[ "$(wc -l < "$CLOUD/trained")" -le 2 ]]; then\n'
        '  sleep 1; echo SUSPENDED > "$CLOUD/state"; kill -9 $$\nfi\necho "all is well"\n'
    )
    done = run(script(tmp_path, "2xv6e-16"), taken_away)
    cloud = tmp_path / "cloud"
    assert done.returncode == 0, done.stderr
    assert verbs(cloud) == ["create", "delete", "create", "delete"]
    commands = trained(cloud)
    assert len(commands) == 4 and len(set(commands)) == 1  # two slices, twice
    assert commands[0] == (
        "train quickstart.yaml train.batch=64 run.dir=/bucket/mine data.cache=/bucket/cache"
    )
    assert "all is well" in done.stdout
    created = (cloud / "log").read_text().splitlines()[0]
    assert created == (
        "compute tpus queued-resources create mine --zone=us-central1-b "
        "--accelerator-type=v6e-16 --runtime-version=v2-alpha-tpuv6e --node-count=2 "
        "--node-prefix=mine --spot --quiet"
    )
    assert not (cloud / "state").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_have_it_saved_and_the_machines_deleted(number, tmp_path):
    saves = (
        f"trap 'touch \"$CLOUD/saved\"; exit 143' TERM\n{TRAINS}while true; do sleep 0.1; done\n"
    )
    file = script(tmp_path)
    environment = standins.cloud(tmp_path / "cloud", saves)
    # What shows the log is behind, and its connection still open when the machines are deleted.
    lags = '#!/usr/bin/env bash\n"$(type -ap tail | sed -n 2p)" "$@"\nsleep 3\n'
    standins.executable(tmp_path / "cloud" / "bin" / "tail", lags)
    # A shell cannot hear what whoever started the tests ignores, as nohup does. The pipe is read to
    # its end: until nobody holds it whom the script has started.
    with subprocess.Popen(
        ["env", f"--default-signal={number.name.removeprefix('SIG')}", "bash", file],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            wait_for(tmp_path / "cloud" / "trained")
            process.send_signal(number)
            _, said = process.communicate(timeout=LATER)
        finally:
            process.kill()  # where it heard nothing
    assert process.returncode == 128 + number
    assert (tmp_path / "cloud" / "saved").exists()
    assert verbs(tmp_path / "cloud") == ["create", "delete"], said
    assert not (tmp_path / "cloud" / "state").exists()


def test_a_refusal_is_not_tried_again_and_the_machines_are_deleted(tmp_path):
    done = run(script(tmp_path), TRAINS + "echo 'train.batch is 3'\nexit 2\n")
    assert done.returncode == 1
    assert "train.batch is 3" in done.stdout and "the training ended with 2" in done.stderr
    assert verbs(tmp_path / "cloud") == ["create", "delete"]
    assert len(trained(tmp_path / "cloud")) == 1


def test_a_failure_is_tried_again_on_the_same_machines(tmp_path):
    once = TRAINS + '[[ "$(wc -l < "$CLOUD/trained")" -gt 1 ]]\n'
    done = run(script(tmp_path, keep=True), once)
    assert done.returncode == 0, done.stderr
    assert len(trained(tmp_path / "cloud")) == 2
    assert verbs(tmp_path / "cloud") == ["create"]  # and kept, as was asked
    # What a training may be using is not installed again.
    assert len((tmp_path / "cloud" / "installed").read_text().splitlines()) == 2
    assert "mine is kept, and costs until" in done.stderr


def test_a_request_that_is_refused_ends_with_its_reason_and_is_deleted(tmp_path):
    done = run(script(tmp_path), TRAINS, FOUND="FAILED")
    assert done.returncode == 1
    assert "quota exceeded" in done.stderr
    assert verbs(tmp_path / "cloud") == ["create", "delete"]


def test_machines_that_are_deleted_elsewhere_are_not_rented_again(tmp_path):
    done = run(script(tmp_path), TRAINS + 'rm "$CLOUD/state"; kill -9 $$\n')
    assert done.returncode == 1
    assert done.stderr.endswith("it was deleted, and is not requested again\n")
    assert verbs(tmp_path / "cloud") == ["create"]


def test_a_deletion_is_tried_until_it_succeeds(tmp_path):
    done = run(script(tmp_path), TRAINS, DEAF="2")
    assert done.returncode == 0, done.stderr
    assert verbs(tmp_path / "cloud") == ["create", "delete", "delete", "delete"]


def test_what_is_stopped_from_elsewhere_is_saved_and_does_not_begin_again(tmp_path):
    traps = "trap 'touch \"$CLOUD/saved\"; exit 143' TERM\n"
    saves = f"{traps}{TRAINS}while true; do sleep 0.1; done\n"
    file, cloud = script(tmp_path, keep=True), tmp_path / "cloud"
    environment = standins.cloud(cloud, saves)
    with subprocess.Popen(
        ["bash", file], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_for(cloud / "trained")
        stopped = subprocess.run(
            ["bash", file, "stop"], env=environment, capture_output=True, text=True, timeout=LATER
        )
        _, said = process.communicate(timeout=LATER)
    assert (stopped.returncode, process.returncode) == (0, 0)
    assert "mine is kept, and costs until" in stopped.stderr
    assert "the training was stopped, and goes on when this is run again" in said
    assert (cloud / "saved").exists() and len(trained(cloud)) == 1
    # On the machines that were kept it goes on.
    standins.executable(
        cloud / "nodes" / "mine" / "windlass" / "bin" / "windlass", f"#!/bin/bash\n{TRAINS}"
    )
    again = subprocess.run(["bash", file], env=environment, capture_output=True, timeout=LATER)
    assert again.returncode == 0 and len(trained(cloud)) == 2
    assert verbs(cloud) == ["create"]


def test_machines_delete_themselves_when_nobody_comes_to_do_it(tmp_path):
    file, cloud = script(tmp_path), tmp_path / "cloud"
    environment = standins.cloud(cloud, TRAINS + "sleep 1\n") | {"LEFT_SECONDS": "1"}
    with subprocess.Popen(["bash", file], env=environment, start_new_session=True) as process:
        wait_for(cloud / "trained")
        process.kill()
    limit = time.monotonic() + LATER
    while (cloud / "state").exists() and time.monotonic() < limit:
        time.sleep(0.1)
    assert verbs(cloud) == ["create", "delete"]
    assert (
        (cloud / "log")
        .read_text()
        .endswith("delete mine --zone=us-central1-b --force --quiet --async\n")
    )


@pytest.mark.parametrize(
    ("verb", "code", "said"),
    [
        ("status", 0, "mine is absent"),
        ("delete", 0, ""),
        ("destroy", 2, "destroy is none of run, status, stop and delete"),
    ],
)
def test_what_is_not_there_is_neither_shown_nor_deleted(verb, code, said, tmp_path):
    done = run(script(tmp_path), TRAINS, verb)
    assert (done.returncode, (done.stdout + done.stderr).strip()) == (code, said)
    assert verbs(tmp_path / "cloud") == []
