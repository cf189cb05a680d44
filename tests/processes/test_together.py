"""A run of several processes: the same losses and tokens as in one, whoever goes on with it."""

import copy
import json
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from tests.spawn import processes
from tests.training.campaign import RECIPE
from windlass import api
from windlass.checkpoint.store import folder_of, steps_in
from windlass.processes.signals import Signals
from windlass.run_folder import folder as folders
from windlass.telemetry.console import ConsoleReport
from windlass.telemetry.metrics import read
from windlass.training.train import train

# A schedule that does not end with the run: stopping early must not change it.
KEYS = ["train.evaluate_every=2", "checkpoint.every=2", "optim.schedule.shape=constant"]
# 16 rows a step on eight devices, and on four as well where the run began on eight.
ON_EACH = ["train.batch=null", "train.batch_per_device=1", "train.accumulation=2"]


def alone(folder: Path, *keys: str) -> str:
    """A run in this process; what it said."""
    console = Console(record=True, width=1000, file=StringIO())
    with ConsoleReport(console) as report:
        words = [*KEYS, f"run.dir={folder}", *keys]
        train(copy.deepcopy(RECIPE), words, signals=Signals(), report=report)
    return console.export_text()


def numbers(run: Path, name: str) -> list:
    return [record[name] for record in read(run / "metrics.jsonl") if name in record]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Six steps of one process on eight devices."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    alone(folder, "train.steps=6", "train.batch=16")
    return folder


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Path:
    """Four steps of two processes on four devices each."""
    folder = tmp_path_factory.mktemp("both")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    words = ["tiny.yaml", *KEYS, *ON_EACH, f"run.dir={folder / 'run'}", "train.steps=4"]
    with processes(folder, words) as running:
        first, second = running.finish()
    assert first.code == second.code == 0, first.output + second.output
    assert "step 4/4" in first.output and "step" not in second.output
    return folder / "run"


@pytest.mark.long
def test_two_processes_give_the_losses_and_the_tokens_of_one(both, whole):
    assert numbers(both, "token_hash") == numbers(whole, "token_hash")[:4]
    for name, some in (("loss", 4), ("gradient_norm", 4), ("validation_loss", 2)):
        assert numbers(both, name) == pytest.approx(numbers(whole, name)[:some], rel=1e-5)


@pytest.mark.long
def test_two_processes_save_together_what_every_command_of_one_reads(both):
    assert steps_in(folder_of(both)) == [0, 2, 4]
    parts = folder_of(both) / "4/state"
    assert {path.name for path in parts.glob("ocdbt.*")} == {"ocdbt.process_0", "ocdbt.process_1"}
    assert api.verify(both).good
    measured = numbers(both, "validation_loss")[-1]
    assert api.evaluate(both)["loss"] == pytest.approx(measured, rel=1e-5)
    (standing,) = [one for one in api.runs(both.parent) if one.folder == both]
    assert standing.step == 4


@pytest.mark.long
def test_a_run_of_two_processes_goes_on_in_one_on_half_the_devices(both, whole):
    text = alone(both, *ON_EACH, "train.steps=6", "device.count=4")
    assert (
        f"resuming from step 4 of 6 in {both}\n"
        "before on 8 × cpu in 2 processes as fsdp 8, 1 sequence per device × 2 accumulation; now "
        "on 4 × cpu as fsdp 4, 1 sequence per device × 4 accumulation: the same batch of 16, "
        "losses agree but not to the bit\n"
    ) in text
    assert numbers(both, "token_hash") == numbers(whole, "token_hash")
    assert numbers(both, "loss") == pytest.approx(numbers(whole, "loss"), rel=1e-5)
    began = json.loads((both / folders.ABOUT).read_text())["starts"]
    assert [start["chose"]["device"]["count"] for start in began] == [8, 4]
