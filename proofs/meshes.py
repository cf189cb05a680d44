"""Every family gives the same losses on every mesh, however a batch is accumulated, with all of
its weights trained or only those of an adapter."""

import os
import pkgutil
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

import numpy as np

PROCESSES = os.cpu_count() or 1  # compiling, which is most of it, takes one core of each
FIXED = "echo_state"  # all but its head, and no linear map that an adapter could stand in for


def prove() -> dict:
    import windlass.models

    families = sorted(module.name for module in pkgutil.iter_modules(windlass.models.__path__))
    cases = [case for case in product(families, (False, True)) if case != (FIXED, True)]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        each = pool.map(gaps, *zip(*cases, strict=True))
        worst = {name: gap for found in each for name, gap in found.items()}
    numbers = list(worst.values())
    return {
        "holds": all(max(gap.values()) < 1e-5 for gap in numbers),
        "steps": 10,
        "cases": len(worst),
        "worst_loss": max(gap["loss"] for gap in numbers),
        "worst_gradient_norm": max(gap["gradient_norm"] for gap in numbers),
        "relative_differences": worst,
    }


def gaps(family: str, is_adapted: bool) -> dict[str, dict[str, float]]:
    """How far a family's losses and gradient norms on each mesh are from those on one device."""
    import tests.conftest  # noqa: F401  the settings under which the numbers are compared
    from tests.program.test_step import MESHES, Bench
    from windlass.adapters.lora import Adapter

    adapter = Adapter(rank=4) if is_adapted else None
    expected, found = None, {}
    for sizes, microbatches in product(MESHES, (1, 2)):
        curve = Bench(family, sizes, microbatches, adapter=adapter).curve()
        expected = curve if expected is None else expected
        gap = np.abs(curve / expected - 1).max(axis=0)
        name = f"{family}{' LoRA' * is_adapted} {'x'.join(map(str, sizes))}"
        found[f"{name} accumulation {microbatches}"] = {
            "loss": float(gap[0]),
            "gradient_norm": float(gap[1]),
        }
    return found
