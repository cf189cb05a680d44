"""Public tasks as a run trains: the scores of lm-eval on its export, and the best checkpoint."""

import json
import shutil
import signal
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import windlass
from tests import published, strangers
from tests.training.campaign import weights
from tests.training.test_loop import Stops
from windlass.cli import commands
from windlass.errors import UserError
from windlass.evaluation import harness
from windlass.evaluation.harness import Harness
from windlass.processes import hosts
from windlass.processes.signals import Signals
from windlass.run_folder import folder as folders
from windlass.run_folder.folder import place_of
from windlass.starting.describe import describe
from windlass.telemetry import metrics
from windlass.telemetry.console import ConsoleReport
from windlass.training import tasks
from windlass.training.train import train

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness's own
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
fewshot_split: test
doc_to_text: "What comes after {{{{number}}}}?"
"""
CHOICE = """\
output_type: multiple_choice
doc_to_choice: '{{choices}}'
doc_to_target: '{{label}}'
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITTEN = """\
output_type: generate_until
doc_to_target: '{{answer}}'
generation_kwargs: {until: ["\\n"], max_gen_toks: 9, do_sample: false}
metric_list: [{metric: exact_match}]
"""
READ = """\
output_type: loglikelihood
doc_to_target: '{{answer}}'
metric_list: [{metric: perplexity}, {metric: acc}]
"""
NAMES = ("after_choice", "after_written", "after_read")
RECIPE: dict[str, Any] = {
    "model": {"path": "model"},
    "adapter": {"kind": "lora", "rank": 4, "alpha": 8},
    "data": {"source": {"kind": "jsonl", "path": "chats.jsonl"}, "format": "chat", "length": 64},
    "optim": {"kind": "adamw", "learning_rate": 3e-3},
    "train": {"steps": 4, "batch": 8, "best": "after_read/perplexity"},
    "tasks": {"names": [*NAMES], "every": 2, "folder": "tasks", "shots": 1, "limit": 6},
    "checkpoint": {"every": 1, "keep": 1},
    "telemetry": {"every": 1},
    "device": {"kind": "cpu", "count": 1},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a model, chats, tasks about them, and the run that was measured on those."""
    pytest.importorskip("torch")
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("tasks")
    published.write(folder / "model")
    (folder / "model" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    published.write_chats(folder / "chats.jsonl", 32)
    (folder / "tasks").mkdir()
    rows = [
        {
            "number": number,
            "answer": f"{number + 1} does.",
            "choices": [f"{number + 1} does.", f"{number} is it.", "No."],
            "label": 0,
        }
        for number in range(12)
    ]
    file = folder / "tasks" / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, kind in zip(NAMES, (CHOICE, WRITTEN, READ), strict=True):
        (folder / "tasks" / f"{name}.yaml").write_text(TASK.format(name=name, rows=file) + kind)
    (folder / "chat.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


def trained(*keys: str, signals: Signals | None = None) -> str:
    """Train the recipe of this folder, and return what is printed."""
    console = Console(record=True, width=1000, file=StringIO())
    with ConsoleReport(console) as report:
        train("chat.yaml", keys, signals=signals or Signals(), report=report)
    return console.export_text()


def refused(*keys: str) -> str:
    with pytest.raises(UserError) as refusal:
        trained(*keys)
    return str(refusal.value)


@pytest.fixture(scope="module")
def told(place) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return trained("run.dir=run")


def records(run: Path) -> dict[int, dict[str, float]]:
    found = metrics.read(run / folders.METRICS)
    return {one["step"]: one for one in found if "after_choice/acc" in one}


def results(run: Path, step: int) -> dict[str, Any]:
    (file,) = (run / "lm_eval" / f"step-{step}").glob("results_*.json")
    return json.loads(file.read_text())


def test_tasks_are_measured_before_the_first_step_every_few_and_at_the_end(place, told):
    measured = records(place / "run")
    assert [*measured] == [0, 2, 4]
    assert {name.partition("/")[0] for name in measured[4] if "/" in name} == {*NAMES}
    for step in measured:
        table = results(place / "run", step)["results"]
        assert table["after_choice"]["acc,none"] == measured[step]["after_choice/acc"]
        assert table["after_choice"]["acc_stderr,none"] == measured[step]["after_choice/acc_stderr"]
    about = results(place / "run", 4)
    assert (about["model_source"], about["chat_template"]) == ("windlass", published.CHATML)
    assert about["n-samples"]["after_choice"]["effective"] == 6
    assert (
        "tasks        after_choice, after_written, after_read, 1 few-shot example, 6 examples each"
        in told
    )
    line = next(one for one in told.splitlines() if one.startswith("step 4  after_choice"))
    assert f"/acc {measured[4]['after_choice/acc']:.4f} ± " in line


def test_lm_eval_finds_the_same_numbers_in_the_exported_model(place, told):
    from lm_eval import evaluator
    from lm_eval.models import huggingface
    from lm_eval.tasks import TaskManager

    windlass.export(place / "run", place / "exported", form="merged")
    made: Any = huggingface.HFLM  # its decorator hides what it takes
    theirs: Any = evaluator.simple_evaluate(
        made(pretrained=str(place / "exported"), device="cpu", dtype="float32", batch_size=4),
        tasks=[*NAMES],
        num_fewshot=1,
        limit=6,
        task_manager=TaskManager(include_path=str(place / "tasks"), include_defaults=False),
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        bootstrap_iters=1000,
    )
    ours = results(place / "run", 4)["results"]
    for name in NAMES:
        for metric, value in theirs["results"][name].items():
            if isinstance(value, float):
                assert ours[name][metric] == pytest.approx(value, rel=1e-4, abs=1e-6), metric
    assert 1 < ours["after_read"]["perplexity,none"] < 1e30
    assert theirs["results"]["after_read"]["perplexity_stderr,none"] > 0


def test_the_best_checkpoint_is_that_of_the_metric_which_train_best_names(place, told):
    measured = records(place / "run")
    best = min((2, 4), key=lambda step: measured[step]["after_read/perplexity"])
    assert place_of(place / "run", "best").step == best
    stored = [path.name for path in (place / "run" / "checkpoints").iterdir() if path.is_dir()]
    assert str(best) in stored


@pytest.mark.long
def test_a_run_that_was_interrupted_ends_with_the_same_bits_and_scores(place, told, monkeypatch):
    monkeypatch.chdir(place)
    trained("run.dir=again", "checkpoint.keep=3", signals=Stops(3))
    saved = place / "again" / "lm_eval"
    assert sorted(one.name for one in saved.iterdir()) == ["step-0", "step-2"]
    for later in ("2", "3"):  # as if it had been killed while step 2 was measured
        shutil.rmtree(place / "again" / "checkpoints" / later)
    resumed = trained("run.dir=again")
    assert "resuming from step 1 of 4" in resumed
    assert sorted(one.name for one in saved.iterdir()) == ["step-0", "step-2", "step-4"]
    again, whole = records(place / "again"), records(place / "run")
    assert [*again] == [0, 2, 4]
    for step in whole:
        ours = {k: x for k, x in whole[step].items() if "/" in k}
        assert {k: x for k, x in again[step].items() if "/" in k} == ours
    assert weights(place / "again") == weights(place / "run")


def test_a_signal_cuts_a_measurement_short_and_the_step_is_saved(place, monkeypatch):
    monkeypatch.chdir(place)
    signals, measure = Signals(), Harness.__call__

    def interrupted(self, *models, stops, **how):
        if len(list(Path("cut/lm_eval").glob("step-*"))) == 1:  # of step 0
            signals.stop = signal.SIGTERM
        return measure(self, *models, stops=stops, **how)

    monkeypatch.setattr(Harness, "__call__", interrupted)
    cut = trained("run.dir=cut", signals=signals)
    assert "tasks of step 2 are not measured: the run is to stop; `windlass evaluate cut " in cut
    assert [*records(Path("cut"))] == [0]
    assert (Path("cut") / "checkpoints" / "2").is_dir()


def test_the_best_by_loss_and_by_a_task_are_not_compared_with_each_other(place, told, monkeypatch):
    monkeypatch.chdir(place)
    shutil.copytree("run", "other")
    keys = ["train.best=after_choice/acc", "train.steps=6"]
    other = trained("run.dir=other", *keys)
    assert "the best so far was by after_read/perplexity, and is now by after_choice/acc" in other


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ["tasks.names=[after_chioce]"],
            "no task is named after_chioce; did you mean after_choice? tasks has its tasks",
        ),
        (
            ["train.best=after_choice/accuracy"],
            "train.best is after_choice/accuracy; did you mean after_choice/acc? there are "
            "after_choice/acc, after_choice/acc_norm, after_read/acc, after_read/perplexity and "
            "after_written/exact_match",
        ),
        (["tasks.folder=nowhere"], "there is no folder nowhere of tasks"),
        (["tasks.names=[]"], "tasks.names  is empty; it is a list of tasks, as [arc_easy]"),
        (["tasks.shots=-1"], "tasks.shots  is -1; it must be 0 or more"),
        (["tasks=null"], "is after_read/perplexity, a metric of tasks; tasks.names=[after_read] "),
        (["train.best=null", "train.patience=2"], "set train.evaluate_every and data.validation"),
        (
            ["tasks.every=null", "train.patience=2"],
            "train.patience  is 2; it counts evaluations: set tasks.every too",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_training(place, monkeypatch, keys, said):
    monkeypatch.chdir(place)
    assert said in refused("run.dir=refused", *keys)
    assert not Path("refused").exists()


def test_without_the_harness_it_is_said_before_training(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert refused("run.dir=refused") == (
        "tasks need lm-evaluation-harness, which is not installed: "
        "pip install 'windlass-lm[harness]'"
    )
    assert not Path("refused").exists()


def test_several_hosts_are_refused_before_training(place, monkeypatch):
    monkeypatch.chdir(place)
    run = describe("chat.yaml").run
    monkeypatch.setattr(hosts, "count", lambda: 2)
    with pytest.raises(UserError) as wrong:
        tasks.load(run)
    names = "after_choice,after_written,after_read"
    assert str(wrong.value) == (
        "tasks.names is after_choice, after_written, after_read, and lm-evaluation-harness "
        "measures in one process, where this run has 2; tasks=null leaves them out, and "
        f"`windlass evaluate RUN --tasks {names}` measures its checkpoints"
    )


def test_a_model_without_text_or_order_has_no_tasks(place):
    named = {"names": ["after_choice"], "folder": str(place / "tasks")}
    stored = strangers.HERE / "recipes"
    blocks = yaml.safe_load((stored / "grid.yaml").read_text()) | {"tasks": named}
    with pytest.raises(UserError) as wrong:
        train(blocks, [f"run.dir={place}/grid"], signals=Signals())
    assert "tasks.names is after_choice, and the data has blocks without a vocabulary" in str(
        wrong.value
    )
    both_ways = yaml.safe_load((stored / "bidirectional.yaml").read_text()) | {"tasks": named}
    with pytest.raises(UserError) as wrong:
        describe(both_ways)
    assert "tasks need a causal family, and bidirectional attends in both directions" in str(
        wrong.value
    )


def test_a_task_whose_file_is_wrong_is_refused_in_a_sentence(place, tmp_path):
    text = TASK.format(name="broken", rows=tmp_path / "gone.jsonl") + CHOICE
    (tmp_path / "broken.yaml").write_text(text)
    with pytest.raises(UserError) as wrong:
        Harness(["broken"], folder=tmp_path)
    assert str(wrong.value).startswith("broken cannot be loaded: FileNotFoundError: ")


def test_a_chat_template_that_is_wanted_and_not_there_is_refused(place):
    from windlass.data import vocabulary as vocabularies
    from windlass.formats.text import Format

    with pytest.raises(UserError) as wrong:
        harness.uses_chat(Format(), vocabularies.byte(), True)
    assert str(wrong.value).startswith("tasks are to get a chat template, and the tokenizer has ")
    assert not harness.uses_chat(Format(), vocabularies.byte(), None)


def test_the_finished_run_is_measured_the_same_by_the_command(place, told, capsys, monkeypatch):
    monkeypatch.chdir(place)
    shutil.copytree("run", "measured")
    words = ["evaluate", "measured", "--tasks", "after_choice,after_read", "--tasks-from", "tasks"]
    assert commands.run([*words, "--shots", "1", "--limit", "6", "--json"], Signals()) == 0
    found = json.loads(capsys.readouterr().out)
    ours = records(place / "run")[4]
    assert found["after_choice"]["acc"] == ours["after_choice/acc"]
    assert found["after_choice"]["acc_stderr"] == ours["after_choice/acc_stderr"]
    assert found["after_read"]["perplexity"] == pytest.approx(ours["after_read/perplexity"])
    assert [*results(Path("measured"), 4)["results"]] == ["after_choice", "after_read"]
    assert commands.run([*words, "--shots", "1", "--limit", "6", "--no-chat"], Signals()) == 0
    assert " ± " in capsys.readouterr().out


def card_in(folder: Path) -> Any:
    from huggingface_hub import ModelCard

    return ModelCard.load(folder / "README.md")


def test_the_card_of_the_export_has_the_scores_the_licence_and_nothing_of_this_machine(place, told):
    windlass.export(place / "run", place / "with-card")
    card = card_in(place / "with-card")
    assert card.data.license == "apache-2.0"
    found = card.data.eval_results
    assert found is not None
    by_name = {(one.dataset_name, one.metric_type): one for one in found}
    table = results(place / "run", 4)["results"]["after_choice"]
    score = by_name["after_choice", "acc"]
    assert (score.metric_value, score.source_name) == (table["acc,none"], "lm-evaluation-harness")
    assert score.metric_args == {"stderr": table["acc_stderr,none"], "num_fewshot": 1}
    assert score.dataset_split == "test"
    assert {name for name, _ in by_name} == {*NAMES}
    assert "| after_written | exact_match | " in card.text
    assert str(place) not in card.content
    windlass.export(place / "run", place / "mit", license="mit")
    assert card_in(place / "mit").data.license == "mit"
    with pytest.raises(UserError) as wrong:
        windlass.export(place / "run", place / "no", license="Apache 2.0")
    assert "license  is Apache 2.0; it is an identifier of the hub, such as" in str(wrong.value)
