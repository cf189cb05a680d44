"""What `make docs` writes is kept with the source it is written from."""

import json
from importlib import import_module
from pathlib import Path

from docs import write
from tests import strangers

FOLDER = Path(__file__).parents[2] / "docs"


def test_the_documents_say_what_the_source_says(monkeypatch):
    there = [name for name in strangers.SETS if (strangers.HERE / name).is_dir()]
    for name in there:  # without what only tests have
        room = import_module(f"windlass.{name}")
        monkeypatch.setattr(room, "__path__", list(room.__path__)[:1])
    for name, text in write.pages().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, "run make docs"


def test_every_key_of_the_schema_is_in_the_reference():
    reference = (FOLDER / "reference.md").read_text(encoding="utf-8")
    schema = json.loads((FOLDER / "recipe.schema.json").read_text(encoding="utf-8"))
    del schema["properties"]["by_device"]
    missing = [key for key in _keys(schema) if f"| `{key}` |" not in reference]
    assert missing == []


def _keys(schema: dict, at: str = "") -> set[str]:
    """The full keys of all plain values, whichever member of an open set has them."""
    found = set()
    for name, entry in schema.get("properties", {}).items():
        key = f"{at}.{name}" if at else name
        choices = [one for one in entry.get("anyOf", [entry]) if "properties" in one]
        for one in choices:
            found |= _keys(one, key)
        if not choices and "const" not in entry and at:
            found.add(key)
    return found
