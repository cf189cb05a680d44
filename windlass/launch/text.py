"""YAML as a person would write it."""

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Text of several lines as it is, and lists one step in."""

    def increase_indent(self, flow: bool = False, indentless: bool = False):
        return super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None
    )


_Dumper.add_representer(str, _text)


def as_yaml(document: Any, command: str) -> str:
    """YAML of a document, under a comment that says what it is for."""
    body = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return f"# Written by windlass launch, for: {command}\n{body}"
