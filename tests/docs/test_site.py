"""The documentation site: built without a warning, with links that lead somewhere."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
ATTRIBUTES = {"a": "href", "img": "src", "link": "href", "script": "src", "iframe": "src"}


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[tuple[str, str]] = []  # tag and address
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {name for key in ("id", "name") if (name := found.get(key))}
        if address := found.get(ATTRIBUTES.get(tag, "")):
            self.links.append((tag, address))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built strictly in a folder of its own."""
    place = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "zensical.toml", place)
    shutil.copytree(ROOT / "docs", place / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    done = build(place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr
    return place / "site"


def build(place: Path) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    return subprocess.run(words, cwd=place, capture_output=True, text=True)


def pages_of(entry: str | list | dict) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for one in entry if isinstance(entry, list) else entry.values():
            yield from pages_of(one)


def test_every_page_is_in_the_navigation_once():
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    listed = list(pages_of(project["nav"]))
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_every_link_leads_to_a_page_and_an_anchor_that_are_there(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    broken, seen = [], 0
    for path, page in pages.items():
        if path.name == "404.html":  # whose addresses begin at the root of a server
            continue
        for _, address in page.links:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            seen += 1
            known = pages[target].anchors if target in pages else set()
            is_there = target.is_file() and (not parts.fragment or unquote(parts.fragment) in known)
            if not is_there:
                broken.append(f"{path.name}: {address}")
    assert broken == []
    assert seen > 1000


def test_a_link_to_nowhere_and_to_no_anchor_fails_the_build(site, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# Start\n\n[a](none.md) [b](#none)\n")
    (tmp_path / "zensical.toml").write_text('[project]\nsite_name = "x"\n')
    done = build(tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("does not exist") + done.stdout.count("does not exist") >= 2


def test_no_page_fetches_anything_from_elsewhere(site):
    for path in site.rglob("*.html"):
        fetched = [address for tag, address in Page(path).links if tag != "a"]
        assert [address for address in fetched if urlsplit(address).netloc] == [], path.name
    assert not list(site.rglob("*.py"))


def test_the_picture_of_a_step_is_a_whole_document_with_a_description(site):
    picture = (site / "step.svg").read_text(encoding="utf-8")
    assert re.search(r"<title.*?>.+</title>", picture) and re.search(r"<desc.*?>.+</desc>", picture)
    assert 'src="step.svg"' in (site / "step.html").read_text(encoding="utf-8")
