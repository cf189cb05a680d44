"""One of two processes that share one folder and have another each; it prints what it finds."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from windlass.config import Due, Every
from windlass.data import Data, prepare
from windlass.data.load import Loader
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.processes import hosts, shared_folders
from windlass.processes.clock import Clock
from windlass.run_folder.folder import check_shared
from windlass.sources.stories import Source
from windlass.training.session import check_same

shared_folders.LATE = 0.2
port, index, common, own = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
hosts.join(hosts.Hosts(f"127.0.0.1:{port}", 2, index, "a test"))


def makes(folder: Path) -> str:
    """Whether this process finds a file there when it is its turn to make one."""
    file = folder / "made"
    found = "found" if file.exists() else "made"
    file.touch()
    return found


def refusal(call) -> str | None:
    try:
        call()
    except UserError as error:
        return str(error)


def clock() -> float:
    assert hosts.is_first(), "only the first process has a clock"
    clock.now += 25
    return clock.now


clock.now = 0.0
agreed = Clock(Every(1, "min"), clock=clock)
due, times = Due(Every(1, "min"), 100, agreed), []
for step in range(1, 61):
    agreed.step(step)
    times += [step] if due(step) else []


class Recording:
    """Rows that note which of them were read."""

    def __init__(self, rows):
        self.rows, self.read = rows, []

    def __getattr__(self, name):
        return getattr(self.rows, name)

    def __len__(self):
        return len(self.rows)

    def batch(self, numbers, *epochs):
        self.read += numbers.tolist()
        return self.rows.batch(numbers, *epochs)


def reads() -> dict:
    """The rows of a step, and those that this process reads of them, which has half the devices."""
    same = Data(source=Source(count=4), length=16, cache=str(own))
    rows: Any = Recording(prepare(same, Tokenizer()).split("train"))
    place = NamedSharding(jax.make_mesh((2,), ("batch",)), PartitionSpec("batch"))
    loader = Loader(rows, 8, seed=0, shuffle=True, prefetch=0)
    batch = next(loader.iterate(3, lambda shape, name: place))
    (part,) = batch["tokens"].addressable_shards
    wanted = rows.rows.batch(loader.row_numbers(3))["tokens"]
    is_right = bool((part.data == wanted[part.index]).all())
    return {"step": loader.row_numbers(3).tolist(), "own": rows.read, "is_right": is_right}


data = Data(source=Source(count=4, seed=index), length=16, cache=str(own))
prepared = prepare(data, Tokenizer())
print(
    json.dumps(
        {
            "seen": [shared_folders.seen(common), shared_folders.seen(own)],
            "once": [
                shared_folders.once(name, folder, lambda folder=folder: makes(folder))
                for name, folder in (("common", common), ("own", own))
            ],
            "probes": [path.name for path in (*common.glob(".*"), *own.glob(".*"))],
            "run": refusal(lambda: check_shared(own)),
            "data": refusal(lambda: check_same(prepared)),
            "prepared": prepared.fingerprint[:12],
            "due": times,
            "rows": reads(),
        }
    )
)
