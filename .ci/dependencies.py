"""Licences and known vulnerabilities of what Windlass depends on.

python .ci/dependencies.py: every installed dependency, and what those depend on, has a licence that
goes with ours; and pip-audit knows nothing against the versions of requirements.lock.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
# What a program under Apache-2.0 may be used with and be distributed beside, unchanged.
SHIPPED = {
    *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "CNRI-Python", "ISC"),
    *("MIT", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib"),
}
# What only tests and checks use is given to nobody.
OURS = {*SHIPPED, "LGPL-2.1-or-later"}
# Older metadata have a classifier, or words, where newer ones have an SPDX expression.
CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "GNU Lesser General Public License v2 or later (LGPLv2+)": "LGPL-2.1-or-later",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
WORDS = {
    r"(the )?mit licen[cs]e\b": "MIT",
    r"apache( licen[cs]e| software licen[cs]e)?,?\s+(version )?2\.0": "Apache-2.0",
    r"3-clause bsd licen[cs]e": "BSD-3-Clause",
}
LONGEST_SECONDS = 60


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    problems = [
        *refused(project["dependencies"], SHIPPED),
        *refused([*project["dependencies"], *project["optional-dependencies"]["dev"]], OURS),
    ]
    for line in dict.fromkeys(problems):
        print(line)
    if not problems:
        print("licences: each is one that goes with Apache-2.0")
    found = vulnerabilities(ROOT / "requirements.lock")
    for line in found:
        print(line)
    return 1 if problems or found else 0


def refused(requirements: Iterable[str], allowed: set[str]) -> list[str]:
    """Installed dependencies whose licence is not allowed, or is not known."""
    return [
        f"{one.name} {one.version} has the licence {licence(one) or 'of nobody knows what'}, which "
        f"is none of {', '.join(sorted(allowed))}: do without it, or show in .ci/dependencies.py "
        "that it goes with ours"
        for one in installed(requirements)
        if not permits(licence(one), allowed)
    ]


def installed(requirements: Iterable[str]) -> Iterator[metadata.Distribution]:
    """The distributions that requirements and theirs name, where they are needed and installed."""
    waiting, seen = [Requirement(line) for line in requirements], set()
    while waiting:
        wanted = waiting.pop()
        key = (canonicalize_name(wanted.name), *sorted(wanted.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            found = metadata.distribution(wanted.name)
        except metadata.PackageNotFoundError:  # of another system, or of no lock of this one
            continue
        yield found
        for line in found.requires or ():
            further = Requirement(line)
            extras = ("", *wanted.extras)
            if further.marker is None or any(further.marker.evaluate({"extra": x}) for x in extras):
                waiting.append(further)


def licence(distribution: metadata.Distribution) -> str:
    """Licence as an SPDX expression; empty where there is nothing to go by."""
    about = distribution.metadata
    if expression := about.get("License-Expression"):
        return expression
    marks = [
        line.split(" :: ")[-1] for line in about.get_all("Classifier", []) if "License" in line
    ]
    marks = [mark for mark in marks if mark != "OSI Approved"]
    if marks:
        return " AND ".join(CLASSIFIERS.get(mark, mark) for mark in marks)
    text = about.get("License", "").strip()
    for words, name in WORDS.items():
        if re.match(words, text, re.IGNORECASE):
            return name
    return text.partition("\n")[0]


def permits(expression: str, allowed: set[str]) -> bool:
    """Test that all parts of an expression are allowed, or one of each choice without brackets."""
    return all(
        any(choice in allowed for choice in part.split(" OR "))
        for part in expression.split(" AND ")
    )


def vulnerabilities(lock: Path) -> list[str]:
    """Known vulnerabilities of locked versions; says so where they cannot be looked up."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(lock), "--require-hashes"]
    command += ["--disable-pip", "--format", "json", "--progress-spinner", "off", "--timeout", "5"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SECONDS)
        packages = json.loads(asked.stdout)["dependencies"]
    except subprocess.TimeoutExpired:
        print(f"vulnerabilities: NOT looked up, no answer in {LONGEST_SECONDS} seconds")
        return []
    except ValueError:  # it found nobody to ask, or is not there
        print(f"vulnerabilities: NOT looked up, {asked.stderr.strip().rpartition(chr(10))[2]}")
        return []
    known = [package for package in packages if "vulns" in package]
    are = "all" if len(known) == len(packages) else f"ONLY {len(known)} of"
    print(f"vulnerabilities: the data base has {are} {len(packages)} packages of {lock.name}")
    return [
        f"{package['name']} {package['version']} has {one['id']}, mended in "
        f"{' or '.join(one['fix_versions']) or 'no release'}; `make lock` takes newer versions"
        for package in known
        for one in package["vulns"]
    ]


if __name__ == "__main__":
    sys.exit(main())
