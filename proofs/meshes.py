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
    """How far a family's losses and gradient norms on each mesh are from those on one device.

    A balance loss is that of each microbatch: such a family is compared with one device that
    accumulates as much, and, without that loss, with one that does not.
    """
    import tests.conftest  # noqa: F401  the settings under which the numbers are compared
    from tests import tiny
    from tests.program.test_step import MESHES, Bench
    from windlass.adapters.lora import Adapter

    def curve(sizes: tuple[int, int, int], microbatches: int, **changes) -> np.ndarray:
        adapter = Adapter(rank=4) if is_adapted else None
        return Bench(family, sizes, microbatches, adapter=adapter, **changes).curve()

    single = MESHES[0]
    expected = {1: curve(single, 1)}
    is_balanced = hasattr(tiny.config(family), "balance")
    expected[2] = curve(single, 2) if is_balanced else expected[1]
    own = {(single, microbatches) for microbatches in ((1, 2) if is_balanced else (1,))}
    found = {}
    for case in product(MESHES, (1, 2)):
        if case not in own:
            found[_name(family, is_adapted, *case)] = _gap(curve(*case), expected[case[1]])
    if is_balanced:
        name = f"{_name(family, is_adapted, single, 2)}, no balance loss"
        found[name] = _gap(curve(single, 2, balance=0.0), curve(single, 1, balance=0.0))
    return found


def _name(family: str, is_adapted: bool, sizes: tuple[int, int, int], microbatches: int) -> str:
    mesh = "x".join(map(str, sizes))
    return f"{family}{' LoRA' * is_adapted} {mesh} accumulation {microbatches}"


def _gap(found: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    loss, norm = np.abs(found / expected - 1).max(axis=0)
    return {"loss": float(loss), "gradient_norm": float(norm)}
