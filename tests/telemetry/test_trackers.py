"""Trackers: what they are sent, and that none of them can end or hold up a run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import trained
from windlass.config import read
from windlass.errors import UserError
from windlass.processes import hosts
from windlass.telemetry import Telemetry, TrackerNames, trackers
from windlass.telemetry.tracker_process import told
from windlass.telemetry.trackers import NAME, Trackers

CONFIG = {"train": {"steps": 4}, "model": {"family": "qwen3"}}
# A package in the place of Trackio, which notes what it gets.
NOTES = """\
import json, os
class Html(str): pass
class Run:
    def __init__(self, **keys):
        self.project, self.name = keys["project"], keys["name"]
        self.note("init", name=self.name, config=keys["config"], resume=keys["resume"])
    def note(self, what, **facts):
        with open(os.environ["NOTES"], "a") as file:
            file.write(json.dumps([what, facts]) + "\\n")
    def log(self, values, step): self.note("log", step=step, values=values)
    def finish(self): self.note("finish")
init = lambda **keys: Run(**keys)
"""


class Told:
    """Messages that a run gets of its trackers."""

    def __init__(self):
        self.warnings: list[str] = []
        self.facts: dict[str, str] = {}

    def trackers(self, folder: Path, *names: str) -> Trackers:
        telemetry = Telemetry(trackers=TrackerNames(names))
        return Trackers(folder, telemetry, self.warnings.append, self.facts.__setitem__)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that puts a package of some name in the way of the one that is installed."""

    def put(name: str, text: str) -> None:
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").write_text(text)
        source = str(Path(__file__).parents[2])
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}:{source}")

    return put


@pytest.fixture
def notes(tmp_path, monkeypatch, package) -> Path:
    """The file of what a package in the place of Trackio was given."""
    package("trackio", NOTES)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return tmp_path / "notes"


def noted(notes: Path, what: str) -> list[dict]:
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    return [facts for name, facts in lines if name == what]


def logged(notes: Path) -> list[tuple[int, str]]:
    return [(one["step"], name) for one in noted(notes, "log") for name in one["values"]]


def record(step: int, **values: float) -> dict:
    return {"step": step, "time": 1.0, **values}


def test_a_tracker_gets_keys_metrics_samples_and_the_report(tmp_path, notes):
    run = Told()
    with run.trackers(tmp_path, "trackio") as sent:
        sent.begin(0, CONFIG, [])
        sent.write(1, {"loss": 2.5, "gradient_norm": float("nan"), "token_hash": 77})
        sent.write(1, {"validation_loss": 3.5})
        sent.text(1, "sample", "Once <b>")
        sent.page(1, "report", "<p>page</p>")
        sent.close(is_finished=True)
    assert run.warnings == []
    ((name, fact),) = run.facts.items()
    (start,) = noted(notes, "init")
    assert name == "trackio" and fact == (
        f"`trackio show --project windlass` shows it as {start['name']}"
    )
    assert start["config"] == {"train.steps": 4, "model.family": "qwen3"}
    first, *others = [one["values"] for one in noted(notes, "log")]
    assert first.pop("train/grad_norm") != first.pop("train/loss") == 2.5 and first == {}
    assert others == [
        {"eval/loss": 3.5},
        {"sample": "<pre>Once &lt;b&gt;</pre>"},
        {"report": "<p>page</p>"},
    ]
    assert len(noted(notes, "finish")) == 1


def test_a_run_that_resumes_is_the_same_there_and_sends_no_step_twice(tmp_path, notes):
    run = Told()
    with run.trackers(tmp_path, "trackio") as sent:
        sent.begin(0, CONFIG, [])
        for step in (1, 2, 3):
            sent.write(step, {"loss": 1 / step})
            sent.text(step, "sample", "Once")
    before = [record(step, loss=1 / step) for step in (1, 2, 3)]
    with run.trackers(tmp_path, "trackio") as sent:
        sent.begin(1, CONFIG, before)  # killed after step 3, and saved at step 1
        for step in (2, 3, 4):
            sent.write(step, {"loss": 1 / step})
            sent.text(step, "sample", "Once")
        sent.write(3, {"validation_loss": 4.0})  # of which the kill came before
    first, second = noted(notes, "init")
    assert first["name"] == second["name"] and second["resume"] == "allow"
    assert first["name"] == f"{tmp_path.name}-{json.loads((tmp_path / NAME).read_text())['id']}"
    again = logged(notes)[6:]
    assert [pair for pair in again if pair[1] != "sample"] == [
        *((4, "train/loss"), (3, "eval/loss"))
    ]
    assert [step for step, name in again if name == "sample"] == [3, 4]
    assert run.warnings == []


def test_a_tracker_that_is_new_to_a_run_gets_what_there_is_of_it(tmp_path, notes):
    before = [record(step, loss=1 / step) for step in (1, 2, 3)]
    with Told().trackers(tmp_path, "trackio") as sent:
        sent.begin(2, CONFIG, before)
        sent.write(3, {"loss": 0.5})
    assert logged(notes) == [(1, "train/loss"), (2, "train/loss"), (3, "train/loss")]
    assert noted(notes, "log")[-1]["values"] == {"train/loss": 0.5}


def test_the_id_of_a_run_that_somebody_spoilt_is_made_anew_with_a_warning(tmp_path, notes):
    (tmp_path / NAME).write_text("[")
    run = Told()
    with run.trackers(tmp_path, "trackio") as sent:
        sent.begin(0, CONFIG, [])
    assert run.warnings == [
        f"{tmp_path / NAME} is not as it was written; trackers get this run as another one"
    ]
    assert json.loads((tmp_path / NAME).read_text())["has"] == ["trackio"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import os; raise OSError('no login ' + os.environ['WANDB_API_KEY'])", "no login ***"),
        ("raise OSError('no\\nway to https://x?write_token=1234&a=1')",
         "no way to https://x?write_token=***&a=1"),
        ("def Settings(**_): return input('API key: ')", "EOF when reading a line"),
        ("import os; os._exit(3)", "its process ended"),
        ("raise SystemExit('gone')", "its process ended"),
    ],
)  # fmt: skip
def test_a_tracker_that_fails_is_one_warning_without_a_secret(
    tmp_path, package, monkeypatch, text, why
):
    package("wandb", text)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    run = Told()
    with run.trackers(tmp_path, "wandb") as sent:
        sent.begin(0, CONFIG, [])
        for step in range(1, 4):
            sent.write(step, {"loss": 1.0})
            time.sleep(0.1)
    assert run.warnings == [
        f"wandb gets no more of this run: {why}. The run goes on, and its folder has all numbers; "
        "WANDB_MODE=offline would keep them for `wandb sync`"
    ]
    assert json.loads((tmp_path / NAME).read_text())["has"] == []


def test_a_tracker_that_cannot_be_started_is_one_warning(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(trackers.subprocess, "Popen", full)
    run = Told()
    with run.trackers(tmp_path, "trackio") as sent:
        sent.begin(0, CONFIG, [])
        sent.write(1, {"loss": 1.0})
    assert run.warnings == [
        "trackio gets no more of this run: it cannot be started (Cannot allocate memory). The run "
        "goes on, and its folder has all numbers; without TRACKIO_SPACE_ID and TRACKIO_SERVER_URL "
        "they are stored on this machine"
    ]


def test_a_tracker_that_hangs_holds_up_no_step_and_the_end_for_a_while_only(
    tmp_path, package, monkeypatch
):
    package("wandb", "import os, time\nopen(os.environ['PID'], 'w').write(str(os.getpid()))\n"
            "time.sleep(600)")  # fmt: skip
    pid = tmp_path / "pid"
    monkeypatch.setenv("PID", str(pid))
    monkeypatch.setattr(trackers, "LAST_SECONDS", 1.0)
    run = Told()
    with run.trackers(tmp_path, "wandb") as sent:
        sent.begin(0, CONFIG, [])
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.05)
        began = time.monotonic()
        for step in range(5000):  # more than a pipe holds
            sent.write(step, {"loss": 1.0})
        assert time.monotonic() - began < 5
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert [text.partition(". ")[0] for text in run.warnings] == [
        "wandb gets no more of this run: it had not finished when the run had"
    ]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_tracker_that_falls_too_far_behind_is_given_up(tmp_path, package, monkeypatch):
    package("wandb", "import time\ntime.sleep(600)")
    monkeypatch.setattr(trackers, "LAST_SECONDS", 0.1)
    monkeypatch.setattr(trackers, "MOST", 10)
    run = Told()
    with run.trackers(tmp_path, "wandb") as sent:
        sent.begin(0, CONFIG, [])
        for step in range(20):
            sent.write(step, {"loss": 1.0})
        assert ["it is 10 records behind" in text for text in run.warnings] == [True]
    assert len(run.warnings) == 1


def test_one_tracker_that_fails_leaves_the_other_its_numbers(tmp_path, notes, package):
    (tmp_path / "packages" / "wandb").mkdir()
    (tmp_path / "packages" / "wandb" / "__init__.py").write_text("raise OSError('no network')")
    run = Told()
    with run.trackers(tmp_path, "wandb", "trackio") as sent:
        sent.begin(0, CONFIG, [])
        sent.write(1, {"loss": 1.0})
    assert len(run.warnings) == 1 and logged(notes) == [(1, "train/loss")]
    assert json.loads((tmp_path / NAME).read_text())["has"] == ["trackio"]


def test_what_a_tracker_warns_of_is_told_once(tmp_path, notes):
    package = tmp_path / "packages" / "trackio" / "__init__.py"
    warns = "import warnings\ndef warn(): warnings.warn('the Space sleeps')\n"
    package.write_text(warns + NOTES.replace("step): self", "step): warn(); self"))
    run = Told()
    with run.trackers(tmp_path, "trackio") as sent:
        sent.begin(0, CONFIG, [])
        for step in (1, 2):
            sent.write(step, {"loss": 1.0})
    assert run.warnings == ["trackio: the Space sleeps"] and len(logged(notes)) == 2


def test_what_a_killed_run_had_sent_is_finished_by_the_tracker(tmp_path, notes):
    script = (
        "import os, time\nfrom pathlib import Path\n"
        "from windlass.telemetry import Telemetry, TrackerNames\n"
        "from windlass.telemetry.trackers import Trackers\n"
        "telemetry = Telemetry(trackers=TrackerNames(('trackio',)))\n"
        f"sent = Trackers(Path('{tmp_path}'), telemetry, print, print)\n"
        "sent.begin(0, {}, [])\nsent.write(1, {'loss': 1.0})\n"
        f"while not os.path.exists('{notes}') or '[\"log' not in open('{notes}').read():\n"
        "    time.sleep(0.05)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    for _ in range(200):
        if noted(notes, "finish"):
            return
        time.sleep(0.05)
    pytest.fail("nobody finished the run")


def test_of_several_hosts_the_first_alone_has_trackers(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "is_first", lambda: False)
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    trackers.check(Telemetry(trackers=TrackerNames(("wandb",))))
    with Told().trackers(tmp_path, "wandb") as sent:
        sent.begin(0, CONFIG, [])
        assert not sent.are_on and not (tmp_path / NAME).exists()


def test_a_tracker_that_is_not_installed_is_refused_before_the_run_begins(
    tmp_path, monkeypatch, tmp_path_factory
):
    (tmp_path / "wandb").mkdir()  # as wandb leaves one where it ran: no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    how = (
        "pip install 'windlass-lm[track]' does that, and telemetry.trackers=null leaves trackers "
        "out"
    )
    with pytest.raises(UserError) as one:
        trackers.check(Telemetry(trackers=TrackerNames(("wandb",))))
    assert str(one.value) == (
        "telemetry.trackers has wandb, and the package of that name is not installed: " + how
    )
    with pytest.raises(UserError) as both:
        trackers.check(Telemetry(trackers=TrackerNames(("wandb", "trackio"))))
    assert str(both.value) == (
        "telemetry.trackers has wandb and trackio, and the packages of that name are not "
        "installed: " + how
    )
    trackers.check(Telemetry())


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("wandb", ("wandb",)),
        (["wandb", "trackio"], ("wandb", "trackio")),
        (["trackio", "trackio"], ("trackio",)),
        (None, ()),
        ([], ()),
    ],
)
def test_trackers_are_a_name_a_list_or_none(written, names):
    section = read(Telemetry, {"trackers": written}, origin="the recipe")
    assert section.trackers.names == names
    assert TrackerNames.read(section.trackers.written()) == section.trackers


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"trackers": "wandbb"}, 'trackers  is "wandbb"; did you mean wandb?'),
        ({"trackers": 3}, "trackers  is 3; it must be wandb or trackio, a list of these, or null"),
        ({"project": "a/b"}, 'project  is "a/b"; it must be a name without / \\ # ? % :'),
        ({"project": " "}, 'project  is " "; it must be a name without / \\ # ? % :'),
    ],
)
def test_a_tracker_or_project_that_cannot_be_is_refused(keys, problem):
    with pytest.raises(UserError) as refused:
        read(Telemetry, keys, origin="the recipe")
    assert problem in str(refused.value)


def test_a_long_failure_is_cut_and_an_empty_one_named():
    assert told(ValueError()) == "ValueError"
    assert told(ValueError("x" * 1000)) == "x" * 300 + "..."


def test_a_run_without_its_tracker_ends_well_after_one_warning(tmp_path, package, monkeypatch):
    package("wandb", "raise ConnectionError('no network')")
    trained.write_corpus(tmp_path / trained.CORPUS, trained.DOCUMENTS)
    recipe = trained.recipe(telemetry={"trackers": "wandb"}, train={"steps": 2})
    (tmp_path / "tiny.yaml").write_text(json.dumps(recipe))
    text = trained.windlass(tmp_path, "train", "tiny.yaml").stdout
    assert text.count("warning: ") == 1 and "wandb gets no more of this run: no network." in text
    assert "step 2/2" in text and "next         windlass generate" in text
