"""Each folder imports only from those above it: a cycle is what no edit of one file undoes."""

import ast
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import windlass

ORDER: Sequence[str] = (
    "errors version units files seal terminal markup chance dynamics doubly_stochastic columns "
    "puzzles teacher_cache config processes devices layers networks quantization models "
    "adapters residuals hub sources formats data preferences objectives optim checkpoint "
    "telemetry run run_folder program starting evaluation analysis planning training reports "
    "release launch api cli"
).split()
OPEN = ("models", "adapters", "residuals", "sources", "formats", "objectives", "optim")
MODELLING = ("windlass.layers", "windlass.networks", "windlass.models", "windlass.adapters")
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


def test_no_closed_room_has_more_than_two_dozen_files():
    rooms = {room: len(list((ROOT / room).glob("*.py"))) for room in ORDER if room not in OPEN}
    assert {room: files for room, files in rooms.items() if files > 24} == {}


def test_no_files_import_each_other_in_a_circle():
    modules = {_module(file): file for file in FILES}
    graph = {
        name: {one for full in imported(file.read_text()) if (one := _nearest(full, modules))}
        for name, file in modules.items()
        if file.parent != ROOT or file.stem != "__init__"  # the door imports when it is asked
    }
    TopologicalSorter({name: to - {name} for name, to in graph.items()}).prepare()


def _module(file: Path) -> str:
    return ".".join(("windlass", *file.relative_to(ROOT).with_suffix("").parts))


def _nearest(name: str, modules: dict[str, Path]) -> str | None:
    """The module that an imported name is, or stands in."""
    for one in (name, name.rpartition(".")[0]):
        for module in (one, f"{one}.__init__"):
            if module in modules:
                return module
    return None
