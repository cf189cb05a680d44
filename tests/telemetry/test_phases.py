"""Phases of a start: what is in the file at any moment, and what it adds up to."""

import json
import threading
from pathlib import Path

import pytest

from tests.clock import Clock
from windlass.reports.goodput import REPEATED, STEADY, WAITING, goodput
from windlass.telemetry import phases
from windlass.telemetry.phases import FIRST, IMPORT, STEPS, PhasePiece, Phases, pieces


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "phases.jsonl"


def spent(file: Path) -> list[tuple[int, str, float]]:
    return [(one.start, one.phase, one.seconds) for one in pieces(file)]


def start(file: Path, *, keeps: bool = True) -> None:
    """A start of two phases, one inside the other, and of two steps."""
    clock = Clock()
    log = Phases(clock=clock)
    with log.recording(file, pytest.fail):
        if keeps:
            log.keep()
        with log("evaluation"):
            clock.now += 2
            with log("compile"):
                clock.now += 5
            clock.now += 1
        with log.stepping(10):
            clock.now += 4
            log.stepped(11, 0.5)
            clock.now += 3
            log.stepped(12, 1.5)
        log.end("stopped")


def test_phases_interrupt_each_other_and_follow_without_a_gap(file):
    start(file)
    start(file)
    one = [("evaluation", 2), ("compile", 5), ("evaluation", 1), (FIRST, 4), (STEPS, 3), ("end", 0)]
    assert spent(file) == [(number, *each) for number in (1, 2) for each in one]
    steps = [(one.first, one.step, one.waited) for one in pieces(file) if one.phase == STEPS]
    assert steps == [(11, 12, 1.0)] * 2
    assert pieces(file)[-1].ending == "stopped"


def test_the_time_before_a_call_is_that_of_imports(file):
    log = Phases()
    began = log._piece.began - 30
    log = Phases(began)
    with log.recording(file, pytest.fail):
        log.keep()
    first = pieces(file)[0]
    assert (first.phase, first.began) == (IMPORT, pytest.approx(began, abs=0.01))
    assert first.seconds == pytest.approx(30, abs=1)


def test_a_start_that_is_refused_leaves_nothing(file):
    start(file, keeps=False)
    assert not file.exists()
    start(file)
    before = file.read_bytes()
    start(file, keeps=False)
    assert file.read_bytes() == before


def test_a_start_that_fails_says_so(file):
    log = Phases()
    with pytest.raises(ZeroDivisionError), log.recording(file, pytest.fail):
        log.keep()
        raise ZeroDivisionError
    assert pieces(file)[-1].ending == "failed"


def test_what_goes_on_is_in_the_file_while_it_goes_on(file, monkeypatch):
    monkeypatch.setattr(phases, "OFTEN", 0.001)
    clock, is_written = Clock(), threading.Event()
    log = Phases(clock=clock)
    write = log._write

    def noticed():
        write()
        is_written.set()

    monkeypatch.setattr(log, "_write", noticed)
    with log.recording(file, pytest.fail), log("compile"):
        for passed in (7, 70, 700):
            clock.now += passed
            is_written.clear()
            assert is_written.wait(60)
            is_written.clear()
            assert is_written.wait(60)  # one that began after the clock was set
            assert spent(file) == [(1, "compile", clock.now - 100)]


def test_lines_that_are_no_pieces_are_left_out_and_kept_aside(file):
    start(file)
    good = file.read_bytes()
    file.write_bytes(b'{"step": 1, "start": "x"}\n' + good + b"[1]\n" + b'{"step": 3, "sta')
    told = []
    log = Phases()
    with log.recording(file, told.append):
        pass
    assert len(told) == 1 and "has 1 line without a record" in told[0]
    assert [one.start for one in pieces(file)] == [1] * 6
    assert file.with_name("phases.jsonl.damaged").read_bytes().startswith(b'{"step": 1, "start"')


def test_steps_that_were_taken_again_do_not_count():
    every = [
        PhasePiece(1, STEPS, 0.0, 100.0, first=0, step=50, waited=10.0),  # killed
        PhasePiece(2, "compile", 150.0, 20.0, 0, 0, 0.0),  # killed before its first step
        PhasePiece(3, STEPS, 200.0, 40.0, first=40, step=60, waited=0.0),
    ]
    found = goodput(every, is_running=True)
    assert found.seconds == pytest.approx(
        {"compile": 20, STEADY: 90 * 0.8 + 40, WAITING: 10, REPEATED: 90 * 0.2}
    )
    assert [start.ending for start in found.starts] == [
        *("killed (steps)", "killed (compile)", "running"),
    ]
    assert (found.running, found.gaps) == (160, [50, 30])
    assert found.share == pytest.approx(112 / 160)
    assert found.share_with_downtime == pytest.approx(112 / 240)
    assert found.resumed_at == [40] and found.pace == 2.0
    assert json.loads(json.dumps(found.as_dict()))["starts"][1]["steps"] is None


def test_the_moment_between_the_last_save_and_the_end_is_no_step_that_is_taken_again():
    every = [
        PhasePiece(1, STEPS, 0.0, 10.0, first=0, step=5, waited=0.0),
        PhasePiece(1, STEPS, 10.0, 1.0, first=5, step=5, waited=0.0),
        PhasePiece(1, "end", 11.0, 0.0, first=5, step=5, waited=0.0, ending="stopped"),
        PhasePiece(2, STEPS, 20.0, 1.0, first=5, step=5, waited=0.0),  # killed in its first step
        PhasePiece(3, STEPS, 30.0, 1.0, first=5, step=6, waited=0.0),
    ]
    seconds = [start.seconds for start in goodput(every, is_running=False).starts]
    assert seconds == [{STEADY: 11.0}, {REPEATED: 1.0}, {STEADY: 1.0}]


def test_a_run_that_has_noted_nothing_has_no_goodput(file):
    found = goodput(pieces(file), is_running=False)
    assert found.share is None and found.pace is None and found.seconds == {}
