"""Sections of a recipe, as keywords of a call."""

from typing import Any

from windlass.config.sections import fields
from windlass.run import Run


def sections(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of a call that are sections of a recipe, and the others."""
    names = options.keys() & {*fields(Run), "by_device"}
    others = {name: value for name, value in options.items() if name not in names}
    return {name: options[name] for name in options if name in names}, others
