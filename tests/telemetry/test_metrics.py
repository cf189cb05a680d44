import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from tests import trained
from tests.clock import Clock
from windlass.errors import UserError
from windlass.telemetry.metrics import MEANINGS, READINGS, Meter, Metrics, last, read, truncate


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, *steps: int):
    metrics = Metrics(path, clock=lambda: 12.34567)
    for step in steps:
        metrics.write(step, {"loss": 1.0 / step})


def steps(path) -> list[int]:
    return [record["step"] for record in read(path)]


def test_a_record_is_a_line_of_json(path):
    write(path, 1, 2)
    assert path.read_text() == (
        '{"step": 1, "time": 12.346, "loss": 1.0}\n{"step": 2, "time": 12.346, "loss": 0.5}\n'
    )


def test_numbers_from_any_library_are_written_plainly(path):
    values = {
        "device": jnp.float32(1.5),
        "low": jnp.bfloat16(2.0),
        "host": np.float64(0.25),
        "count": np.int64(7),
        "whole": 3,
        "name": "validation",
        "absent": None,
    }
    metrics = Metrics(path)
    metrics.write(1, values)
    expected = [1.5, 2.0, 0.25, 7, 3, "validation", None]
    (record,) = read(path)
    assert [record[name] for name in values] == expected


def test_numbers_that_are_not_finite_survive_in_valid_json(path):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    metrics = Metrics(path)
    values = {"a": math.nan, "b": jnp.float32(jnp.inf), "c": np.float32(-np.inf)}
    metrics.write(1, values)
    written = json.loads(path.read_text(), parse_constant=refuse)
    assert [written[name] for name in "abc"] == ["NaN", "Infinity", "-Infinity"]
    (record,) = read(path)
    assert math.isnan(record["a"]) and (record["b"], record["c"]) == (math.inf, -math.inf)


def test_records_after_a_restored_step_are_dropped(path):
    write(path, 1, 2, 3, 3, 4)
    truncate(path, 3)
    assert steps(path) == [1, 2, 3, 3]
    Metrics(path).truncate(2)
    assert steps(path) == [1, 2]
    truncate(path, 0)
    assert path.read_bytes() == b""


def test_a_line_cut_short_by_a_kill_is_dropped(path):
    write(path, 1, 2, 3)
    for cut in (1, 5, 20):
        path.write_bytes(path.read_bytes()[:-cut])
        left = steps(path)
        write(path, 9)
        assert steps(path) == [*left, 9]
        truncate(path, 8)


def test_a_file_that_is_not_there_needs_no_truncating(path):
    truncate(path, 5)
    assert not path.exists()


def test_the_last_record_is_the_newest_that_has_a_name(path):
    metrics = Metrics(path)
    assert metrics.last() is None
    metrics.write(1, {"gradient_norm": 2.0})
    metrics.write(2, {"validation_loss": 3.0})
    assert (metrics.last() or {})["step"] == 2
    assert (metrics.last("gradient_norm") or {})["step"] == 1
    assert last(path, "loss") is None and last(path.parent / "absent.jsonl") is None


def test_a_broken_line_is_named(path):
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(UserError) as refusal:
        read(path)
    assert str(refusal.value) == (
        f"{path}, line 2, is not JSON: Expecting value: line 2 column 1 (char 10)"
    )


def steps_of(seconds: float, *, steps: int, clock: Clock, meter: Meter):
    for _ in range(steps):
        clock.now += seconds
        meter.step()


def meter(clock: Clock, **options: Any) -> Meter:
    return Meter(rows_per_step=8, tokens_per_step=1000, clock=clock, **options)


def test_speed_is_counted_between_readings():
    clock = Clock()
    speeds = meter(clock)
    steps_of(0.5, steps=10, clock=clock, meter=speeds)
    assert speeds.read() == {
        "step_ms": 500,
        "tokens_per_second": 2000,
        "samples_per_second": 16,
        "data_wait_ms": 0,
    }
    steps_of(1, steps=10, clock=clock, meter=speeds)
    assert speeds.read()["tokens_per_second"] == 1000
    assert (speeds.steps, speeds.seconds) == (20, 15)
    masked = meter(clock, read_per_step=4000)
    steps_of(0.5, steps=10, clock=clock, meter=masked)
    assert masked.read()["tokens_per_second"] == 8000
    assert masked.tokens(10) == 10_000


def test_the_usual_step_is_the_median_of_steps_and_the_start_is_none_of_them():
    clock = Clock()
    speeds = meter(clock, read_per_step=4000)
    assert speeds.median is None and speeds.tokens_per_second is None
    steps_of(9, steps=1, clock=clock, meter=speeds)
    speeds.read()
    assert speeds.median == 9  # all there is
    for seconds, steps in ((0.5, 10), (0.4, 2), (2, 3), (1, 2)):
        steps_of(seconds, steps=steps, clock=clock, meter=speeds)
        speeds.read()
    assert (speeds.median, speeds.tokens_per_second) == (0.5, 8000)


def test_a_meter_keeps_no_more_readings_however_long_a_run_is():
    clock = Clock()
    speeds = meter(clock)
    for seconds, readings in ((2, READINGS + 2), (0.5, READINGS)):
        for _ in range(readings):
            steps_of(seconds, steps=1, clock=clock, meter=speeds)
            speeds.read()
    assert speeds.median == 0.5  # of the last ones


def test_a_pause_is_not_counted():
    clock = Clock()
    speeds = meter(clock)
    steps_of(0.5, steps=5, clock=clock, meter=speeds)
    with speeds.paused():
        clock.now += 60
    steps_of(0.5, steps=5, clock=clock, meter=speeds)
    assert speeds.read()["step_ms"] == 500
    steps_of(0.5, steps=5, clock=clock, meter=speeds)
    assert speeds.read()["step_ms"] == 500
    assert speeds.seconds == 7.5


def test_a_pause_that_ends_in_an_error_is_not_counted():
    clock = Clock()
    speeds = meter(clock)
    with pytest.raises(UserError), speeds.paused():
        clock.now += 60
        raise UserError("stopped")
    steps_of(1, steps=1, clock=clock, meter=speeds)
    assert speeds.read()["step_ms"] == 1000


class Result(NamedTuple):
    """As much of an array as is asked: whether the device is done with it."""

    ready: bool

    def is_ready(self) -> bool:
        return self.ready


def test_waiting_for_a_batch_counts_where_the_device_has_nothing_to_do():
    clock = Clock()
    speeds = meter(clock)

    def slow() -> Iterator[str]:
        while True:
            clock.now += 0.2
            yield "batch"

    batches = slow()
    for ready in (True, False, True, False):  # of the step before the one that waits
        assert speeds.next(batches) == "batch"
        clock.now += 0.8
        speeds.step(Result(ready))
    found = speeds.read()
    # The first batch, with no step before it, and the two that came to an idle device.
    assert found["data_wait_ms"] == pytest.approx(1000 * 3 * 0.2 / 4)
    assert found["step_ms"] == pytest.approx(1000)
    speeds.step()
    clock.now += 1
    assert speeds.read()["data_wait_ms"] == 0


def test_every_number_that_a_run_records_is_explained(tmp_path_factory):
    run = trained.only_run(trained.workplace(tmp_path_factory))
    recorded = {name for record in read(run / "metrics.jsonl") for name in record}
    objective = {"accuracy", "cross_entropy"}
    assert objective < recorded and "validation_loss" in recorded
    ours = {name for name in recorded if not name.startswith("validation_")} - objective
    narrow = {"loss_scale", "overflows"}  # of float16
    streamed = {"data_part", "data_ahead_tokens"}
    assert ours == set(MEANINGS) - narrow - streamed - {"mfu"}  # nobody states the peak of a CPU


@pytest.mark.parametrize("peak, expected", [(2 * 500.0, 0.4), (None, None)])
def test_utilisation_is_the_share_of_what_all_devices_could_do(peak, expected):
    clock = Clock()
    speeds = meter(clock, flops_per_step=400, peak_flops=peak)
    steps_of(1, steps=2, clock=clock, meter=speeds)
    assert speeds.read().get("mfu") == expected


def test_a_reading_without_steps_says_nothing():
    clock = Clock()
    speeds = meter(clock)
    clock.now += 2
    assert speeds.read() == {}


def test_the_last_record_is_refused_where_somebody_spoilt_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": }\n')
    with pytest.raises(UserError) as refusal:
        last(path, "loss")
    assert str(refusal.value) == f"{path} is not JSON: Expecting value: line 1 column 21 (char 20)"
