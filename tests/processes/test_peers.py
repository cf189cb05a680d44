"""Two real processes of one run: what one of them meets, both end with."""

import copy
import json
import re
import shutil
import signal
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace

import pytest
import yaml

from tests.flags import with_devices
from tests.spawn import LONGEST, REPOSITORY, processes
from tests.strangers import HERE
from tests.training.campaign import RECIPE, Ended, Program, weights
from windlass.checkpoint.store import folder_of, steps_in
from windlass.devices.selection import THREADS_OF_XLA
from windlass.errors import UserError
from windlass.processes.peers import check_devices

# A schedule that does not end with the run: when it is stopped changes nothing before.
KEYS = ["train.evaluate_every=null", "checkpoint.every=4", "optim.schedule.shape=constant"]


@pytest.fixture
def start(tmp_path):
    """Start two processes of a run in a folder of this test."""
    recipe = copy.deepcopy(RECIPE)
    recipe["data"]["validation"] = 0
    recipe["train"]["accumulation"] = 1  # a shorter program
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))

    def begin(run: str, **given):
        words = ["tiny.yaml", f"run.dir={tmp_path / run}", *KEYS]
        return processes(tmp_path, words, devices=1, **given)

    return begin


def numbers(run: Path) -> list[dict]:
    """What a run recorded of its steps, but for how long they took."""
    names = ("step", "loss", "gradient_norm", "learning_rate", "tokens", "token_hash")
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: record[name] for name in names if name in record} for record in records]


@pytest.mark.long
def test_a_run_that_lost_a_process_and_then_was_stopped_has_the_same_bits(
    start, tmp_path, monkeypatch
):
    # A process of two simulated devices has more threads than one of one, and so other matmuls.
    monkeypatch.setenv(THREADS_OF_XLA, "8")
    disturbed = tmp_path / "disturbed"
    with start("disturbed") as first:
        first.until(" 9/60")  # the save of step 8 begins when that of step 4 has ended
        first.lose(0)  # noticed by its closed connections; how the other's silence is, is proved
        survivor = first.wait(1, LONGEST)
    newest = steps_in(folder_of(disturbed))[-1]
    assert survivor.code == 1 and newest >= 4
    assert survivor.output.partition(". What JAX said is in ")[0] == (
        f"process 1 of 2: process 0 ({gethostname()}) is gone: its connection is closed. "
        f"Nothing up to step {newest}, the newest checkpoint in {disturbed}, is lost: the "
        "same command on every host goes on from there"
    )

    with start("disturbed") as second:
        second.until("step 12/60")
        second.started[1].send_signal(signal.SIGTERM)
        told, hears = second.finish()
    assert told.code == hears.code == 128 + signal.SIGTERM
    assert hears.output == (
        "process 1 of 2: SIGTERM: finishing this step, then saving; Ctrl-C again stops at once\n"
    )
    assert f"resuming from step {newest} of 60" in told.output
    (saved,) = [line.split() for line in told.output.splitlines() if line.startswith("stopped")]
    stopped = int(saved[3])
    assert steps_in(folder_of(disturbed))[-1] == stopped

    # Of two addends the sum is the same in any order, within a process or between two.
    recipe = yaml.safe_load((tmp_path / "tiny.yaml").read_text())
    whole = Program(tmp_path / "whole", recipe, flags=with_devices(2))
    assert whole.finish(*KEYS, f"train.steps={stopped}").code == 0
    assert weights(disturbed) == weights(whole.run_dir)
    assert numbers(disturbed) == numbers(whole.run_dir)


@pytest.mark.long
def test_a_second_start_takes_the_same_steps(tmp_path, monkeypatch):
    # Two loops, each with collectives that others need not wait for. Of a program that XLA has read
    # from the compilation cache those took each other's numbers, once threads were there to do so.
    monkeypatch.setenv(THREADS_OF_XLA, "8")
    recipe = yaml.safe_load((HERE / "recipes/recursive_text.yaml").read_text())
    recipe["train"] = {"batch": 8, "steps": 5, "accumulation": 2}
    (tmp_path / "text.yaml").write_text(yaml.safe_dump(recipe))
    for run in ("first", "second", "third"):
        with processes(tmp_path, ["text.yaml", f"run.dir={tmp_path / run}"], devices=1) as both:
            assert [ended.code for ended in both.finish()] == [0, 0]
        compiled = (tmp_path / run / "compile.jsonl").read_text().splitlines()
        assert compiled and not any(json.loads(line)["cached"] for line in compiled)
    first, *others = (numbers(tmp_path / run) for run in ("first", "second", "third"))
    assert first and all(other == first for other in others)


def test_devices_that_leave_a_process_without_any_are_refused():
    devices = [SimpleNamespace(process_index=number // 4) for number in range(12)]
    check_devices(3, devices)
    with pytest.raises(UserError) as refused:
        check_devices(3, devices[:4])
    assert str(refused.value) == (
        "device.count is 4, which leaves process 1 and process 2 without a device; leave it out, "
        "or start fewer processes"
    )


@pytest.mark.long
def test_processes_with_different_recipes_are_refused_on_every_host(start):
    with start("run", each={1: ["optim.learning_rate=0.002"]}) as different:
        ended = different.finish()
    message = (
        "process 1 has optim.learning_rate 0.002, process 0 has 0.003; start every host with the "
        "same recipe and the same keys\n"
    )
    assert ended == [Ended(2, message), Ended(2, f"process 1 of 2: {message}")]


@pytest.mark.long
def test_processes_of_one_version_with_different_source_are_refused_on_every_host(start, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(REPOSITORY / "windlass", other / "windlass")
    file = other / "windlass" / "version.py"
    file.write_text(file.read_text() + "# another line\n")
    path = {1: {"PYTHONPATH": str(other)}}
    with start("run", environ_of=path) as different:
        ended = different.finish()
    assert [one.code for one in ended] == [2, 2]
    assert re.fullmatch(
        r'process 1 has windlass.source "\w+", process 0 has "\w+"; start every host with the same '
        r"versions of windlass and JAX, to the last line of their source\n",
        ended[0].output,
    )


@pytest.mark.long
def test_what_one_process_refuses_ends_the_others_with_its_words(start):
    with start("run", each={1: ["train.stebs=9"]}) as refused:
        ended = refused.finish()
    what = (
        "1 problem in tiny.yaml and the command line:\n"
        "  train.stebs  unknown; did you mean steps?\n"
    )
    assert ended == [
        Ended(2, f"process 1 ({gethostname()}) ended the run: {what}"),
        Ended(2, f"process 1 of 2: {what}"),
    ]
