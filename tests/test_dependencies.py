"""Dependencies: locked in versions that the bounds allow, under licences that go with ours."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE, DEV = PROJECT["dependencies"], PROJECT["optional-dependencies"]["dev"]
LOCKS = {"requirements.lock": CORE, "requirements-dev.lock": [*CORE, *DEV]}

_spec = importlib.util.spec_from_file_location("dependencies", ROOT / ".ci" / "dependencies.py")
assert _spec is not None and _spec.loader is not None
dependencies = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(dependencies)


def locked(name: str) -> dict[str, str]:
    """The versions of a lock file, by name."""
    lines = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    found = {}
    for line in lines:
        if not line.strip().startswith("#"):
            requirement, *hashes = re.split(r"\s+--hash=sha256:", line.strip())
            assert hashes and all(re.fullmatch("[0-9a-f]{64}", one) for one in hashes), line
            parsed = Requirement(requirement)
            (bound,) = parsed.specifier
            assert canonicalize_name(parsed.name) not in found, f"{parsed.name} stands there twice"
            found[canonicalize_name(parsed.name)] = bound.version
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_has_every_dependency_in_a_version_that_its_bounds_allow(name):
    versions = locked(name)
    for wanted in map(Requirement, LOCKS[name]):
        version = versions[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(version), f"{wanted}: {name} has {version}; `make lock`"


def test_both_lock_files_have_the_same_versions_of_what_both_have():
    core, dev = (locked(name) for name in LOCKS)
    assert core.items() <= dev.items()


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_names_no_index(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not re.search(r"://|^\s*(-i|-f|--(extra-)?index-url|--find-links)\b", text, re.MULTILINE)


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """A function that installs a distribution with some lines in its metadata."""

    def make(name: str, *lines: str) -> str:
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        about = ["Metadata-Version: 2.4", f"Name: {name}", "Version: 1.0", *lines]
        (folder / "METADATA").write_text("\n".join(about) + "\n")
        return name

    monkeypatch.syspath_prepend(tmp_path)
    return make


def test_a_dependency_of_a_dependency_under_a_forbidden_licence_is_refused(made_up):
    made_up("deep", "License-Expression: AGPL-3.0-only")
    top = made_up("top", "License-Expression: MIT", 'Requires-Dist: deep; extra == "all"')
    assert dependencies.refused([top], {"MIT"}) == []
    assert dependencies.refused([f"{top}[all]"], {"MIT", "ISC"}) == [
        "deep 1.0 has the licence AGPL-3.0-only, which is none of ISC, MIT: do without it, or show "
        "in .ci/dependencies.py that it goes with ours"
    ]


@pytest.mark.parametrize(
    ("lines", "licence"),
    [
        (["License-Expression: MIT OR GPL-2.0-only"], "MIT OR GPL-2.0-only"),
        (["Classifier: License :: OSI Approved :: Apache Software License"], "Apache-2.0"),
        (["License: The MIT License (MIT)"], "MIT"),
        (["License: Apache License, Version 2.0"], "Apache-2.0"),
    ],
)
def test_a_licence_is_read_from_newer_and_older_metadata(made_up, lines, licence):
    assert dependencies.refused([made_up("one", *lines)], {"MIT", "Apache-2.0"}) == []
    (found,) = dependencies.installed(["one"])
    assert dependencies.licence(found) == licence


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["License-Expression: MIT AND GPL-2.0-only"],
        ["License-Expression: (MIT OR GPL-2.0-only) AND SSPL-1.0"],
        ["Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)"],
        ["Classifier: License :: Other/Proprietary License"],
    ],
)
def test_a_licence_that_is_not_known_or_not_wholly_allowed_is_refused(made_up, lines):
    (said,) = dependencies.refused([made_up("one", *lines)], {"MIT"})
    assert said.startswith("one 1.0 has the licence ")


def test_all_that_is_installed_has_a_licence_that_goes_with_ours():
    assert dependencies.refused(CORE, dependencies.SHIPPED) == []
    assert dependencies.refused([*CORE, *DEV], dependencies.OURS) == []


def test_what_cannot_be_looked_up_is_said_and_is_no_vulnerability(capsys, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # where nobody answers
    assert dependencies.vulnerabilities(ROOT / "requirements.lock") == []
    assert capsys.readouterr().out.startswith("vulnerabilities: NOT looked up, ")
