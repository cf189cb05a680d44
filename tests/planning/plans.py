"""Plans of made-up figures that can be checked by head."""

import dataclasses
from pathlib import Path

from windlass.config import Every
from windlass.planning.cost import Assumed, cost
from windlass.planning.extent import Extent
from windlass.planning.memory import Memory
from windlass.planning.plan import Plan
from windlass.planning.prices import Price, Prices
from windlass.planning.targets import find
from windlass.planning.time import Time

GIB = 2**30
TODAY = "2999-01-01"  # never old
KNOWN = Prices(
    TODAY,
    [],
    [
        Price("v5e", "gcp", "us-central1", 1.2, 0.3, TODAY),
        Price("h100", "lambda", None, 2.0, None, TODAY),
    ],
    Path("prices.yaml"),
    [],
)


def made(
    on: str = "v5e-8",
    *,
    gib: int | float = 8.0,
    seconds: float = 0.5,
    steps: int | None = 7200,
    keys: tuple[str, ...] = (),
    preemptions: float | None = None,
    rows: int = 64,
) -> Plan:
    """A recipe of so many rows of 1024 tokens that takes so much memory and time on a target."""
    target = find(on)
    devices = target.devices
    held = {"weights": gib / 4 * GIB, "activations": gib / 2 * GIB, "other": gib / 4 * GIB}
    memory = Memory(held, target.chip.memory_bytes, 0.1)
    spent = {"matmuls": 0.8 * seconds, "attention": 0.2 * seconds}
    flops = 0.4 * seconds * devices * target.chip.peak["bfloat16"]
    time = Time(spent, 0.2, "compute", flops)
    extent = Extent(rows * 1024, steps, 720)
    bill = cost(
        time,
        extent,
        target,
        KNOWN,
        every=Every(100),
        saved=0.0,
        assumed=Assumed(boot=180.0, compile=60.0, preemptions=preemptions),
    )
    settings = {
        "batch": rows,
        "rows_per_device": rows // devices,
        "accumulation": 1,
        "row_tokens": 1024,
        "mesh": {"data": 1, "fsdp": devices, "tensor": 1},
        "remat": "saved",
        "layers_per_loop": 1,
        "compute": "bfloat16",
        "attention": "splash",
    }
    return Plan(
        *("mine", target, settings, extent, memory, time, bill, "in pieces"), bill.notes, keys
    )


def without_time(plan: Plan) -> Plan:
    """The same where nobody knows how fast the devices are."""
    return dataclasses.replace(plan, time=None, cost=None, notes=[])
