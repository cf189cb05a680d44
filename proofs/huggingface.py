"""Every family, written by transformers, is the same model here on every mesh, and there again."""

import tempfile
from pathlib import Path

import numpy as np

import tests.conftest  # noqa: F401  the settings under which the numbers are compared
from tests.hub import folders
from tests.hub.test_round_trip import answers, built, export, logits, taken
from tests.models import reference

MESHES = ((1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 2), (2, 2, 2))


def prove() -> dict:
    differences = {}
    for case in folders.CASES:
        config, expected = reference.config(case), reference.recorded(case).logits
        for sizes in MESHES:
            with tempfile.TemporaryDirectory() as place:
                came = folders.write(case, Path(place, "came"))
                here = built(came, sizes)
                with here.described.scope():
                    model = taken(here)
                    inward = logits(model, config)
                    out = export(model, here, Path(place, "out"), shard_bytes=30_000)
                differences[f"{case} on {'x'.join(map(str, sizes))}"] = {
                    "in": float(np.abs(inward - expected).max()),
                    "out": float(np.abs(answers(out, config) - expected).max()),
                }
    worst = max(max(gap.values()) for gap in differences.values())
    return {"holds": worst < 1e-5, "worst": worst, "differences_of_logits": differences}
