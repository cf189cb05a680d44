"""A run on a stream of documents is stopped, cut off and moved, and is the same run."""

import copy
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from tests.hub.dataset_server import (
    NAME,
    DatasetHub,
    corpus,
    environment,
    hurry,
    keep_caches_below,
    online,
    write_corpus,
)
from tests.spawn import processes
from tests.training.campaign import RECIPE
from windlass import api
from windlass.errors import UserError
from windlass.hub import download as downloads
from windlass.planning.plan import Plan
from windlass.processes.signals import Signals
from windlass.run_folder.verify import verify
from windlass.telemetry.console import ConsoleReport
from windlass.telemetry.metrics import read
from windlass.training.loop import Trained
from windlass.training.train import train

# A schedule that does not end with the run: stopping early must not change it.
KEYS = [
    "device.count=1",
    "optim.schedule.shape=constant",
    "checkpoint.every=50",
    "train.evaluate_every=null",
]
SAME = ("loss", "gradient_norm", "token_hash", "data_part")


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keep_caches_below(tmp_path, monkeypatch)
    hurry(monkeypatch)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The files of a data set, in a folder."""
    return write_corpus(tmp_path / "made")


def recipe(name: Path | str, cache: Path, **source) -> dict:
    """A tiny run on parts of four steps or so."""
    whole = copy.deepcopy(RECIPE)
    stream = {"kind": "hub", "name": str(name), "stream": True, "part_tokens": 2000}
    whole["data"] |= {"source": stream | source, "cache": str(cache), "validation": 0.0}
    whole["train"] |= {"steps": 12, "accumulation": 1}
    return whole


def go(run: dict, folder: Path, *keys: str) -> tuple[Trained, str]:
    """A run in this process, and what it printed."""
    console = Console(record=True, width=1000, file=StringIO())
    with ConsoleReport(console) as report:
        words = [*KEYS, f"run.dir={folder}", *keys]
        trained = train(copy.deepcopy(run), words, signals=Signals(), report=report)
    return trained, console.export_text()


def numbers(folder: Path) -> list[tuple]:
    records = [record for record in read(folder / "metrics.jsonl") if "loss" in record]
    return [tuple(record[name] for name in SAME) for record in records]


@pytest.mark.long
def test_a_run_that_is_stopped_in_a_part_goes_on_to_the_same_bits(made, tmp_path):
    run = recipe(made, tmp_path / "cache")
    _, text = go(run, tmp_path / "whole")
    whole = numbers(tmp_path / "whole")
    assert [part for *_, part in whole] == sorted(part for *_, part in whole)
    assert whole[-1][-1] >= 2, "three parts at least"
    assert "data         a stream in parts of 2,000 tokens; the first: " in text
    assert "training on part 1 of the data, 2." in text and "tokens ahead" in text
    assert "parameters; 12 steps, " in text and "epoch" not in text
    # Stopped in the second part, and resumed without its data: other parts, made anew.
    go(run, tmp_path / "halves", "train.steps=7")
    moved = recipe(made, tmp_path / "elsewhere", keep_parts=1)
    _, text = go(moved, tmp_path / "halves")
    assert f"resuming from step 7 of 12 in {tmp_path / 'halves'}" in text
    assert numbers(tmp_path / "halves") == whole
    found = verify(tmp_path / "halves")
    assert found.good and sum("part-0000" in one.name for one in found.findings) >= 3


def test_what_a_stream_cannot_have_is_refused_with_what_would_do(made, tmp_path):
    run = recipe(made, tmp_path / "cache")
    run["train"] |= {"steps": None, "epochs": 1, "evaluate_every": "1 epoch"}
    run["tokenizer"] = {"kind": "bpe", "vocab": 300}
    with pytest.raises(UserError) as refused:
        train(run, [f"run.dir={tmp_path / 'run'}"], signals=Signals())
    said = " ".join(str(refused.value).split())
    why = "data.source.stream is true, and nobody knows the end of a stream"
    assert f"train.steps is required: {why}; train.epochs=null train.steps=1000 would do" in said
    assert f"train.evaluate_every is 1 epochs; {why}: a number of steps or minutes would" in said
    assert "tokenizer.kind is bpe, which is learned from all documents, and" in said
    assert not (tmp_path / "cache/streams").exists()


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"split": "train[:10%]"}, "a stream is of one whole split: limit has its first rows"),
        ({"part_tokens": 0}, "part_tokens  is 0; a part has 1 token or more"),
        ({"keep_parts": 0}, "keep_parts  is 0; 1 or more parts are kept"),
        ({"stream": False, "keep_parts": 3}, "keep_parts  is 3; it is for stream: true"),
    ],
)
def test_keys_of_a_stream_that_make_no_sense_are_refused(made, tmp_path, keys, message):
    with pytest.raises(UserError, match=message):
        api.data(recipe(made, tmp_path / "cache", **keys))


def test_a_mixture_or_a_wrong_split_of_a_stream_is_refused(made, tmp_path):
    run = recipe(made, tmp_path / "cache")
    both = {"mixture": [run["data"]["source"], {"kind": "stories"}], "source": None}
    with pytest.raises(UserError, match="mixture.0.stream  is true; a stream is data.source"):
        api.data(run | {"data": run["data"] | both})
    with pytest.raises(UserError, match="split is trian; did you mean train?"):
        api.data(recipe(made, tmp_path / "cache", split="trian"))
    with pytest.raises(UserError, match="a batch of .*, or a larger data.source.part_tokens would"):
        go(recipe(made, tmp_path / "cache", part_tokens=300), tmp_path / "run")


def test_a_plan_fetches_nothing_and_data_shows_the_first_part(made, tmp_path):
    run = recipe(NAME, tmp_path / "cache")  # of a hub that is not there
    plan = api.plan(run, on="v6e-1")
    assert isinstance(plan, Plan)
    assert plan.extent.steps == 12 and plan.extent.epoch_steps is None
    assert not any("sequences per epoch" in note for note in plan.notes)
    keys = ["data.validation=0.2"]
    prepared = api.data(recipe(made, tmp_path / "cache"), keys, console=Console(file=StringIO()))
    (stream,) = (tmp_path / "cache/streams").iterdir()
    assert {path.stem for path in stream.glob("part-*")} == {"part-00000"}
    assert len(prepared.split("validation")) and prepared.vocab == 257


@pytest.mark.long
def test_a_run_keeps_to_the_commit_it_began_with(tmp_path, monkeypatch):
    hub = DatasetHub(corpus())
    with online(hub, tmp_path, monkeypatch):
        run = recipe(NAME, tmp_path / "cache")
        go(run, tmp_path / "run", "train.steps=2")
        hub.commit, hub.files = "f" * 40, corpus(60)
        go(run, tmp_path / "run", "train.steps=3")
        go(run, tmp_path / "run", "train.steps=4")
        records = read(tmp_path / "run/metrics.jsonl")
        assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4]
        with pytest.raises(UserError, match="data"):  # which is another run
            go(run, tmp_path / "run", f"data.source.revision={hub.commit}", "train.steps=5")


@pytest.mark.long
def test_a_hub_that_is_gone_for_long_ends_a_run_with_what_it_has(tmp_path, monkeypatch):
    hub = DatasetHub(corpus())
    monkeypatch.setattr(downloads, "PATIENCE", 0.01)
    with online(hub, tmp_path, monkeypatch):
        run = recipe(NAME, tmp_path / "cache")
        api.data(run, console=Console(file=StringIO()))
        hub.refuses = 503
        with pytest.raises(UserError, match="the same command again goes on from there"):
            go(run, tmp_path / "run")
        done = len(numbers(tmp_path / "run"))
        hub.refuses = None
        _, text = go(run, tmp_path / "run")
        assert f"resuming from step {done} of 12" in text and done > 0
        go(run, tmp_path / "whole")
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


def spawned(
    folder: Path, run: dict, hub: DatasetHub, *keys: str, count: int = 1, own: bool = False
) -> None:
    """A run in as many processes, four devices in all; with caches of their own or one of all."""
    (folder / "tiny.yaml").write_text(yaml.safe_dump(run))
    words = ["tiny.yaml", *KEYS[1:], f"run.dir={folder / 'run'}", *keys]
    each = {i: {"WINDLASS_CACHE": str(folder / f"cache-{i}")} for i in range(count)} if own else {}
    how = {"environ": environment(hub, folder / "home"), "environ_of": each}
    with processes(folder, words, count, 4 // count, **how) as running:
        ended = running.finish()
    assert all(one.code == 0 for one in ended), ended[0].output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """Twelve steps of one process, from a hub that is always there."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with DatasetHub(corpus()) as hub:
        spawned(folder, recipe(NAME, folder / "cache"), hub)
    return folder / "run"


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_run_with_five_lost_connections_goes_on_in_any_number_of_processes(
    tmp_path, undisturbed, count
):
    with DatasetHub(corpus(), cuts=5) as hub:
        run = recipe(NAME, tmp_path / "cache")
        spawned(tmp_path, run, hub, "train.steps=5")
        hub.cuts += 5
        if own := count == 4:
            run["data"]["cache"] = None
        else:
            run["data"]["cache"] = str(tmp_path / "elsewhere")
        spawned(tmp_path, run, hub, count=count, own=own)
        assert hub.cuts == 0
    ours, theirs = (numbers(folder) for folder in (tmp_path / "run", undisturbed))
    assert [one[2:] for one in ours] == [one[2:] for one in theirs]  # tokens and parts
    assert [one[0] for one in ours] == pytest.approx([one[0] for one in theirs], rel=1e-5)
    if count == 1:
        assert ours == theirs


@pytest.mark.long
def test_a_kill_in_the_middle_of_a_part_loses_no_more_than_that(tmp_path, undisturbed):
    with DatasetHub(corpus()) as hub:
        hub.holds = "data/train-00001.jsonl"
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe(NAME, tmp_path / "cache")))
        words = ["tiny.yaml", *KEYS[1:], f"run.dir={tmp_path / 'run'}", "checkpoint.every=2"]
        how = {"environ": environment(hub, tmp_path / "home")}
        with processes(tmp_path, words, 1, 4, **how) as running:
            running.until("step  3/12")
            while not any(name == hub.holds for name, _ in hub.ranges):
                assert running.started[0].poll() is None, running.output(0)
            running.started[0].kill()
            running.started[0].wait()
        hub.holds = ""
        hub.let_go.set()
        spawned(tmp_path, recipe(NAME, tmp_path / "cache"), hub)
        begins = [begin for name, begin in hub.ranges if name == "data/train-00001.jsonl"]
        assert begins[0] == 0 < begins[-1]
    assert numbers(tmp_path / "run") == numbers(undisturbed)
