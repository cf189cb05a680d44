"""Killed at any moment and started again by the same command, a run ends with the same bits."""

import signal

from tests.flags import quick
from tests.training.campaign import RECIPE, Program, killed, weights

# With all that a state can hold: the average of the weights, and how long there was no new best.
WHOLE = RECIPE | {"train": RECIPE["train"] | {"accumulation": 1, "ema": 0.99, "patience": 9}}


def test_a_run_stopped_twice_and_killed_in_a_save_ends_with_the_same_bits(tmp_path):
    undisturbed = Program(tmp_path / "undisturbed", WHOLE, quick())
    assert undisturbed.finish().code == 0
    program = Program(tmp_path / "disturbed", WHOLE, quick())
    for number, name, at in ((signal.SIGTERM, "SIGTERM", 13), (signal.SIGINT, "Ctrl-C", 33)):
        stopped = program.disturb(lambda program, at=at: program.step >= at, number)
        assert stopped.code == 128 + number, stopped.output
        assert f"{name}: finishing this step, then saving; Ctrl-C again stops" in stopped.output
        assert "of 60, saved\n" in stopped.output
        assert "the same command again goes on from there\n" in stopped.output
    assert len(killed(program, 1, seed=0)) == 1
    last = program.finish()
    assert last.code == 0 and "going on from step" in last.output, last.output
    assert weights(program.run_dir) == weights(undisturbed.run_dir)
    # The steps that were taken twice are in the record once.
    steps = [
        line.split(",")[0]
        for line in (program.run_dir / "metrics.jsonl").read_text().splitlines()
        if '"gradient_norm"' in line
    ]
    assert len(steps) == len(set(steps)) == 60
