"""Names: a public class is defined once, and things are found by the words of the field."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import windlass

ROOT = Path(windlass.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# The name that the contract of an open room gives to the class in each of its files.
CONTRACTS = {"Adapter", "Config", "Format", "Objective", "Optimizer", "Residual", "Rule", "Source"}
QUESTION = re.compile(r"(What|Whether|How|Which|Why|Who|Where|When)\b")
# Words that are nobody's but ours, where the field has one.
OURS = re.compile(
    r"\b(is_of_words|Habits|heap|donor|Tokeniser|prompt reader|token writer|write on from|"
    r"speak to each other|what devices do together|reckon\w*|key that wins|places left empty)\b"
)


# Everything that can tell somebody what to install; `windlass` in the index is another project.
SAID = ("*.py", "*.md", "*.yaml", "*.toml", "*.html", "*.sh", "Makefile")
FOREIGN = re.compile(r"""pip install [^\n`]*?(?<![\w/.-])windlass(?!-lm)(?=[\s`'"\[=@]|$)""")


def test_nobody_is_told_to_install_the_package_of_another_project():
    places = [ROOT, *(ROOT.parent / name for name in ("docs", "benchmarks", "proofs"))]
    said = [file for place in places for kind in SAID for file in place.rglob(kind)]
    said += [file for kind in SAID for file in ROOT.parent.glob(kind)]
    assert len(said) > 200
    assert [str(file) for file in said if FOREIGN.search(file.read_text())] == []


@pytest.mark.parametrize("text", ["pip install windlass", "uv pip install -q 'windlass[tpu]'"])
def test_the_name_of_another_project_is_noticed(text):
    assert FOREIGN.search(text) and not FOREIGN.search(text.replace("windlass", "windlass-lm"))


def defined(file: Path, *kinds: type) -> Iterator:
    """Definitions of some kinds in a file, at any depth."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, kinds):
            yield node


def test_a_public_class_name_is_defined_once():
    names = Counter(
        node.name
        for file in FILES
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} <= CONTRACTS


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstrings_open_with_a_noun_and_text_has_the_words_of_the_field(file):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in defined(file, *documented)]
    assert [text for text in docstrings if QUESTION.match(text)] == []
    assert OURS.findall(file.read_text()) == []
