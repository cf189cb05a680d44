"""Tasks of lm-evaluation-harness: our answers are those of its own model of transformers."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import windlass
from tests import trained
from tests.hub.test_round_trip import built, taken
from windlass.cli import commands
from windlass.data import vocabulary as vocabularies
from windlass.errors import UserError
from windlass.evaluation import harness
from windlass.evaluation.generate import Generator
from windlass.evaluation.harness import Harness, Score
from windlass.evaluation.likelihood import Scorer
from windlass.processes.signals import Signals

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness's own
LONGEST = 48
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: {kind}
doc_to_text: "Q: {{{{question}}}} A:"
"""
CHOICE = "doc_to_choice: '{{choices}}'\ndoc_to_target: '{{label}}'\nmetric_list: [{metric: acc}]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a vocabulary of bytes, as transformers writes it; and tasks beside it."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("lm_eval")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("harness")
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).save_pretrained(place / "model")
    vocabularies.byte().save(place / "model")
    rows = [
        {"question": f"{'and ' * (n % 4)}{n}?", "choices": [" yes", " no, never"], "label": n % 2}
        for n in range(10)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "choice.yaml").write_text(
        TASK.format(name="tiny_choice", kind="multiple_choice", rows=place / "rows.jsonl") + CHOICE
    )
    return place


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[tuple[Scorer, Generator]]:
    """The model of the folder, in a batch size that does not divide what is asked."""
    made = built(folder / "model", (1, 1, 1))
    with made.described.scope():
        model = taken(made)
        yield Scorer(model, longest=LONGEST, batch=4), Generator(model, vocabularies.byte())


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from lm_eval.models import huggingface

    made: Any = huggingface.HFLM  # its decorator hides what it takes
    return made(pretrained=str(folder / "model"), device="cpu", dtype="float32", batch_size=4)


def asked(kind: Any, *every: tuple) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, number) for number, one in enumerate(every)]


@pytest.fixture(scope="module")
def adapter(ours) -> Any:
    return harness._adapter(*ours)


def test_the_likelihood_of_a_continuation_is_that_of_transformers(adapter, theirs):
    pairs = [("", "a"), ("the cat", " sat"), ("one two ", "three"), ("x" * 70, "yes " * 5)]
    pairs += [("ü 世界", " é"), ("a", "b" * 40)]
    requests = asked("loglikelihood", *pairs)
    found, expected = adapter.loglikelihood(requests), theirs.loglikelihood(requests)
    np.testing.assert_allclose(
        [one[0] for one in found], [one[0] for one in expected], rtol=0, atol=1e-4
    )
    assert [one[1] for one in found] == [one[1] for one in expected]
    greedy = adapter.generate_until(asked("generate_until", ("abc", {"max_gen_toks": 3})))[0]
    assert theirs.loglikelihood(asked("loglikelihood", ("abc", greedy)))[0][1]
    assert adapter.loglikelihood(asked("loglikelihood", ("abc", greedy)))[0][1]


def test_the_likelihood_of_whole_texts_is_that_of_transformers(adapter, theirs):
    texts = [("short",), ("a text that is longer than what the model reads at once, by far " * 3,)]
    requests = asked("loglikelihood_rolling", *texts)
    np.testing.assert_allclose(
        adapter.loglikelihood_rolling(requests),
        theirs.loglikelihood_rolling(requests),
        rtol=0,
        atol=1e-3,  # of sums of up to 200 tokens
    )


@pytest.mark.long
def test_a_task_measures_the_same_as_with_transformers(ours, theirs, folder: Path):
    from lm_eval.tasks import TaskManager

    scorer, generator = ours
    found = Harness(["tiny_choice"], limit=7, folder=folder)(scorer, generator)
    expected = harness.library().simple_evaluate(
        theirs,
        tasks=["tiny_choice"],
        limit=7,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )
    table = expected["results"]["tiny_choice"]
    score = Score(table["acc,none"], table["acc_stderr,none"], True)
    assert found.scores == {"tiny_choice": {"acc": score}}


def test_a_run_is_asked_by_its_name_with_what_it_was_trained_on(
    folder: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture,
):
    # A copy: scores are noted in the run, and a card of it would have them.
    run = trained.only_run(shutil.copytree(trained.workplace(tmp_path_factory), tmp_path / "copy"))
    found = windlass.tasks(run, "tiny_choice", folder=folder, limit=4, shots=0)
    assert list(found) == ["tiny_choice"]
    assert found["tiny_choice"]["acc"] in (0, 0.25, 0.5, 0.75, 1)
    assert 0 <= found["tiny_choice"]["acc_stderr"] <= 0.5
    capsys.readouterr()
    words = ["evaluate", str(run), "--tasks", "tiny_choice", "--tasks-from", str(folder)]
    assert commands.run([*words, "--limit", "4", "--shots", "0", "--json"], Signals()) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_options_of_tasks_are_refused_without_them():
    with pytest.raises(UserError) as refused:
        commands.app(["evaluate", "a", "--tasks-from", "b"], standalone_mode=False, obj=Signals())
    assert str(refused.value) == "--tasks-from is for --tasks, which is not given"


def test_a_task_that_is_not_there_is_refused(folder: Path):
    with pytest.raises(UserError) as refused:
        Harness(["tiny_chice"], folder=folder)
    assert str(refused.value) == (
        f"no task is named tiny_chice; did you mean tiny_choice? {folder} has its tasks"
    )


def test_without_the_harness_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError) as refused:
        Harness(["hellaswag"])
    assert str(refused.value) == (
        "tasks need lm-evaluation-harness, which is not installed: "
        "pip install 'windlass-lm[harness]'"
    )
