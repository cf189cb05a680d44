"""How batches are made changes no bit of them."""

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from windlass.data import Data, Prepared, prepare
from windlass.data.load import Loader
from windlass.data.tokenizer import Tokenizer
from windlass.data.worker import making
from windlass.errors import UserError
from windlass.sources import stories

from .test_load import same, whole


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Two sources, overlapping windows, packed rows: all that a batch can be made of."""
    parts = (stories.Source(count=60, weight=2.0), stories.Source(count=9, seed=1))
    cache = str(tmp_path_factory.mktemp("cache"))
    data = Data(mixture=parts, length=48, stride=32, validation=0.2, cache=cache)
    return prepare(data, Tokenizer(kind="byte"))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_bits_for_any_workers_and_prefetch_and_from_any_start(
    mixed: Prepared, workers: int
):
    rows = mixed.split("train")
    plain = Loader(rows, 5, seed=3, shuffle=True, prefetch=0)
    expected = [plain.batch(step) for step in range(9)]
    for prefetch, start in ((0, 0), (1, 4), (6, 2)) if not workers else ((1, 2),):
        loader = Loader(rows, 5, seed=3, shuffle=True, workers=workers, prefetch=prefetch)
        batches = loader.iterate(start, whole)
        for step, batch in enumerate(islice(batches, 9 - start), start=start):
            assert same(batch, expected[step])
        del batches
        gc.collect()


def test_a_worker_imports_no_jax_and_dies_with_its_parent(mixed: Prepared):
    script = f"""
import os, sys, time
import numpy as np
from windlass.data import Data, prepare
from windlass.data.tokenizer import Tokenizer
from windlass.data import worker
from windlass.sources import stories

if __name__ == "__main__":
    data = Data(source=stories.Source(count=9), length=48, cache={mixed.data.cache!r})
    rows = prepare(data, Tokenizer(kind="byte")).split("train")
    with worker.making(rows, 1) as make:
        made = make(np.arange(3))
        assert all((made[name] == column).all() for name, column in rows.batch([0, 1, 2]).items())
        (child,) = make.__closure__[0].cell_contents._processes
        maps = open(f"/proc/{{child}}/maps").read()
        print(child, "jaxlib" in maps, flush=True)
        time.sleep(60)
"""
    file = Path(str(mixed.data.cache)) / "script.py"
    file.write_text(script)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, str(file)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        child, has_jax = parent.stdout.readline().split()
        parent.send_signal(signal.SIGKILL)
    assert has_jax == "False"
    for _ in range(1000):
        if not Path(f"/proc/{child}").exists() or _is_dead(int(child)):
            return
        time.sleep(0.01)
    raise AssertionError("the worker outlives its parent")


def _is_dead(process: int) -> bool:
    """Ended, and not yet collected by whoever inherited it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_what_is_sent_to_a_worker_is_shorter_than_a_pipe(mixed: Prepared):
    rows = mixed.split("train")
    sent = pickle.dumps(rows)
    assert len(sent) < 2**12
    assert same(pickle.loads(sent).batch(range(len(rows))), rows.batch(range(len(rows))))


class Plain:
    """Rows that are their own numbers."""

    def batch(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        return {"tokens": numbers}


@pytest.mark.parametrize(
    "heard", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_a_worker_that_is_still_starting_does_not_hear_what_ends_a_run(heard: signal.Signals):
    with making(Plain(), 1) as make, ThreadPoolExecutor(1) as thread:
        made = thread.submit(make, np.arange(2))
        while not (started := multiprocessing.active_children()):
            time.sleep(0.001)
        assert started[0].pid is not None
        os.kill(started[0].pid, heard)
        assert made.result()["tokens"].tolist() == [0, 1]


class Deadly:
    """Rows that end whoever makes a batch of them."""

    def batch(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        os._exit(9)


def test_a_worker_that_ends_is_told():
    with making(Deadly(), 1) as make, pytest.raises(UserError) as refused:
        make(np.arange(2))
    assert str(refused.value) == (
        "data.workers is 1, and one of these processes ended. A script that trains needs "
        '`if __name__ == "__main__":` around its calls, or they are made again in every worker; '
        "a machine out of memory ends them too. data.workers=0 needs no processes"
    )


def test_without_shared_memory_workers_are_refused_with_what_would_do(monkeypatch):
    from multiprocessing import synchronize

    def absent(*_, **__):  # as the system answers where there is no /dev/shm
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(synchronize.SemLock, "__init__", absent)
    with pytest.raises(UserError) as refused, making(None, 2):
        pass
    assert str(refused.value) == (
        "data.workers is 2, and no processes can be started here: No such file or directory; they "
        "need semaphores in /dev/shm. data.workers=0 needs no processes"
    )
