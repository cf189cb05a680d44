"""Killed with -9 again and again, inside saves too, a run ends with the same bits."""

import os
import tempfile
from pathlib import Path

from proofs import program
from tests.training.campaign import Program, killed, weights

CAMPAIGNS, KILLS = 3, 6


def prove() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= program.environment(folder)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(folder) / "compiled")
        undisturbed = Program(Path(folder) / "undisturbed")
        assert undisturbed.finish().code == 0
        expected = weights(undisturbed.run_dir)
        campaigns = []
        for seed in range(CAMPAIGNS):
            disturbed = Program(Path(folder) / str(seed))
            moments = killed(disturbed, KILLS, seed)
            assert disturbed.finish().code == 0
            found = weights(disturbed.run_dir)
            campaigns.append({"moments": moments, "same_bits": found == expected})
    return {
        "holds": all(campaign["same_bits"] for campaign in campaigns),
        "arrays_compared": len(expected) - 1,
        "campaigns": campaigns,
    }
