"""Names that a shell completes: recipes and runs, found without importing what would open them."""

import glob
from collections.abc import Iterator
from pathlib import Path

from windlass.config import shipped

RUNS = "runs/*/recipe.yaml"


def recipes(incomplete: str) -> Iterator[str]:
    """Recipes that ship with the package, and YAML files."""
    yield from (name for name in shipped() if name.startswith(incomplete))
    yield from sorted(glob.glob(f"{glob.escape(incomplete)}*.y*ml"))


def runs(incomplete: str) -> Iterator[str]:
    """Runs in ./runs, by name or by folder, whichever was begun."""
    folders = [path.parent for path in sorted(Path().glob(RUNS))]
    names = [str(path) if "/" in incomplete else path.name for path in folders]
    yield from (name for name in names if name.startswith(incomplete))
