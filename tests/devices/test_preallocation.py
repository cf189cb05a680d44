"""Memory of GPUs is taken beside what else a start does; a CPU's is not."""

import threading
from types import SimpleNamespace

import jax

from windlass.devices import preallocation
from windlass.devices.preallocation import preallocate


def test_each_gpu_of_this_process_has_its_memory_taken_in_a_thread(monkeypatch):
    taken = []
    monkeypatch.setattr(preallocation, "_put", taken.append)
    here = [SimpleNamespace(platform="gpu", process_index=0, id=number) for number in (0, 1)]
    preallocate([*here, SimpleNamespace(platform="gpu", process_index=1, id=2)])
    for thread in threading.enumerate():
        if thread.name == "preallocation":
            thread.join()
    assert sorted(one.id for one in taken) == [0, 1]


def test_memory_that_cannot_be_taken_is_told_by_the_first_array_of_the_run(monkeypatch):
    def refused(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(jax, "device_put", refused)
    assert preallocation._put(jax.devices()[0]) is None


def test_nothing_is_started_for_a_cpu(monkeypatch):
    started = []
    monkeypatch.setattr(threading.Thread, "start", started.append)
    preallocate(jax.devices())
    assert not started
