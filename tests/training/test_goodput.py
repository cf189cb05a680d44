"""Time of a run over its restarts, compared with timestamps that others took."""

import json
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.browser import wait
from tests.flags import quick
from tests.training.campaign import RECIPE, Program
from windlass import api
from windlass.checkpoint.store import folder_of, steps_in
from windlass.reports.goodput import REPEATED, TRAINED, Goodput
from windlass.telemetry.phases import END, pieces

pytestmark = pytest.mark.long  # four starts of a program

# Saved and evaluated by time: how many steps that is depends on the machine.
ENDLESS = RECIPE | {
    "train": RECIPE["train"] | {"steps": 1_000_000, "batch": 16, "evaluate_every": "3s"},
    "checkpoint": {"every": "4s", "keep": 100},
}
STOPS = (signal.SIGKILL, signal.SIGINT, signal.SIGKILL, signal.SIGINT)
TRAINS = 7.0  # seconds of each start in which steps are taken


class Lived(NamedTuple):
    """A start as it was seen from outside, and the records that it had written by its end."""

    began: float
    ended: float
    records: list[dict]


class Restarted(NamedTuple):
    """A run of four starts."""

    run: Path
    lives: list[Lived]


@pytest.fixture(scope="module")
def restarted(tmp_path_factory) -> Restarted:
    program = Program(tmp_path_factory.mktemp("restarted"), ENDLESS, quick())
    lives = []
    for number in STOPS:
        began = time.time()
        process = program.start()
        wait(lambda began=began: _has_trained(program.run_dir, began), 600, "training")
        process.send_signal(number)
        process.communicate()
        lives.append(Lived(began, time.time(), _records(program.run_dir)))
        time.sleep(1.0)  # nobody is there for the run
    return Restarted(program.run_dir, lives)


def _records(run: Path) -> list[dict]:
    file = run / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def _has_trained(run: Path, began: float) -> bool:
    """True where the start that began then trains for long, and after its last checkpoint."""
    records = [record for record in _records(run) if record["time"] > began]
    if not records or records[-1]["time"] - records[0]["time"] < TRAINS:
        return False
    return records[-1]["step"] > steps_in(folder_of(run))[-1] + 1


@pytest.fixture
def found(restarted) -> Goodput:
    return api.report(restarted.run).goodput


def test_a_run_has_its_restarts_and_how_each_start_ended(restarted, found):
    assert [start.ending.partition(" ")[0] for start in found.starts] == [
        *("killed", "stopped", "killed", "stopped"),
    ]
    killed, stopped, again, last = (start.steps for start in found.starts)
    saved = steps_in(folder_of(restarted.run))
    assert killed[0] == 0 and {stopped[0], again[0], last[0]} <= {*saved}
    assert stopped[0] < killed[1] and last[0] < again[1]  # not where it was killed
    assert again[0] == stopped[1] and last[1] == saved[-1]
    assert found.resumed_at == [stopped[0], again[0], last[0]]
    repeated = [REPEATED in start.seconds for start in found.starts]
    assert repeated == [True, False, True, False]


def test_goodput_is_right_to_a_percent_against_timestamps(restarted, found):
    lives, saved = restarted.lives, {*steps_in(folder_of(restarted.run))}
    running = sum(life.ended - life.began for life in lives)
    down = sum(after.began - before.ended for before, after in pairwise(lives))
    resumed = [*found.resumed_at, 1_000_000]
    trained = sum(_trained(*pair, saved) for pair in zip(lives, resumed, strict=True))
    assert found.share == pytest.approx(trained / running, abs=0.01)
    assert found.trained == pytest.approx(trained, rel=0.01)
    assert found.share_with_downtime == pytest.approx(trained / (running + down), abs=0.01)


def test_the_pieces_of_a_start_follow_each_other_without_a_gap(restarted):
    every = pieces(restarted.run / "phases.jsonl")
    for before, after in pairwise(every):
        if before.start == after.start:
            assert before.phase != END
            assert after.began == pytest.approx(before.ended, abs=0.002)
    phases = {piece.phase for piece in every}
    assert phases >= {"import", "data", "initialise", "compile", "evaluation", "checkpoint"}


def test_phases_add_up_to_the_running_time(found):
    assert sum(found.seconds.values()) == pytest.approx(found.running, rel=1e-3)
    assert set(TRAINED) <= found.seconds.keys()


def _trained(life: Lived, until: int, saved: set[int]) -> float:
    """Seconds of the steps of a start that count, by the clock of its records.

    A step after a pause, or the first one, has no timestamp at its beginning: there it is what the
    run says that it took.
    """
    seconds, before, is_paused = 0.0, None, True
    for record in life.records:
        if not life.began <= record["time"] <= life.ended:
            continue
        if "step_ms" not in record:
            is_paused = True  # by an evaluation
            continue
        if record["step"] <= until:
            took = record["step_ms"] / 1000
            if before is not None and not is_paused:
                took = record["time"] - before["time"]
            seconds += took - record["data_wait_ms"] / 1000
        before, is_paused = record, record["step"] in saved
    return seconds
