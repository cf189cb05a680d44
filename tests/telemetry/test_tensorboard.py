"""What TensorBoard sees of a run, read with TensorBoard's own reader."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import trained
from windlass.run_folder import folder as folders
from windlass.telemetry.metrics import Metrics, read

Points = dict[str, list[tuple[int, float, float]]]


def shown(folder: Path) -> Points:
    """Every point that TensorBoard would draw, by name: its step, time and value."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    return {
        name: [(point.step, point.wall_time, point.value) for point in reader.Scalars(name)]
        for name in reader.Tags()["scalars"]
    }


def recorded(path: Path) -> Points:
    """The same from the file of records."""
    points: Points = {}
    for record in read(path):
        step, time = record.pop("step"), record.pop("time")
        record.pop("token_hash", None)  # a hash is no curve
        for name, value in record.items():
            points.setdefault(name, []).append((step, time, value))
    return points


def same(found: Points, expected: Points) -> bool:
    assert set(found) == set(expected)
    return all(found[name] == [pytest.approx(point) for point in expected[name]] for name in found)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, first: int, last: int, scale: float = 1.0, at: float = 1000.0) -> None:
    """A start of a run after step `first`, as far as step `last`."""
    metrics = Metrics(path, clock=lambda: at)
    metrics.truncate(first)
    for step in range(first + 1, last + 1):
        metrics.write(step, {"loss": scale / step, "tokens": 100 * step})
        if step % 2 == 0:
            metrics.write(step, {"validation_loss": 2 * scale / step})


def test_a_run_shows_every_number_of_its_records(tmp_path_factory):
    run = trained.only_run(trained.workplace(tmp_path_factory))
    assert same(shown(run), recorded(run / folders.METRICS))


@pytest.mark.parametrize("at", [2000.0, 1000.0, 500.0])
def test_steps_that_are_taken_again_are_shown_once_whatever_the_clock_says(path, at):
    write(path, 0, 7)
    write(path, 3, 5, scale=10, at=at)
    write(path, 4, 6, scale=100, at=at)
    points = shown(path.parent)
    assert [step for step, _, _ in points["loss"]] == [1, 2, 3, 4, 5, 6]
    assert same(points, recorded(path))


def test_what_a_kill_cut_short_spoils_nothing_that_follows(path):
    write(path, 0, 6)
    (events,) = path.parent.glob("events.*")
    events.write_bytes(events.read_bytes()[:-5])
    write(path, 4, 6, scale=10)
    assert same(shown(path.parent), recorded(path))


def test_numbers_that_are_not_finite_are_shown(path):
    Metrics(path).write(1, {"loss": math.nan, "gradient_norm": math.inf})
    points = shown(path.parent)
    assert math.isnan(points["loss"][0][2]) and points["gradient_norm"][0][2] == math.inf


def test_a_sample_is_shown_as_text_that_no_markup_changes(path):
    metrics = Metrics(path)
    metrics.text(4, "sample", "# Once *upon*\na time")
    reader = EventAccumulator(str(path.parent))
    reader.Reload()
    (event,) = reader.Tensors("sample")
    assert event.step == 4
    assert event.tensor_proto.string_val[0].decode() == "    # Once *upon*\n    a time\n"
    assert reader.SummaryMetadata("sample").plugin_data.plugin_name == "text"


def test_writing_events_imports_neither_torch_nor_tensorflow(tmp_path):
    # TensorFlow is not installed here, and where it is it would be found.
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow/__init__.py").write_text("")
    script = (
        "import sys\nfrom pathlib import Path\nfrom windlass.telemetry.tensorboard import Events\n"
        "heavy = {'tensorboard', 'torch', 'tensorflow', 'grpc', 'jax'}\n"
        "print(*heavy & set(sys.modules))\n"
        f"events = Events(Path('{tmp_path}'))\n"
        "events.write(1, 2.0, {'loss': 3.0})\nevents.text(1, 2.0, 'sample', 'Once')\n"
        "print(*heavy & set(sys.modules))"
    )
    source = trained.environment()["PYTHONPATH"]
    environment = os.environ | {"PYTHONPATH": f"{source}:{tmp_path}"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "\ntensorboard\n"
