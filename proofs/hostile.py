"""Hostile files, names, templates and URLs get a clear message each: no traceback, no hang."""

import os
import tempfile
from pathlib import Path

from proofs import program
from tests import hostile, trained

SEED, EACH = 0, 46


def prove() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        home = os.getcwd()
        os.environ |= program.environment(folder)
        place = Path(folder) / "trained"
        place.mkdir()
        run = trained.train(place)
        try:
            outcomes = hostile.campaign(hostile.ground(Path(folder) / "place", run), SEED, EACH)
        finally:
            os.chdir(home)
    figures = hostile.figures(outcomes)
    return {"holds": figures["tried"] == figures["held"] and figures["tried"] >= 500, **figures}
