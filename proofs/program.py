"""How the proofs start the program: as a user would, with a cache of its own."""

import os
from pathlib import Path


def environment(folder: str | Path) -> dict[str, str]:
    path = [Path(__file__).parents[1], os.environ.get("PYTHONPATH", "")]
    ours = {"PYTHONPATH": os.pathsep.join(map(str, path)), "WINDLASS_CACHE": str(Path(folder))}
    return os.environ | ours | {"XLA_FLAGS": ""}
