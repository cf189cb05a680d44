"""Two real processes of one run: what one of them meets, both end with."""

import copy
import json
import signal
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace

import pytest
import yaml

from tests.processes import LONGEST, processes
from tests.training.campaign import RECIPE, Ended, weights
from windlass.checkpoint.store import folder_of, steps_in
from windlass.errors import UserError
from windlass.training.loop import train
from windlass.training.peers import check_devices
from windlass.training.signals import Signals


@pytest.fixture
def start(tmp_path):
    """Start two processes of a run in a folder of this test."""
    recipe = copy.deepcopy(RECIPE)
    recipe["data"]["validation"] = 0
    recipe["train"]["accumulation"] = 1  # a shorter program
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))

    def begin(run: str, **given):
        words = ["tiny.yaml", f"run.dir={tmp_path / run}", "train.evaluate_every=null"]
        return processes(tmp_path, words, devices=1, **given)

    return begin


def numbers(run: Path) -> list[dict]:
    """What a run recorded of its steps, but for how long they took."""
    names = ("step", "loss", "gradient_norm", "learning_rate", "tokens", "stream")
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: record[name] for name in names} for record in records]


def test_a_run_that_was_stopped_and_lost_a_process_ends_with_the_same_bits(start, tmp_path):
    # Of one process with as many devices: a sum of two has the same bits whoever adds them.
    words = [f"run.dir={tmp_path / 'whole'}", "train.evaluate_every=null", "device.count=2"]
    assert train(tmp_path / "tiny.yaml", words, signals=Signals()).is_finished

    with start("disturbed") as first:
        first.until("step 10/60")
        first.started[1].send_signal(signal.SIGTERM)
        told, hears = first.finish()
    assert told.code == hears.code == 128 + signal.SIGTERM
    assert hears.output == (
        "process 1 of 2: SIGTERM: finishing this step, then saving; Ctrl-C again stops at once\n"
    )
    (saved,) = [line.split() for line in told.output.splitlines() if line.startswith("stopped")]
    stopped = int(saved[3])
    assert steps_in(folder_of(tmp_path / "disturbed"))[-1] == stopped

    with start("disturbed") as second:
        second.until("step 30/60")
        second.lose(1)
        survivor = second.wait(0, LONGEST)
    newest = steps_in(folder_of(tmp_path / "disturbed"))[-1]
    assert survivor.code == 1 and newest >= 28
    # Gloo says at once that a connection is closed, unless it is between two exchanges.
    gone = f"process 1 ({gethostname()}) is gone: "
    whys = (f"{gone}its connection is closed", f"{gone}no sign of life for 30 s")
    assert survivor.output.splitlines()[-1].partition(". What JAX said is in ")[0] in [
        f"{why}. Nothing up to step {newest}, the newest checkpoint in {tmp_path / 'disturbed'}, "
        "is lost: the same command on every host goes on from there"
        for why in whys
    ]
    assert "Traceback" not in survivor.output and "Gloo" not in survivor.output

    with start("disturbed") as third:
        first, second = third.finish()
    assert first.code == second.code == 0
    assert f"going on from step {newest} of 60" in first.output
    assert weights(tmp_path / "disturbed") == weights(tmp_path / "whole")
    assert numbers(tmp_path / "disturbed") == numbers(tmp_path / "whole")


def test_devices_that_leave_a_process_without_any_are_refused():
    devices = [SimpleNamespace(process_index=number // 4) for number in range(12)]
    check_devices(3, devices)
    with pytest.raises(UserError) as refused:
        check_devices(3, devices[:4])
    assert str(refused.value) == (
        "device.count is 4, which leaves process 1 and process 2 without a device; leave it out, "
        "or start fewer processes"
    )


def test_processes_with_different_recipes_are_refused_on_every_host(start):
    with start("run", each={1: ["optim.learning_rate=0.002"]}) as different:
        ended = different.finish()
    message = (
        "process 1 has optim.learning_rate 0.002, process 0 has 0.003; start every host with the "
        "same recipe and the same keys\n"
    )
    assert ended == [Ended(2, message), Ended(2, f"process 1 of 2: {message}")]


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
