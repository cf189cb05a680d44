"""Every family gives the same losses on every mesh, however a batch is accumulated."""

import pkgutil

import numpy as np

import tests.conftest  # noqa: F401  the settings under which the numbers are compared
import windlass.models
from tests.training.test_step import MESHES, Bench

ALL = [*MESHES, (1, 1, 2), (1, 1, 4), (1, 4, 2)]


def prove() -> dict:
    families = sorted(module.name for module in pkgutil.iter_modules(windlass.models.__path__))
    worst = {}
    for family in families:
        expected = Bench(family, (1, 1, 1), 1).curve()
        for sizes in ALL:
            for microbatches in (1, 2):
                found = Bench(family, sizes, microbatches).curve()
                gap = np.abs(found / expected - 1).max(axis=0)
                name = f"{family} {'x'.join(map(str, sizes))} accumulation {microbatches}"
                worst[name] = {"loss": float(gap[0]), "gradient_norm": float(gap[1])}
    numbers = list(worst.values())
    return {
        "holds": all(max(gap.values()) < 1e-5 for gap in numbers),
        "steps": 10,
        "worst_loss": max(gap["loss"] for gap in numbers),
        "worst_gradient_norm": max(gap["gradient_norm"] for gap in numbers),
        "relative_differences": worst,
    }
