"""The average of the weights, the best of them, and the end of patience."""

import json
import shutil
from pathlib import Path

import pytest

import windlass
from tests.training.campaign import RECIPE, weights
from tests.training.test_loop import Told, refused
from tests.training.test_samples import forget_sampling, samples
from windlass.checkpoint import archive
from windlass.checkpoint.fingerprint import measure
from windlass.checkpoint.store import folder_of, steps_in
from windlass.cli import commands
from windlass.errors import UserError
from windlass.processes.signals import Signals
from windlass.program.built import Built
from windlass.starting import origin
from windlass.starting.describe import describe

# A learning rate that is too high: the loss falls, then rises. A checkpoint is due at no step.
KEYS = [
    *("optim.learning_rate=0.3", "train.ema=0.9", "train.sample=Once", "train.accumulation=1"),
    *("train.steps=12", "train.evaluate_every=1", "checkpoint.every=100", "checkpoint.keep=1"),
    *("device.kind=cpu", "device.count=1", "train.strict=true"),
]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> tuple[Path, Told]:
    """A run that lost its patience, to be copied by whoever harms it."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    return folder, Told(f"run.dir={folder}", *KEYS, "train.patience=2")


def records(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "validation_loss" in line]


def refusal(call, *words, **options) -> str:
    with pytest.raises(UserError) as refused:
        call(*words, **options)
    return str(refused.value)


@pytest.mark.long
def test_a_run_without_a_new_best_for_so_many_evaluations_ends_saved_and_says_so(stopped):
    run, told = stopped
    losses = [record["validation_ema_loss"] for record in records(run)]
    best = losses.index(min(losses)) + 1
    assert len(losses) == best + 2 < 12
    assert told.trained.is_finished and told.trained.step == best + 2
    assert steps_in(folder_of(run)) == [best, best + 2]
    assert (
        f"stopped      early at step {best + 2} of 12: "
        f"no better in 2 evaluations than {min(losses):.4f} at step {best}\n"
    ) in told.text


@pytest.mark.long
def test_the_same_command_says_that_the_run_is_finished_and_how_to_go_on(stopped, here):
    run = Path(shutil.copytree(stopped[0], here / "run"))
    forget_sampling(run)  # as of a run of before that key
    best, last = steps_in(folder_of(run))
    again = Told(f"run.dir={run}", *KEYS, "train.patience=2")
    assert again.trained.is_finished and again.trained.step == last
    assert (
        f"this run is finished: step {last} of 12 in {run}, no better in 2 evaluations than "
        f"{min(record['validation_ema_loss'] for record in records(run)):.4f} at step {best}; "
        "train.patience=4 would go on\n"
    ) in again.text


def test_a_run_that_lost_its_patience_at_its_last_step_says_that_it_needs_more_of_both(
    stopped, here
):
    run = Path(shutil.copytree(stopped[0], here / "run"))
    _, last = steps_in(folder_of(run))
    again = Told(f"run.dir={run}", *KEYS, "train.patience=2", f"train.steps={last}")
    assert f"; train.steps={2 * last} train.patience=4 would go on\n" in again.text


@pytest.mark.long
def test_a_run_taken_up_again_and_given_more_patience_ends_with_the_same_bits(stopped, here):
    run = Path(shutil.copytree(stopped[0], here / "run"))
    best, last = steps_in(folder_of(run))
    shutil.rmtree(folder_of(run) / str(last))
    told = Told(f"run.dir={run}", *KEYS, "train.patience=1")
    assert f"resuming from step {best} of 12" in told.text
    assert told.trained.is_finished and told.trained.step == best + 1
    more = Told(f"run.dir={run}", *KEYS, "train.patience=2")
    assert f"resuming from step {best + 1} of 12" in more.text
    found = weights(run)
    assert found == weights(stopped[0])
    assert any(name.startswith("ema.") for name in found)
    # What was written after the best is written again, once.
    samples = (run / "samples.txt").read_text()
    assert samples == (stopped[0] / "samples.txt").read_text()
    assert samples.count("--- step ") == last


@pytest.mark.long
def test_the_last_the_best_and_the_averaged_weights_are_those_that_were_measured(stopped):
    run, _ = stopped
    told = records(run)
    best = min(told, key=lambda record: record["validation_ema_loss"])
    expected = {
        "last": (told[-1]["step"], told[-1]["validation_loss"]),
        "ema": (told[-1]["step"], told[-1]["validation_ema_loss"]),
        "best": (best["step"], best["validation_ema_loss"]),
    }
    assert len({loss for _, loss in expected.values()}) == 3
    for name, (step, loss) in expected.items():
        found = windlass.evaluate(run, weights=name)
        assert (found["step"], found["loss"]) == (step, pytest.approx(loss, rel=1e-6))
    texts = {
        name: windlass.generate(run, "Once", weights=name, tokens=20, temperature=0)
        for name in expected
    }
    assert texts["last"] != texts["best"]


@pytest.mark.long
def test_samples_are_drawn_at_each_evaluation_by_temperature_top_k_and_top_p(stopped):
    run, told = stopped
    drawn = samples(run)
    assert [*drawn] == [*range(1, told.trained.step + 1)]
    (text,) = windlass.generate(run, "Once", temperature=0.8, top_k=50, top_p=0.9)
    assert drawn[told.trained.step] == f"Once{text}\n"


@pytest.mark.long
def test_the_program_measures_the_weights_that_it_is_asked_for(stopped, capsys):
    run, _ = stopped
    assert commands.run(["evaluate", str(run), "--weights", "ema"], Signals()) == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    expected = records(run)[-1]["validation_ema_loss"]
    assert facts["weights"] == "ema" and float(facts["loss"]) == pytest.approx(expected, rel=1e-3)
    assert expected != pytest.approx(records(run)[-1]["validation_loss"], rel=1e-2)


@pytest.mark.long
def test_a_run_starts_from_the_average_or_the_best_of_another(stopped, here):
    run, _ = stopped
    best, last = steps_in(folder_of(run))
    for name, step in {"ema": last, "best": best}.items():
        described = describe(RECIPE | {"model": {"run": str(run), "weights": name}}, KEYS)
        assert described.run.start is not None
        with described.scope():
            built = Built(described)
            vocabulary = archive.manifest(folder_of(run) / str(step))["identity"]["tokenizer"]
            taken = origin.take(built, vocabulary, print)
        expected = archive.manifest(folder_of(run) / str(step))["arrays"]
        assert measure(taken.arrays[0]) == {
            path: expected[f"ema.{path}"]["fingerprint"] for path in taken.arrays[0]
        }


@pytest.mark.long
def test_weights_that_are_not_there_are_refused(stopped, here):
    run, _ = stopped
    assert refusal(windlass.evaluate, run, weights="first") == (
        "weights is first; it must be last, best or ema"
    )
    assert refusal(windlass.evaluate, run, weights="best", step=2) == (
        "weights=best has a step of its own; leave step 2 out"
    )


@pytest.mark.long
def test_a_run_that_keeps_another_average_is_refused(stopped, here):
    run = Path(shutil.copytree(stopped[0], here / "run"))
    last = steps_in(folder_of(run))[-1]
    assert refused(f"run.dir={run}", *KEYS, "train.ema=0.99") == (
        f"checkpoint at step {last} was written for ema 0.9; this run describes ema 0.99. "
        "Take the change back, or start another run with run.dir"
    )


def test_patience_without_anything_to_wait_for_is_refused():
    recipe = RECIPE | {"data": RECIPE["data"] | {"validation": 0}}
    assert refused("train.patience=3", "train.evaluate_every=null", recipe=recipe) == (
        "1 problem in the recipe and the command line:\n"
        "  train.patience  is 3; it counts evaluations: set train.evaluate_every and "
        "data.validation too"
    )
    assert refused("train.patience=0", "train.ema=1") == (
        "2 problems in the recipe and the command line:\n"
        "  train.patience  is 0; it must be 1 or more\n"
        "  train.ema       is 1.0; it is a share, above 0 and below 1"
    )
