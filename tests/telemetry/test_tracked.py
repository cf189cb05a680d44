"""Numbers of a run in the stores of real trackers: Weights & Biases offline, and Trackio."""

import importlib.util
import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import trained
from tests.telemetry.test_tensorboard import shown
from windlass.run_folder import folder as folders
from windlass.run_folder import runs
from windlass.telemetry import TRACKERS, metrics, panels, trackers

MISSING = [name for name in TRACKERS if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} not installed: {trackers.EXTRA}"
)

Points = dict[str, dict[int, float]]
BLOCK, HEADER = 2**15, 7  # of a log of LevelDB, which a file of wandb is


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a run that was stopped at step 3, and resumed to step 4, in both trackers."""
    place = tmp_path_factory.mktemp("tracked")
    trained.write_corpus(place / trained.CORPUS, trained.DOCUMENTS)
    recipe = trained.recipe(
        telemetry={"every": 1, "trackers": [*TRACKERS], "project": "ours"},
        train={"evaluate_every": 2, "sample": "Once", "sampling": {"tokens": 4}},
        run={"dir": "run"},
    )
    (place / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("TRACKIO_DIR", str(place / "trackio"))
        patch.delenv("WANDB_PROJECT", raising=False)
        for steps in (3, 4):
            said = trained.windlass(place, "train", "tiny.yaml", f"train.steps={steps}").stdout
            (place / f"said-{steps}").write_text(said)
    return place


def recorded(run: Path) -> Points:
    points: Points = {}
    for record in metrics.read(run / folders.METRICS):
        for name, value in panels.curves(record).items():
            points.setdefault(name, {})[record["step"]] = value
    return points


def in_tensorboard(run: Path) -> Points:
    return {name: {step: value for step, _, value in points} for name, points in shown(run).items()}


def in_trackio(place: Path) -> tuple[Points, dict[str, Any], set[str], dict[str, list[str]]]:
    """Points, keys, names of runs, and media by name."""
    points: Points = {}
    media: dict[str, list[str]] = {}
    with sqlite3.connect(place / "trackio" / "ours.db") as store:
        rows = store.execute("select run_name, step, metrics from metrics").fetchall()
        ((config,),) = store.execute("select config from configs").fetchall()
    store.close()
    for _, step, text in rows:
        for name, value in json.loads(text).items():
            if isinstance(value, dict):
                file = place / "trackio" / "media" / value["file_path"]
                media.setdefault(name, []).append(file.read_text())
            else:
                assert step not in points.setdefault(name, {}), f"{name} of step {step} twice"
                points[name][step] = value
    return points, json.loads(config), {name for name, *_ in rows}, media


def in_wandb(run: Path) -> tuple[Points, list[Any]]:
    """Points of all starts, and the record of each."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    points: Points = {}
    starts = []
    for file in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        for content in log_of(file.read_bytes()):
            record = messages.Record.FromString(content)
            if record.WhichOneof("record_type") == "run":
                starts.append(record.run)
            items = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
                if len(item.nested_key) < 2  # the others are of files
            }
            for name, value in items.items():
                if not name.startswith("_") and isinstance(value, int | float):
                    step = int(items["_step"])
                    assert step not in points.setdefault(name, {}), f"{name} of step {step} twice"
                    points[name][step] = value
    return points, starts


def log_of(content: bytes) -> Iterator[bytes]:
    """The records of a log of LevelDB; the file of wandb has a header of its own before them."""
    at, whole = HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:  # no room for a header: the rest of a block is empty
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # full, or the last part
            yield whole
            whole = b""


def same(found: Points, expected: Points) -> bool:
    assert {*found} == {*expected}
    return all(found[name] == pytest.approx(expected[name]) for name in expected)


def test_every_tracker_has_the_numbers_of_the_records(place):
    run = place / "run"
    expected = recorded(run)
    assert [*expected["train/loss"]] == [1, 2, 3, 4] and {*expected["eval/loss"]} == {2, 3, 4}
    points, _, _, _ = in_trackio(place)
    assert same(points, expected)
    points, _ = in_wandb(run)
    assert same(points, expected)
    assert same(in_tensorboard(run), expected)


def test_a_resumed_run_is_the_same_run_in_every_tracker(place):
    stored = json.loads((place / "run" / trackers.NAME).read_text())
    assert stored["has"] == [*TRACKERS]
    _, _, names, _ = in_trackio(place)
    assert names == {f"run-{stored['id']}"}
    _, starts = in_wandb(place / "run")
    assert {start.run_id for start in starts} == {stored["id"]}
    assert {(start.project, start.display_name) for start in starts} == {("ours", "run")}


def test_hyperparameters_samples_and_the_report_are_sent(place):
    _, config, _, media = in_trackio(place)
    assert config["model.family"] == "qwen3" and config["optim.learning_rate"] == 3.6e-3
    assert len(media["sample"]) == 3 and all("<pre>Once" in text for text in media["sample"])
    assert "finished at step 4 of 4" in media["report"][-1]
    _, starts = in_wandb(place / "run")
    sent = {item.key: json.loads(item.value_json) for item in starts[-1].config.update}
    assert sent["model"]["family"] == "qwen3" and sent["train"]["steps"] == 4
    pages = [
        file.read_text() for file in (place / "run" / "wandb").glob("offline*/files/media/*/*")
    ]
    assert any("<pre>Once" in text for text in pages)
    assert any("finished at step 4 of 4" in text for text in pages)


def test_a_run_tells_where_its_trackers_have_it_and_prints_nothing_of_theirs(place):
    said = (place / "said-4").read_text()
    assert "wandb        offline; `wandb sync " in said
    assert "trackio      `trackio show --project ours` shows it as run-" in said
    assert "warning" not in said and "wandb:" not in said and "* " not in said


def test_what_trackers_left_in_the_folder_goes_with_the_run(place):
    left = [path.name for path in (place / "run").iterdir()]
    written = {file.name for glob in runs.WRITTEN for file in (place / "run").glob(glob)}
    assert {*left} == written and {trackers.NAME, trackers.WANDB_FOLDER} <= written
