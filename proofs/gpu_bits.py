"""On an NVIDIA GPU `train.deterministic` gives the same bits, twice and after a kill."""

import os
import signal
import tempfile
from pathlib import Path

from proofs import program
from proofs.gpu import STORIES
from tests.training.campaign import Program, weights

# Rows long enough for several blocks of attention to add to one gradient.
RECIPE = STORIES | {
    "data": STORIES["data"] | {"length": 1024},
    "train": STORIES["train"] | {"batch": 16},
    "checkpoint": {"every": 7},
}


def prove() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= program.environment(folder)

        def trained(name: str, *keys: str, killed: bool = False) -> dict:
            run = Program(Path(folder) / name, RECIPE)
            keys = ("device=gpu", *keys)
            if killed:
                run.disturb(lambda run: run.step >= 17, signal.SIGKILL, *keys)
            ended = run.finish(*keys)
            assert ended.code == 0, ended.output
            return weights(run.run_dir)

        exactly = "train.deterministic=true"
        first, second = trained("first", exactly), trained("second", exactly)
        resumed = trained("resumed", exactly, killed=True)
        loose = trained("loose"), trained("loose again")
    return {
        "holds": first == second == resumed,
        "arrays": len(first) - 1,
        "second_run_is_the_first": first == second,
        "killed_run_is_the_first": first == resumed,
        "without_it_runs_are_the_same": loose[0] == loose[1],
    }
