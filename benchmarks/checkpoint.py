"""The pause that a checkpoint makes in training, beside a save that is waited for.

    python benchmarks/checkpoint.py [--gib 1] [--every 15]  # 6 GiB: 0.5B with AdamW

A run of `windlass train`, with layers of Qwen3-0.6B's shape as many as its state has GiB for, saves
every so many seconds while its steps go on. Counted are the time in which the thread that trains
stands still, and that until every byte is written, hashed and committed. The rival is Orbax's
synchronous checkpointer, on the same arrays and disk and in the same process: without the hashes.
"""

import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402

from benchmarks import table  # noqa: E402
from benchmarks.table import Line  # noqa: E402
from windlass import train  # noqa: E402
from windlass.checkpoint.fingerprint import named  # noqa: E402
from windlass.checkpoint.store import Store  # noqa: E402
from windlass.processes.signals import Signals  # noqa: E402
from windlass.training import loop  # noqa: E402

MODEL = dict(family="qwen3", vocab=257, embed=1024, mlp=3072, heads=16, kv_heads=8, head_dim=128)
OF_A_LAYER = 12 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072)  # bytes: weights, moments
SAVES = 4
GOAL = 0.5  # seconds, of 6 GiB


class TimedStore(Store):
    """The checkpoints of a run, with a clock beside each save; the last is followed by a rival."""

    blocked: list[float] = []
    durable: list[float] = []  # from step 0, whose save nothing waits for
    waited: list[float] = []  # for the save before it, which was not done yet
    rival: list[float] = []
    state_bytes = 0

    def save(self, step: int, state: Any, *others: Any, **more: Any) -> bool:
        self._began = time.perf_counter()
        if not step or len(self.blocked) == SAVES:  # those of the start and of the end
            return super().save(step, state, *others, **more)
        self.wait()
        self.waited.append(time.perf_counter() - self._began)
        self._began = time.perf_counter()
        is_new = super().save(step, state, *others, **more)
        self.blocked.append(time.perf_counter() - self._began)
        if len(self.blocked) == SAVES:
            self.wait()
            self.save_as_others_do(state)
            os.kill(os.getpid(), signal.SIGTERM)
        return is_new

    def _finish(self, name: str) -> None:
        super()._finish(name)
        self.durable.append(time.perf_counter() - self._began)

    def save_as_others_do(self, state: Any) -> None:
        arrays = {name: array for name, array in named(state).items() if array.size}
        TimedStore.state_bytes = sum(array.nbytes for array in arrays.values())
        place = self.folder.parent.parent.absolute()
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
            for turn in range(2):
                began = time.perf_counter()
                orbax.save(place / f"rival{turn}", args=ocp.args.PyTreeSave(arrays))
                self.rival.append(time.perf_counter() - began)


def recipe(gib: float, every: float, place: Path) -> dict[str, Any]:
    layers = max(1, round(gib * 2**30 / OF_A_LAYER))
    return {
        "model": {**MODEL, "layers": layers, "theta": 1e6, "tied": True},
        "data": {"source": {"kind": "stories", "count": 500}, "length": 64, "cache": str(place)},
        "optim": {"kind": "adamw", "learning_rate": 1e-4},
        "train": {"steps": 10**6, "batch": 1, "evaluate_every": 10**6},
        "checkpoint": {"every": f"{every:g}s", "keep": 1},
        "telemetry": {"every": 1},  # no step ahead of the device, so that saves come in time
        "run": {"dir": str(place / "run")},
    }


def main() -> None:
    parser = table.parser(__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--every", type=float, default=15.0, help="seconds from save to save")
    asked = parser.parse_args()
    loop.Store = TimedStore
    with tempfile.TemporaryDirectory() as folder, Signals().listening() as signals:
        train(recipe(asked.gib, asked.every, Path(folder)), signals=signals)
    blocked, durable = TimedStore.blocked, TimedStore.durable[1 : SAVES + 1]
    size = f"{TimedStore.state_bytes / 2**30:.2f} GiB on {jax.devices()[0].device_kind}"
    rival = statistics.median(TimedStore.rival)
    if any(late > 0.1 for late in TimedStore.waited):
        print(f"seconds in which a save waited for the one before: {TimedStore.waited}")
    middle, whole = statistics.median(blocked), statistics.median(durable)
    most = f"{1000 * middle:,.0f} ms (at most {1000 * max(blocked):,.0f})"
    table.finish(
        [
            Line(
                f"pause of a save, {size}", most, f"{rival:.2f} s Orbax, waited for", rival / middle
            ),
            Line(f"until it is durable, {size}", f"{whole:.2f} s", f"{rival:.2f} s", rival / whole),
        ],
        asked.to,
    )


if __name__ == "__main__":
    main()
