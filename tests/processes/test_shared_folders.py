"""What two hosts have in common, as each of two real processes finds out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spawn import free_port
from windlass.data import vocabulary as vocabularies
from windlass.processes.shared_folders import PROBE


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What each process found, and where its own folder is."""
    folder, port = tmp_path_factory.mktemp("hosts"), str(free_port())
    script = Path(__file__).with_name("two_hosts.py")
    started = []
    left = folder / "common" / f"{PROBE}of-a-process-that-was-killed"
    left.parent.mkdir()
    left.touch()
    os.utime(left, (0, 0))
    for index in range(2):
        own = folder / f"own-{index}"
        own.mkdir()
        words = [sys.executable, str(script), port, str(index), str(folder / "common"), str(own)]
        environ = os.environ | {"XLA_FLAGS": ""}  # a device for each
        process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)
        started.append((own, process))
    told = []
    for own, process in started:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        told.append({"own": own, **json.loads(output.splitlines()[-1])})
    return told


def test_every_process_is_told_which_of_them_see_a_folder_and_nothing_is_left_in_it(found):
    assert all(one["seen"] == [[True, True], [True, False]] for one in found)
    assert all(one["probes"] == [] for one in found)


def test_what_is_kept_in_a_folder_is_made_by_the_first_and_by_those_with_another_folder(found):
    assert [one["once"] for one in found] == [["made", "made"], ["found", "made"]]


def test_a_run_in_a_folder_that_is_not_shared_is_refused_on_every_process(found):
    for one in found:
        assert one["run"] == (
            f"process 1 of 2 does not see {one['own']}, where process 0 stores the run and each "
            "its own part of every checkpoint; run.dir must name a folder that all hosts share"
        )


def test_hosts_with_different_data_are_refused_on_every_process(found):
    first, second = (one["prepared"] for one in found)
    byte = vocabularies.byte().fingerprint[:12]
    for one in found:
        assert one["data"] == (
            f"hosts have different data: process 0 has documents {first}, tokenizer {byte}, and "
            f"process 1 has documents {second}, tokenizer {byte}; data.source and tokenizer must "
            "give every host the same"
        )


def test_minutes_are_those_of_the_first_process_and_over_at_the_same_steps(found):
    # Its clock is looked at every tenth step, and goes on by 25 seconds at each look.
    assert [one["due"] for one in found] == [[30, 60], [30, 60]]


def test_each_process_reads_the_rows_of_a_step_that_its_devices_hold_and_no_others(found):
    first, second = (one["rows"] for one in found)
    assert first["step"] == second["step"] == first["own"] + second["own"]
    assert len(first["own"]) == len(second["own"]) == 4
    assert first["is_right"] and second["is_right"]
