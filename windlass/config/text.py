"""YAML as recipes use it: words are words, numbers are numbers, and no key is given twice."""

import re
from typing import Any

import yaml

from windlass.errors import UserError

# YAML 1.1 reads `no` as false, `3e-4` as text, `1:30` as ninety and `010` as eight. Here a plain
# word is text unless it is null, true, false or a decimal number, in reading and in writing.
_NUMBER = r"[-+]?(?:0|[1-9][0-9_]*)"
_PLAIN = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (_NUMBER, list("-+0123456789")),
    "float": (
        rf"(?:{_NUMBER}(?:\.[0-9]*)?|[-+]?\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        list("-+.0123456789"),
    ),
}


LONGEST = 2**18  # characters of a recipe: the parser reads some 100,000 a second
SHOWN = 100  # characters of a line on either side of what does not parse
MOST = 5_000  # values of a recipe; one that is repeated by an alias counts each time


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}
    left = MOST  # values that may still be built


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind, (_pattern, _first) in _PLAIN.items():
    for _one in (_Loader, _Dumper):
        _one.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), _first
        )


def scalar(text: str) -> Any:
    """A plain word as YAML would read it."""
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    try:
        return loader.construct_object(yaml.ScalarNode(tag, text))
    except ValueError:  # a number of more digits than Python reads
        return text


def parse(text: str, origin: str) -> tuple[Any, list[tuple[str, str]]]:
    """The data in a YAML text, and the keys that are given twice."""
    problems: list[tuple[str, str]] = []
    if len(text) > LONGEST:
        raise UserError(
            f"{origin} has {len(text):,} characters, and a recipe a few thousand; at most "
            f"{LONGEST:,} are read"
        )
    if (brackets := text.count("[") + text.count("{")) > MOST:
        # The parser takes the square of their depth.
        raise UserError(f"{origin} has {brackets:,} brackets that open; {MOST:,} are read at most")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        loader.left = MOST
        return (None if node is None else _build(loader, node, (), problems)), problems
    except RecursionError:
        raise UserError(f"{origin} does not parse: it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        assert error.problem_mark is not None
        line, column = error.problem_mark.line, error.problem_mark.column
        source = text.splitlines()[line] if line < len(text.splitlines()) else ""
        begin = max(0, column - SHOWN)  # a line may be as long as the file
        raise UserError(
            f"{origin} does not parse: line {line + 1}, column {column + 1}: {error.problem}\n"
            f"  {source[begin : column + SHOWN]}\n  {' ' * (column - begin)}^"
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise UserError(
            f"{origin} does not parse: line {line}, column {column}: "
            f"character {error.character:#x} is not text"
        ) from None


def _build(loader: _Loader, node: Any, path: tuple[str, ...], problems: list) -> Any:
    loader.left -= 1
    if loader.left < 0:
        # Of aliases that stand for aliases a few lines unfold to more than any memory holds, and
        # one that stands for itself without end.
        what = f"with its aliases it holds more than {MOST:,} values"
        raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        items = enumerate(node.value)
        return [_build(loader, item, (*path, str(i)), problems) for i, item in items]
    if not isinstance(node, yaml.MappingNode):
        return _value(loader, node)
    built, lines = {}, {}
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a key is a word", problem_mark=name.start_mark)
        key, line = name.value, name.start_mark.line + 1
        here = (*path, key)
        if key in lines:
            problems.append((".".join(here), f"is given twice, on lines {lines[key]} and {line}"))
            continue
        lines[key] = line
        built[key] = _build(loader, value, here, problems)
    return built


def _value(loader: _Loader, node: yaml.ScalarNode) -> Any:
    try:
        return loader.construct_object(node)
    except (ValueError, TypeError, AttributeError, LookupError):  # of a date that is none, and such
        kind = node.tag.rpartition(":")[2]
        what = f"{node.value[:60]} cannot be read as {kind}"
        raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark) from None


def write(tree: Any) -> str:
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def write_inline(value: Any) -> str:
    """Value in flow style, which reads back the same as the value of a `key=value`."""
    listed = yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True,
        width=float("inf"),
    )  # fmt: skip
    return listed.strip()[1:-1]
