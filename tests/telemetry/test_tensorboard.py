"""What TensorBoard sees of a run, read with TensorBoard's own reader."""

import math
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import trained
from windlass.run_folder import folder as folders
from windlass.telemetry import event_file, panels
from windlass.telemetry.metrics import MEANINGS, Metrics, read

Points = dict[str, list[tuple[int, float, float]]]
# Classes that protobuf makes when they are imported, and a type checker does not see.
EVENT = import_module("tensorboard.compat.proto.event_pb2")
HPARAMS = import_module("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData
SUCCESS = import_module("tensorboard.plugins.hparams.api_pb2").Status.Value("STATUS_SUCCESS")


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
        step, time = record["step"], record["time"]
        for name, value in panels.curves(record).items():
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
    assert [step for step, _, _ in points["train/loss"]] == [1, 2, 3, 4, 5, 6]
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
    assert math.isnan(points["train/loss"][0][2]) and points["train/grad_norm"][0][2] == math.inf


def test_numbers_that_float32_cannot_hold_are_infinite(path):
    Metrics(path).write(1, {"loss": 1e300, "tokens": -(10**60), "mfu": 1e-60})
    points = shown(path.parent)
    assert [points[name][0][2] for name in ("train/loss", "train/tokens", "perf/mfu")] == [
        *(math.inf, -math.inf, 0.0)
    ]


def test_a_sample_is_shown_as_text_that_no_markup_changes(path):
    metrics = Metrics(path)
    metrics.text(4, "sample", "# Once *upon*\na time")
    reader = EventAccumulator(str(path.parent))
    reader.Reload()
    (event,) = reader.Tensors("sample")
    assert event.step == 4
    assert event.tensor_proto.string_val[0].decode() == "    # Once *upon*\n    a time\n"
    assert reader.SummaryMetadata("sample").plugin_data.plugin_name == "text"


def test_a_text_may_hold_any_character_and_any_length(path):
    text = "\u2603 half a pair \ud800 " + "x" * 100_000
    Metrics(path).text(300, "sample", text)
    reader = EventAccumulator(str(path.parent))
    reader.Reload()
    (event,) = reader.Tensors("sample")
    shown = event.tensor_proto.string_val[0].decode()
    assert event.step == 300 and shown == f"    {text}\n".replace("\ud800", "?")


def test_an_event_is_what_the_messages_of_tensorboard_make_of_it():
    values = [event_file.scalar("train/loss", 0.5), event_file.text("sample", "Once")]
    event = EVENT.Event.FromString(event_file.summary(12.25, 2**40, *values))
    assert (event.wall_time, event.step) == (12.25, 2**40)
    number, text = event.summary.value
    assert (number.tag, number.simple_value) == ("train/loss", 0.5)
    assert (text.tag, text.tensor.dtype, [*text.tensor.string_val]) == ("sample", 7, [b"Once"])
    assert text.metadata.plugin_data.plugin_name == "text"
    first = EVENT.Event.FromString(event_file.event(1.0, version=event_file.VERSION))
    assert first.file_version == "brain.Event:2" and first.WhichOneof("what") == "file_version"
    start = EVENT.Event.FromString(event_file.event(1.0, 7, start=True))
    assert (start.step, start.session_log.status) == (7, EVENT.SessionLog.START)


def hparams(folder: Path, tag: str) -> Any:
    reader = EventAccumulator(str(folder))
    reader.Reload()
    content = reader.PluginTagToContent("hparams")
    return HPARAMS.FromString(content[f"_hparams_/{tag}"])


def test_a_run_shows_its_keys_as_hyperparameters_and_its_end(tmp_path_factory):
    run = trained.only_run(trained.workplace(tmp_path_factory))
    start = hparams(run, "session_start_info").session_start_info
    assert start.hparams["optim.learning_rate"].number_value == pytest.approx(3.6e-3)
    assert start.hparams["model.family"].string_value == "qwen3"
    assert start.hparams["train.deterministic"].WhichOneof("kind") == "bool_value"
    assert start.hparams["train.sample"].string_value == "null"
    assert start.hparams["parameters.total"].number_value > 1000
    end = hparams(run, "session_end_info").session_end_info
    assert end.status == SUCCESS and end.end_time_secs > 1e9


def test_a_run_shows_the_report_of_its_end(tmp_path_factory):
    run = trained.only_run(trained.workplace(tmp_path_factory))
    reader = EventAccumulator(str(run))
    reader.Reload()
    (event,) = reader.Tensors("report")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 4 and "    loss: " in text and "nats a token on validation rows" in text


@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("loss", "train/loss"),
        ("gradient_norm", "train/grad_norm"),
        ("learning_rate", "train/learning_rate"),
        ("validation_loss", "eval/loss"),
        ("validation_ema_loss", "eval/ema_loss"),
        ("tokens_per_second", "perf/tokens_per_second"),
    ],
)
def test_a_metric_has_the_name_that_panels_look_for(metric, title):
    assert panels.title(metric) == title


def test_every_metric_that_is_documented_has_a_name_of_its_own_in_panels():
    names = [panels.title(name) for name in MEANINGS if name not in panels.NO_CURVE]
    assert len({*names}) == len(names)


def test_writing_events_imports_no_package_of_others(tmp_path):
    script = (
        "import sys\nfrom pathlib import Path\nfrom windlass.telemetry.tensorboard import Events\n"
        f"events = Events(Path('{tmp_path}'))\n"
        "events.write(1, 2.0, {'loss': 3.0})\nevents.text(1, 2.0, 'sample', 'Once')\n"
        "events.hyperparameters(1, 2.0, {'train.steps': 4})\n"
        "heavy = {'tensorboard', 'google', 'torch', 'tensorflow', 'jax', 'wandb', 'trackio'}\n"
        "print(*heavy & set(sys.modules))"
    )
    command = [sys.executable, "-c", script]
    environment = trained.environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "\n" and [*tmp_path.glob("events.*")]
