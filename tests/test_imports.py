"""Each folder imports only from those above it: a cycle is what no edit of one file undoes."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import windlass

ORDER: Sequence[str] = (
    "errors version units files config processes devices layers models adapters residuals hub "
    "sources formats data objectives optim checkpoint telemetry run run_folder program starting "
    "evaluation analysis planning training reports release launch api cli"
).split()
MODELLING = ("windlass.layers", "windlass.models", "windlass.adapters")
FILES_OF_MODELS = tuple(f"windlass.hub.{name}" for name in ("config", "names", "peft", "weights"))
NEVER = {
    "sources": {*MODELLING, *FILES_OF_MODELS},
    "formats": {*MODELLING, *FILES_OF_MODELS},
    "data": {*MODELLING, *FILES_OF_MODELS},
    "models": {"windlass.devices.mesh", "windlass.devices.selection"},
}
ROOT = Path(windlass.__file__).parent
FILES = sorted(file for file in ROOT.rglob("*.py") if not file.name.startswith("__main__"))


def imported(text: str) -> Iterator[str]:
    """The modules of this package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith("windlass."))


def out_of_order(room: str, text: str) -> list[str]:
    """What a file of a folder imports that lies below it, or that it may never import."""
    found = []
    for name in imported(text):
        other = name.split(".")[1]
        below = other in ORDER and ORDER.index(other) > ORDER.index(room)
        if below or any(name.startswith(banned) for banned in NEVER.get(room, ())):
            found.append(name)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_imports_only_from_the_folders_above_its_own(file):
    room = file.relative_to(ROOT).with_suffix("").parts[0]
    if room == "__init__":
        return  # the door: what it names is imported when asked for
    assert room in ORDER, f"{room} has no place in the order of folders"
    assert out_of_order(room, file.read_text()) == []


def test_an_import_from_below_is_found_wherever_it_stands():
    text = "def later():\n    from windlass.training import loop\n    import windlass.errors\n"
    assert out_of_order("models", text) == ["windlass.training.loop"]
    assert out_of_order("models", "from windlass.devices import mesh") == ["windlass.devices.mesh"]
    assert out_of_order("data", "import windlass.layers.head") == ["windlass.layers.head"]
    assert out_of_order("objectives", "import windlass.layers.head") == []
