"""Reports in a real browser: drawn, silent, readable at any width, and live."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import browser as browsers
from tests import trained
from tests.browser import Browser
from windlass import api
from windlass.telemetry import metrics

pytestmark = pytest.mark.skipif(
    browsers.CHROMIUM is None or browsers.DRIVER is None, reason=browsers.MISSING
)
# Starts of a run: killed, stopped, killed, and running to its end.
STARTS = ((0, 3, "", 1), (2, 3, "stopped", 2), (3, 4, "", 3), (3, 4, "finished", 4))
WIDTHS = (390, 1400)


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browsers.browser() as found:
        yield found


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return trained.workplace(tmp_path_factory)


@pytest.fixture(scope="module")
def pages(place, tmp_path_factory) -> Path:
    """A folder with the page of a run of four starts, and of its comparison with another."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("one", "two"):
        shutil.copytree(trained.only_run(place), folder / name)
    run = folder / "one"
    (run / "phases.jsonl").write_text("".join(_lines()))
    (run / "samples.txt").write_text("--- step 2\nOnce\n--- step 4\nOnce <b>upon</b> a time\n")
    api.report(run)
    api.compare(run, folder / "two", page=folder / "compared.html")
    return folder


def _lines() -> Iterator[str]:
    for first, last, ending, number in STARTS:
        about = {"start": number, "began": 1000.0 * number}
        yield json.dumps(about | {"step": first, "phase": "compile", "seconds": 60.0}) + "\n"
        steps = {"phase": "steps", "seconds": 240.0, "first": first, "waited": 12.0}
        yield json.dumps(about | {"step": last, "began": about["began"] + 60.0} | steps) + "\n"
        if ending:
            end = {"phase": "end", "began": about["began"] + 300.0, "seconds": 0.0}
            yield json.dumps(about | {"step": last, "ending": ending} | end) + "\n"


def opened(window: Browser, page: Path, width: int) -> None:
    """Open a page at a width, and forget what others logged."""
    window.resize(width)
    window.forget()
    window.open(page)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["one/report.html", "compared.html"])
def test_all_plots_are_drawn_without_an_error_or_a_request(window, pages, name, width):
    opened(window, pages / name, width)
    boxes = window.ask(
        "Array.from(document.querySelectorAll('.plot polyline:not(.single), .bar .part'), "
        "x => { const b = x.getBoundingClientRect(); return [b.width, b.height] })"
    )
    assert len(boxes) > 10 and all(width + height > 0 for width, height in boxes)
    lines = window.ask(
        "Array.from(document.querySelectorAll('.plot'), x => x.querySelectorAll('polyline').length)"
    )
    assert lines == ([2, 1, 1] if name == "one/report.html" else [2, 2, 2, 2])
    assert window.errors() == []
    assert window.requests() == [(pages / name).as_uri()]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["one/report.html", "compared.html"])
def test_a_page_fits_its_window_and_can_be_read(window, pages, name, width):
    opened(window, pages / name, width)
    assert window.ask("document.documentElement.scrollWidth") <= width
    out = window.ask(
        "Array.from(document.querySelectorAll('main *'))"
        ".filter(x => !x.closest('.scroll, pre, .unseen, svg') && x.offsetParent)"
        ".filter(x => x.getBoundingClientRect().right > innerWidth + 1).map(x => x.outerHTML)"
    )
    assert out == []
    sizes = window.ask(
        "Array.from(document.querySelectorAll('main *')).filter(x => x.innerText && x.offsetParent)"
        ".map(x => parseFloat(getComputedStyle(x).fontSize))"
    )
    assert min(sizes) >= 12


def test_the_restarts_of_a_run_are_shown(window, pages):
    opened(window, pages / "one" / "report.html", 1400)
    rows = window.ask(
        "Array.from(document.querySelectorAll('tr'), x => Array.from(x.cells, y => y.innerText))"
    )
    starts = [row for row in rows if len(row) == 7]
    assert [[row[0], row[2], row[3]] for row in starts[1:]] == [
        ["1", "0 to 3", "killed (steps)"],
        ["2", "2 to 3", "stopped"],
        ["3", "3 to 4", "killed (steps)"],
        ["4", "3 to 4", "finished"],
    ]
    # 228 s of steps in each start; a third of the first, and all of the third, were taken again.
    assert [row[5] for row in starts[1:]] == ["50.7%", "76.0%", "0.0%", "76.0%"]
    assert [row[6] for row in starts[2:]] == ["11m40s"] * 3
    assert window.ask("document.querySelectorAll('.plot .restart').length") > 0
    samples = window.ask("document.querySelector('.samples pre').innerText")
    assert samples == "Once <b>upon</b> a time"


def test_a_pointer_and_the_arrow_keys_read_values(window, pages):
    opened(window, pages / "one" / "report.html", 1400)
    records = metrics.read(pages / "one" / "metrics.jsonl")
    losses = {one["step"]: f"{one['loss']:.4g}" for one in records if "loss" in one}
    box = window.ask("document.querySelector('.plot').getBoundingClientRect().toJSON()")
    window.point(box["left"] + box["width"] - 3, box["top"] + 50)
    assert f"loss {losses[4]}" in window.ask("document.querySelector('.tip').innerText")
    window.point(5, 5)
    assert window.ask("document.querySelectorAll('.tip').length") == 0
    window.ask("document.querySelector('.plot').focus()")
    for key, step in (("Home", 1), ("ArrowRight", 2)):
        window.press(key)
        said = window.ask("document.activeElement.getAttribute('aria-valuetext')")
        assert said.startswith(f"step {step}, loss {losses[step]}")
    window.press("Tab")
    assert window.ask("document.activeElement.tagName") == "SUMMARY"
    assert window.ask("document.querySelectorAll('.tip').length") == 0


def test_a_page_is_dark_where_that_is_wanted_and_has_names_for_a_screen_reader(window, pages):
    opened(window, pages / "one" / "report.html", 1400)
    color = "getComputedStyle(document.body).backgroundColor"
    light = window.ask(color)
    window.dark(True)
    assert window.ask(color) != light
    window.dark(False)
    nodes = window.tell("Accessibility.getFullAXTree")["nodes"]
    named = {(one["role"]["value"], one.get("name", {}).get("value")) for one in nodes}
    assert ("slider", "Loss over steps") in named and ("heading", "Starts") in named
    pictures = {name for role, name in named if role in ("image", "img")}
    assert pictures and all(pictures)


@pytest.mark.long
def test_a_live_page_follows_a_running_training(window, place, tmp_path):
    shutil.copy(place / trained.CORPUS, tmp_path)
    shutil.copy(place / "tiny.yaml", tmp_path)
    words = ["tiny.yaml", "train.steps=1000000", "run.dir=live", "telemetry.every=1"]
    keys = [*words, "train.evaluate_every=1000000"]
    with _started(tmp_path, "train", *keys) as trainer:
        file = tmp_path / "live" / "metrics.jsonl"
        browsers.wait(lambda: file.exists() and file.read_bytes().count(b"\n") > 2, 300, "steps")
        with _started(tmp_path, "report", "live", "--watch") as server:
            assert server.stdout is not None
            url = re.findall(r"live at (\S+) on", server.stdout.readline())[0]
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
            _follows(window, url)
            server.send_signal(signal.SIGINT)
            said, _ = server.communicate(timeout=60)
            assert (server.returncode, said) == (0, "\nstopped; the run is not touched by this\n")
        window.until("document.querySelector('.live').innerText.startsWith('not connected')")
        trainer.send_signal(signal.SIGINT)
        assert trainer.wait(300) == 130


def _follows(window: Browser, url: str) -> None:
    """Open a live page, and see it come to later steps by itself, with what was unfolded open."""
    window.resize(1400)
    window.forget()
    window.open(url)
    window.ask("document.querySelector('main details').open = true")
    step = "+document.querySelector('.lead').innerText.replace(/,/g, '').match(/step (\\d+)/)[1]"
    first = window.ask(step)
    window.until(f"{step} > {first + 3}")
    assert "training at step" in window.ask("document.querySelector('.lead').innerText")
    assert window.ask("document.querySelector('main details').open")
    assert window.ask("document.querySelector('.live').innerText") == "live"
    assert window.errors() == [] and {*window.requests()} == {url}


@contextmanager
def _started(folder: Path, *words: str) -> Iterator[subprocess.Popen]:
    """A command that does not outlive the block."""
    command = [sys.executable, "-u", "-m", "windlass", *words]
    about = {"cwd": folder, "env": trained.environment(), "text": True}
    # Nobody reads what a trainer prints, and a full pipe would stop it.
    output = subprocess.DEVNULL if words[0] == "train" else subprocess.PIPE
    with subprocess.Popen(command, stdout=output, **about) as process:
        try:
            yield process
        finally:
            process.kill()
