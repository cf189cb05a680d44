"""What the commands do, called from Python, on one small run."""

import dataclasses
import inspect
import json
import os
import shutil
import signal
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import windlass
from tests import trained
from windlass import api
from windlass.checkpoint.store import folder_of, steps_in
from windlass.checkpoint.verify import VerifyReport
from windlass.cli.commands import app
from windlass.data import Tokenized
from windlass.devices import selection
from windlass.errors import UserError
from windlass.processes.signals import Signals
from windlass.run import Run, identity
from windlass.run_folder import folder as folders
from windlass.starting.describe import describe
from windlass.telemetry import about


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return trained.workplace(tmp_path_factory)


@pytest.fixture
def run(place, monkeypatch) -> Path:
    """The folder of the run, as it is named from where the program would be called."""
    monkeypatch.chdir(place)
    return trained.only_run(place).relative_to(place)


@pytest.fixture
def empty(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(call, *words, **options) -> str:
    with pytest.raises(UserError) as refused:
        call(*words, **options)
    return str(refused.value)


def last_line(run: Path, key: str) -> dict:
    lines = map(json.loads, (run / folders.METRICS).read_text().splitlines())
    return [line for line in lines if key in line][-1]


def test_what_is_offered_at_the_top_is_what_the_commands_call():
    for name in windlass.__all__:
        offered, call = getattr(windlass, name), getattr(api, name)
        assert offered is call or name in windlass.ROOMS
        assert inspect.signature(offered) == inspect.signature(call)


def test_every_command_is_one_call_and_listed():
    for command in app.registered_commands:
        assert command.callback is not None
        assert command.callback.__name__ in dir(windlass)
    assert set(windlass.__all__) < set(dir(windlass))
    assert "sys" not in dir(windlass)


def test_a_folder_that_has_the_name_of_a_call_is_called_and_imported_from(run):
    from windlass import data

    assert data is windlass.data
    assert len(windlass.data("tiny.yaml").split("validation")) == trained.ROWS
    with pytest.raises(UserError, match="^there is no TPU slice"):
        windlass.launch("tiny.yaml", on="v6e-7")


def test_keys_are_overridden_by_a_list_a_mapping_one_text_and_keywords(run):
    ways: list[dict[str, Any]] = [
        {"overrides": way} for way in (["data.length=45"], "data.length=45")
    ]
    ways += [{"overrides": {"data.length": 45}}, {"data": {"length": 45}}]
    assert [windlass.data("tiny.yaml", **way).split("train").length for way in ways] == [45] * 4
    assert windlass.generate(run, "Once", tokens=2, train={"batch": 3}, device="cpu")
    assert refusal(windlass.data, "tiny.yaml", length=45) == (
        "1 problem in tiny.yaml and the command line:\n  length  unknown; did you mean data.length?"
    )


def test_what_calls_return_shows_itself_in_a_notebook(run, tmp_path):
    shown: list[tuple[Any, tuple[str, ...]]] = [
        (windlass.data("tiny.yaml"), ("<th>split</th>", "<td>validation</td>")),
        (windlass.plan("tiny.yaml", on="h100"), ("tiny on h100", "<th", "tokens/s", "on demand")),
        (windlass.report(run), ("<iframe", run.name)),
        (windlass.compare(run, run), ("at step 4", "validation, best")),
        (windlass.export(run, to=tmp_path / "out"), ("model.safetensors", "KiB")),
        (windlass.train("tiny.yaml"), ("finished at step 4", "validation loss")),
    ]
    for value, texts in shown:
        page = value._repr_html_()
        assert [text for text in texts if text not in page] == [], page


def test_the_history_of_a_run_is_a_table_with_a_row_for_each_step(place, tmp_path, monkeypatch):
    shutil.copytree(place, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    done = windlass.train("tiny.yaml")
    steps = [row["step"] for row in done.metrics]
    assert steps == sorted(set(steps)) and steps[-1] == 4
    assert done.metrics[-1].keys() >= {"loss", "learning_rate", "validation_loss"}
    frame = pytest.importorskip("pandas").DataFrame(done.metrics).set_index("step")
    assert frame["validation_loss"].dropna()[4] == done.last["validation_loss"]


@pytest.mark.parametrize(
    ("number", "ends"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        pytest.param(signal.SIGTERM, SystemExit, marks=pytest.mark.long),
    ],
)
def test_a_script_does_not_go_on_after_a_signal_and_the_run_is_saved(
    number, ends, place, tmp_path, monkeypatch
):
    class Signalled(Signals):
        def ends(self, step: int) -> bool:
            if step == 1:
                os.kill(os.getpid(), number)
                while self.stop is None:
                    time.sleep(0.01)
            return super().ends(step)

    shutil.copytree(place, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setattr("windlass.training.train.Signals", Signalled)
    with pytest.raises(ends) as ended:
        windlass.train("tiny.yaml", run={"dir": "mine"})
    assert steps_in(folder_of(Path("mine"))) == [0, 1]
    said = {KeyboardInterrupt: "saved mine at step 1; train resumes it", SystemExit: "143"}
    assert str(ended.value) == said[ends]


def test_a_name_that_is_not_offered_is_not_there():
    with pytest.raises(AttributeError, match="module 'windlass' has no attribute 'tarin'"):
        windlass.tarin  # noqa: B018


@pytest.mark.long
def test_batches_of_3_and_7_measure_the_same_loss_on_10_rows(run):
    by_three = windlass.evaluate(run, ["train.batch=3"])
    by_seven = windlass.evaluate(run, ["train.batch=7"])
    assert len(windlass.data("tiny.yaml").split("validation")) == trained.ROWS
    assert by_three == pytest.approx(by_seven, rel=1e-6)


def test_an_evaluation_measures_what_the_run_measured_at_its_end(run):
    found = windlass.evaluate(run)
    assert found["step"] == 4
    assert found["loss"] == pytest.approx(last_line(run, "validation_loss")["validation_loss"])


def test_an_earlier_checkpoint_has_its_own_loss(run):
    at_start, at_end = windlass.evaluate(run, step=0), windlass.evaluate(run)
    assert at_start["step"] == 0
    assert at_start["loss"] > at_end["loss"] + 0.01


def test_other_text_is_read_with_the_vocabulary_of_the_run(run, tmp_path):
    trained.write_corpus(tmp_path / "same.jsonl", trained.DOCUMENTS)
    trained.write_corpus(tmp_path / "half.jsonl", trained.DOCUMENTS // 2)
    same = windlass.evaluate(run, [f"data.source.path={tmp_path}/same.jsonl"])
    assert same == windlass.evaluate(run)
    # From half the text another vocabulary would be learned, and the checkpoint refused.
    half = windlass.evaluate(run, [f"data.source.path={tmp_path}/half.jsonl"], split="train")
    assert half["loss"] == pytest.approx(same["loss"], abs=0.5)


def test_documents_that_change_under_a_run_are_measured_with_a_word_and_not_trained_on(
    place, tmp_path, monkeypatch
):
    shutil.copytree(place, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    run = trained.only_run(Path())
    quiet, told = (Console(file=StringIO(), width=1000) for _ in range(2))
    windlass.evaluate(run, console=quiet)
    assert quiet.file.getvalue() == ""  # pyright: ignore[reportAttributeAccessIssue]
    before = windlass.data("tiny.yaml")
    trained.write_corpus(Path(trained.CORPUS), trained.DOCUMENTS + 1)
    windlass.evaluate(run, console=told)
    assert told.file.getvalue() == (  # pyright: ignore[reportAttributeAccessIssue]
        "the documents changed since they were tokenised, which is done again: kind jsonl, "
        f"column text, path {tmp_path}/copy/{trained.CORPUS}\n"
        f"the documents of {run} changed since it was trained: these are measured\n"
    )

    after = windlass.data("tiny.yaml")
    assert isinstance(before, Tokenized) and isinstance(after, Tokenized)
    there, here = (
        f"tokenizer of 300 tokens ({one.vocabulary.fingerprint[:12]}) and "
        f"data {one.fingerprint[:12]} in rows of 90"
        for one in (before, after)
    )
    assert refusal(windlass.train, "tiny.yaml") == (
        f"checkpoint at step 4 was written for {there}; this run describes {here}. "
        "Take the change back, or start another run with run.dir"
    )


@pytest.mark.long
def test_test_rows_are_judged_beside_validation_and_every_look_is_noted(
    place, tmp_path, monkeypatch
):
    shutil.copytree(place, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    run, held_out = trained.only_run(Path()), ["data.test=0.2", "data.validation=0.2"]
    first = windlass.evaluate(run, held_out, split="test")
    beside = windlass.evaluate(run, held_out)
    assert {name: first[f"validation_{name}"] for name in beside if name != "step"} == {
        name: value for name, value in beside.items() if name != "step"
    }
    assert first["verdict"].startswith(f"worse than guessing: the test loss is {first['loss']:.4f}")
    assert first["looks"] == 1
    other = [f"data.source.path={place / trained.CORPUS}"]
    alone = windlass.evaluate(run, ["data.test=0.2", "data.validation=0", *other], split="test")
    assert "verdict" not in alone
    assert alone["looks"] == 1  # documents that are asked for by their path are not the run's
    assert windlass.evaluate(run, held_out, split="test", step=0)["looks"] == 2
    noted = about.read(run / folders.ABOUT, "looks")
    assert [(look["step"], look["weights"]) for look in noted] == [(4, "last"), (0, "last")]
    assert len(about.read(run / folders.ABOUT)) == 1


def test_a_split_that_is_none_is_refused(run):
    assert refusal(windlass.evaluate, run, split="dev") == (
        "split is dev; it must be train, validation or test"
    )


def test_a_split_that_the_run_did_not_hold_out_is_refused(run):
    assert refusal(windlass.evaluate, run, split="test") == (
        f"{run} holds out no test documents; it has train and validation ones"
    )


def test_a_step_that_was_not_kept_is_refused(run):
    assert refusal(windlass.evaluate, run, step=3) == (
        f"no checkpoint at step 3 in {run}/checkpoints; there are 0, 2, 4"
    )


def test_an_average_that_the_run_did_not_keep_is_refused(run):
    assert refusal(windlass.generate, run, "One", weights="ema") == (
        f"{run} has no averaged weights, since its train.ema is null; weights can be last or best"
    )


def test_the_best_of_checkpoints_without_a_loss_is_refused(run, tmp_path):
    copied = Path(shutil.copytree(run, tmp_path / "copied"))
    shutil.rmtree(copied / "checkpoints/4")  # the one at the end, where the run is evaluated
    assert refusal(windlass.evaluate, copied, weights="best") == (
        f"no checkpoint in {copied}/checkpoints has a validation loss; "
        "weights can be last, or ema where train.ema keeps an average"
    )


def test_another_model_than_the_one_that_was_trained_is_refused(run):
    fields = (
        "vocab 300, embed 32, mlp 64, layers {}, heads 4, kv_heads 2, head_dim 8, theta 10000.0, "
        "pairing half, eps 1e-06, tied True, attention_bias False"
    )
    assert refusal(windlass.generate, run, "One", ["model.layers=3"]) == (
        f"checkpoint at step 4 was written for model qwen3 ({fields.format(2)}); "
        f"this run describes model qwen3 ({fields.format(3)}). "
        "Take the change back, or start another run with run.dir"
    )


def test_other_tokens_than_those_that_were_trained_on_are_refused(run):
    said = refusal(windlass.evaluate, run, ["tokenizer=byte", "tokenizer.vocab=null"])
    assert said.startswith("checkpoint at step 4 was written for tokenizer of 300 tokens (")
    assert "; this run describes tokenizer of 257 tokens (" in said


def test_a_list_of_prompts_gives_a_text_for_each(run):
    texts = windlass.generate(run, ["Once", "One day"], tokens=5, temperature=0)
    assert len(texts) == 2
    assert texts[0] == windlass.generate(run, "Once", tokens=5, temperature=0)[0]


def test_a_stream_is_the_same_text_in_pieces(run):
    options: dict[str, Any] = dict(tokens=12, temperature=0.9, top_k=50, seed=3)
    pieces = list(api.stream(run, "Once", **options))
    assert len(pieces) > 1
    assert ["".join(pieces)] == windlass.generate(run, "Once", **options)


def test_an_option_of_sampling_that_is_unknown_or_out_of_range_is_refused(run):
    assert refusal(windlass.generate, run, "Once", temprature=1) == (
        "1 problem in the call:\n  temprature  unknown; did you mean temperature?"
    )
    assert refusal(windlass.generate, run, "Once", top_p=0) == (
        "1 problem in the call:\n  top_p  is 0.0; it is a share, above 0 and at most 1"
    )


def test_data_is_prepared_for_a_device_that_is_not_here(run):
    lengths = {"tpu": {"data.length": 30}, "cpu": {"data.length": 20}}
    here = trained.recipe(device={"kind": "auto"}) | {"by_device": lengths}
    assert windlass.data(here).split("train").length == 20
    assert windlass.data(here, ["device=tpu"]).split("train").length == 30


def test_preparing_data_looks_for_no_device(run, monkeypatch):
    monkeypatch.setattr(selection, "present", None)
    plain = trained.recipe(device={"kind": "auto"}) | {"by_device": {}}
    assert len(windlass.data(plain).split("validation")) == trained.ROWS


def test_preparing_data_says_what_is_wrong_with_the_whole_recipe():
    assert refusal(windlass.data, trained.recipe(), ["train.btch=3", "model.heads=0.5"]) == (
        "2 problems in the recipe and the command line:\n"
        "  model.heads  is 0.5; it must be a whole number\n"
        "  train.btch   unknown; did you mean batch?"
    )


def test_problems_of_keys_come_before_an_absent_device():
    keys = ["device=tpu", "train.btch=3", "optim.learning_rate=-1"]
    assert refusal(describe, trained.recipe(), keys) == (
        "2 problems in the recipe and the command line:\n"
        "  optim.learning_rate  is -1.0; it must be above 0\n"
        "  train.btch           unknown; did you mean batch?"
    )
    assert refusal(describe, trained.recipe(), ["device=tpu"]).startswith(
        "device.kind is tpu, and no TPU is present, only "
    )


def test_the_schema_holds_every_section():
    sections = {field.name for field in dataclasses.fields(Run)}
    assert set(windlass.schema()["properties"]) == sections | {"by_device"}


def test_a_good_run_is_verified_and_a_flipped_byte_is_named(run, tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(run, copied)
    assert windlass.verify(copied).good
    largest = max(copied.glob("checkpoints/2/**/*"), key=lambda path: path.stat().st_size)
    whole = bytearray(largest.read_bytes())
    whole[len(whole) // 2] ^= 1
    largest.write_bytes(whole)
    report = windlass.verify(copied)
    assert isinstance(report, VerifyReport)
    assert [finding.name for finding in report.findings if not finding.good] == ["2"]
    assert largest.name in str(report)


def test_what_wins_on_this_kind_of_device_is_stored_resolved(run):
    stored = folders.stored(run)
    assert stored["train"]["batch"] == 2 * trained.RECIPE["train"]["batch"]
    rate = trained.RECIPE["optim"]["learning_rate"]
    assert stored["optim"]["learning_rate"] == pytest.approx(1.2 * rate)
    assert "by_device" not in stored


def test_what_wins_on_this_kind_of_device_is_printed(run):
    printed = Path(trained.OUTPUT).read_text()
    assert "by_device    on cpu: train.batch 16, optim.learning_rate 0.0036\n" in printed
    assert "batch        16 = 16 a device × 1 accumulation × 1 shard," in printed


def test_the_resolved_recipe_is_of_the_same_run(run):
    resolved = describe(run / folders.RECIPE)
    assert identity.digest(resolved.run) == run.name.removeprefix("tiny-")
    assert describe("tiny.yaml").folder == run


def test_a_run_is_found_by_folder_by_name_and_by_recipe(run):
    for name in (run, str(run), run.name, "tiny", "tiny.yaml", run.absolute()):
        assert api.find(name).samefile(run)


def test_without_runs_one_is_told_how_to_make_one(empty):
    none = "nothing is in runs/ here yet, and `windlass train RECIPE` makes a run"
    assert refusal(api.find, None) == f"which run? {none}"
    assert refusal(api.find, "nowhere") == (
        f"nowhere is not a run: there is no such folder; {none}"
    )


def test_what_is_not_a_run_is_refused_with_the_runs_there_are(empty):
    for name in ("mine-11111111", "yours-22222222"):
        invent(empty / "runs" / name)
    (empty / "elsewhere").mkdir()
    there = "there are runs/yours-22222222 (no checkpoint) and runs/mine-11111111 (no checkpoint)"
    assert refusal(api.find, "elsewhere") == (
        f"elsewhere is not a run: it has no recipe.yaml; {there}"
    )
    assert refusal(api.find, "runs/mine-1111") == (
        "runs/mine-1111 is not a run: there is no such folder; "
        f"did you mean runs/mine-11111111? {there}"
    )


def test_a_recipe_with_two_runs_is_refused_with_both(empty):
    invent(empty / "runs/mine-11111111")
    invent(empty / "runs/mine-22222222", step=20)
    assert refusal(api.find, "mine.yaml") == (
        "mine.yaml has 2 runs: runs/mine-22222222 (step 20) or runs/mine-11111111 (no checkpoint)"
    )


def test_of_many_runs_only_the_newest_are_named(empty):
    for number in range(10):
        invent(empty / f"runs/mine-{number}")
    assert refusal(api.find, None).endswith("runs/mine-2 (no checkpoint), and 2 older ones")


def invent(folder: Path, step: int | None = None) -> None:
    """As much of a run as finding one looks at, each newer than the one before."""
    (folder / "checkpoints").mkdir(parents=True)
    if step is not None:
        (folder / "checkpoints" / str(step)).mkdir()
    recipe = folder / folders.RECIPE
    recipe.write_text("")
    age = len(list(folder.parent.iterdir()))
    os.utime(recipe, (age, age))
