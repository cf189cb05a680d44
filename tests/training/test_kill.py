"""Stopped or killed at any moment and started again by the same command, a run loses nothing."""

import json
import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.flags import quick
from tests.training.campaign import RECIPE, Ended, Program, killed, weights

pytestmark = pytest.mark.long  # five starts of a program

# With all that a state can hold: the average of the weights, and how long there was no new best.
TRAIN = {"steps": 24, "accumulation": 1, "evaluate_every": 5, "ema": 0.99, "patience": 9}
WHOLE = RECIPE | {"train": RECIPE["train"] | TRAIN, "checkpoint": {"every": 4}}
STOPS = ((signal.SIGTERM, "SIGTERM", 6), (signal.SIGINT, "Ctrl-C", 11))


class Start(NamedTuple):
    """How a start of a run ended, what it compiled, and what was kept of it by then."""

    ended: Ended
    compiled: list[dict]
    kept: list[Path]


class Campaign(NamedTuple):
    """A run that nothing disturbed, and one that was stopped, killed in a save, and finished."""

    undisturbed: Program
    disturbed: Program
    kept: Path
    stopped: list[Start]
    last: Ended


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> Campaign:
    folder = tmp_path_factory.mktemp("campaign")
    kept, stopped, seen = folder / "cache" / "compiled", [], 0
    undisturbed = Program(folder / "undisturbed", WHOLE, quick())
    disturbed = Program(folder / "disturbed", WHOLE, quick())
    with pytest.MonkeyPatch.context() as patch:
        # Programs are kept where a user has them, and not where the other tests do.
        for name in ("COMPILATION_CACHE_DIR", "PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
            patch.delenv(f"JAX_{name}")
        patch.setenv("WINDLASS_CACHE", str(folder / "cache"))
        for number, _, at in STOPS:
            ended = disturbed.disturb(lambda program, at=at: program.step >= at, number)
            assert ended.code == 128 + number, ended.output
            lines = (disturbed.run_dir / "compile.jsonl").read_text().splitlines()
            compiled = [json.loads(line) for line in lines[seen:]]
            stopped.append(Start(ended, compiled, sorted(kept.glob("*-cache"))))
            seen = len(lines)
        assert len(killed(disturbed, 1, seed=0, late=12)) == 1
        last = disturbed.finish()
        assert undisturbed.finish().code == 0
    return Campaign(undisturbed, disturbed, kept, stopped, last)


def test_a_run_stopped_twice_and_killed_in_a_save_ends_with_the_same_bits(campaign):
    for (_, name, _), (stopped, *_) in zip(STOPS, campaign.stopped, strict=True):
        assert f"{name}: finishing this step, then saving; Ctrl-C again stops" in stopped.output
        assert "of 24, saved\n" in stopped.output
        assert "the same command again resumes the run\n" in stopped.output
    last, run = campaign.last, campaign.disturbed.run_dir
    assert last.code == 0 and "resuming from step" in last.output, last.output
    assert weights(run) == weights(campaign.undisturbed.run_dir)
    # The steps that were taken twice are in the record once.
    steps = [
        line.split(",")[0]
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if '"gradient_norm"' in line
    ]
    assert len(steps) == len(set(steps)) == 24


def test_the_second_start_of_a_run_compiles_nothing_and_says_so(campaign):
    (first, before, there), (second, after, still) = campaign.stopped
    assert before and not any(record["cached"] for record in before)
    told = next(line for line in first.output.splitlines() if line.startswith("compiled "))
    assert told.startswith("compiled     2 programs in ") and str(campaign.kept) in told
    assert [record["function"] for record in after if not record["cached"]] == []
    assert {"step", "evaluation"} <= {record["program"] for record in after}
    nothing = f"compiled     nothing: {len(after)} programs from the cache ({campaign.kept}, "
    assert nothing in second.output
    assert there and still == there
    assert {r["fingerprint"] for r in after} <= {r["fingerprint"] for r in before}
