"""Things as somebody else would add them: a file each, in the folder of its open set.

Importing this puts them beside those that ship, and a recipe of `recipes/` uses each.
"""

from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
SETS = ("models", "sources", "formats", "objectives", "optim", "adapters", "residuals")

for name in SETS:
    if (HERE / name).is_dir():
        import_module(f"windlass.{name}").__path__.append(str(HERE / name))
