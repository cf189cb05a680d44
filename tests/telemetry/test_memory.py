"""What is told of memory."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest

from windlass.telemetry.memory import device_limit, device_peak, memory, program_parts


class Device(NamedTuple):
    """As much of a device of an accelerator as is asked."""

    stats: dict[str, int] | None
    process_index: int = 0

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


def test_of_several_devices_the_fullest_of_this_process_counts():
    here = Device({"bytes_in_use": 5, "peak_bytes_in_use": 9})
    fuller = Device({"bytes_in_use": 7, "peak_bytes_in_use": 8})
    elsewhere = Device({"bytes_in_use": 70, "peak_bytes_in_use": 80}, process_index=1)
    assert memory([here, fuller, elsewhere]) == {"memory_bytes": 7, "peak_memory_bytes": 9}


def test_what_devices_count_is_told_of_the_fullest_and_what_they_have_of_the_smallest():
    one = Device({"bytes_in_use": 5, "peak_bytes_in_use": 9, "bytes_limit": 30})
    other = Device({"bytes_in_use": 7, "peak_bytes_in_use": 8, "bytes_limit": 20})
    elsewhere = Device({"bytes_in_use": 7, "peak_bytes_in_use": 80, "bytes_limit": 2}, 1)
    assert device_peak([one, other, elsewhere]) == 9
    assert device_limit([one, other, elsewhere]) == 20
    assert device_peak([Device(None)]) is None and device_limit([Device(None)]) is None


def test_a_program_needs_what_goes_in_comes_out_and_is_between():
    def doubled(x):
        return x + x, (x @ x).sum()

    given = jax.ShapeDtypeStruct((64, 64), np.float32)
    parts = program_parts(jax.jit(doubled, donate_argnums=0).lower(given).compile(), "cpu")
    assert parts is not None and parts["arguments"] == 4 * 64 * 64
    assert parts["results"] < 64  # the sum; the other is in the place of what went in
    assert parts["temporaries"] >= 4 * 64 * 64


def test_what_a_tpu_holds_is_its_peak_and_not_the_room_for_its_temporaries(monkeypatch):
    sizes = {"argument_size_in_bytes": 100, "output_size_in_bytes": 90, "alias_size_in_bytes": 80}
    told = SimpleNamespace(**sizes, temp_size_in_bytes=70, peak_memory_in_bytes=150)
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: told)
    program = jax.jit(lambda x: x).lower(1.0).compile()
    parts = {"arguments": 100, "results": 10}
    assert program_parts(program, "tpu") == {**parts, "temporaries": 40}
    assert program_parts(program, "gpu") == {**parts, "temporaries": 70}


def test_a_device_that_keeps_no_peak_has_its_present_use_for_one():
    assert memory([Device({"bytes_in_use": 5})]) == {"memory_bytes": 5, "peak_memory_bytes": 5}


def test_on_a_cpu_it_is_the_memory_of_the_process_and_the_peak_outlives_it():
    before = memory(jax.devices("cpu"))
    held = np.ones(200 * 2**20, np.uint8)
    during = memory(jax.devices("cpu"))
    assert during["memory_bytes"] - before["memory_bytes"] == pytest.approx(held.nbytes, rel=0.1)
    del held
    after = memory(jax.devices("cpu"))
    assert after["memory_bytes"] < during["memory_bytes"] - 100 * 2**20
    # Linux counts pages in each thread, and adds them up every now and then.
    peak = max(before["peak_memory_bytes"], during["memory_bytes"])
    assert after["peak_memory_bytes"] == pytest.approx(peak, rel=0.01)
