"""A run that starts from the weights of another: what it takes, keeps and refuses."""

import shutil
from pathlib import Path

import pytest
from rich.console import Console

import windlass
from tests import trained
from tests.training.test_loop import Told
from windlass.checkpoint import archive
from windlass.checkpoint.fingerprint import measure
from windlass.checkpoint.store import Store, folder_of
from windlass.errors import UserError
from windlass.run_folder import folder as folders
from windlass.starting import origin
from windlass.starting.describe import describe
from windlass.telemetry import metrics
from windlass.training.session import open_session

SMALL = ["train.steps=2", "train.batch=16", "train.evaluate_every=null", "mesh.fsdp=2"]
NAMES = (
    "embedding.weight, blocks.attention_norm.scale, blocks.attention.query.weight, "
    "blocks.attention.key.weight, blocks.attention.value.weight, blocks.attention.output.weight, "
    "blocks.attention.query_norm.scale, blocks.attention.key_norm.scale, blocks.mlp_norm.scale, "
)


@pytest.fixture
def donor(tmp_path_factory, here) -> Path:
    """The small run that many tests look at, copied here with its corpus."""
    place = trained.workplace(tmp_path_factory)
    shutil.copy(place / trained.CORPUS, here)
    return Path(shutil.copytree(trained.only_run(place), "donor"))


def recipe(**model) -> dict:
    """That run's recipe with its model and tokenizer left to the run itself, on two devices."""
    whole = trained.recipe(device={"count": 2}) | {"model": {"run": "donor"} | model}
    del whole["tokenizer"], whole["by_device"]
    return whole


def take(*keys: str, **model) -> tuple[origin.Taken, list[str]]:
    """What a run would take, and the warnings."""
    described, said = describe(recipe(**model), [*SMALL, *keys]), []
    assert described.run.start is not None
    with described.scope():
        session = open_session(described, Console(quiet=True))
        vocabulary = str(session.identity["tokenizer"])
        taken = origin.take(session.built, vocabulary, said.append)
    return taken, said


def refused(*keys: str, **model) -> str:
    with pytest.raises(UserError) as refusal:
        take(*keys, **model)
    return str(refusal.value)


def arrays(run: Path, step: int) -> dict[str, int]:
    """The fingerprint of each weight at a step."""
    found = archive.manifest(folder_of(run) / str(step))["arrays"]
    return {
        name: about["fingerprint"] for name, about in found.items() if name.startswith("weights.")
    }


@pytest.mark.long
def test_a_run_starts_at_step_0_from_the_weights_of_another_and_never_needs_it_again(donor):
    told = Told("run.dir=mine", *SMALL, recipe=recipe())
    assert (
        "start        donor at step 4, last weights\nloaded       all 28,224 parameters\n"
    ) in told.text
    mine = told.trained.folder
    assert arrays(mine, 0) == arrays(donor, 4) != arrays(mine, 2)
    stored = folders.stored(mine)
    assert stored["model"] == folders.stored(donor)["model"]
    start = {name: value for name, value in stored["start"].items() if value is not None}
    assert start == {"run": "donor", "weights": "last"}
    expected = metrics.last(donor / folders.METRICS, "validation_loss")
    shutil.rmtree(donor)
    assert expected is not None
    found = windlass.evaluate(mine, step=0)["loss"]
    assert found == pytest.approx(expected["validation_loss"], rel=1e-5)
    again = Told("run.dir=mine", *SMALL, recipe=recipe())
    assert "this run is finished: step 2 of 2 in mine" in again.text


def test_what_fits_is_taken_and_what_does_not_is_listed_with_both_shapes(donor):
    taken, said = take(mlp=48, tied=False)
    assert taken.facts == [
        ("start", "donor at step 4, last weights"),
        ("loaded", f"15,936 parameters: {NAMES}norm.scale"),
        ("new", "blocks.mlp.gate.weight [2, 32, 48]: [2, 32, 64] there"),
        ("new", "blocks.mlp.up.weight [2, 32, 48]: [2, 32, 64] there"),
        ("new", "blocks.mlp.down.weight [2, 48, 32]: [2, 64, 32] there"),
        ("new", "output.weight [300, 32]: absent there"),
    ]
    assert said == []
    other, _ = take("model.family=llama", "model.eps=1e-5")
    assert ("not used", "blocks.attention.query_norm.scale [2, 8]: absent here") in other.facts


def test_frozen_weights_are_taken_from_where_they_are_stored(donor):
    whole, _ = take()
    identity = archive.manifest(folder_of(donor) / "4")["identity"]
    shutil.rmtree(folder_of(donor))
    store = Store(donor, say=print)
    trained = {path: x for path, x in whole.arrays[0].items() if "mlp" in path}
    store.save(4, {"weights": trained}, identity)
    rest = {path: x for path, x in whole.arrays[0].items() if "mlp" not in path}
    store.save_frozen({"model": rest}, identity)
    store.close()
    found, _ = take()
    assert found.facts == whole.facts
    assert measure(found.arrays[0]) == measure(dict(sorted(whole.arrays[0].items())))


def test_another_start_is_another_run(donor):
    one = describe(recipe(), SMALL).folder
    shutil.copytree(donor, "second")
    assert describe(recipe(run="second"), SMALL).folder != one
    assert describe(recipe(), [*SMALL, "train.steps=9"]).folder == one


def test_a_run_whose_origin_is_gone_is_found_unless_there_are_several(donor):
    for number in (1, 2):
        run = describe(recipe(layers=number), SMALL)
        run.folder.mkdir(parents=True)
        folders.store(run.folder, run.run, None)
        if number == 1:
            shutil.move(donor, "elsewhere")
            assert describe(recipe(), SMALL).folder == run.folder
            shutil.move("elsewhere", donor)
    shutil.rmtree(donor)
    both = " and ".join(str(path) for path in sorted(Path("runs").iterdir()))
    assert refused() == (
        f"model.run is donor, which is gone, and {both} started from it; "
        "run.dir says which of them goes on"
    )


def test_where_there_is_nothing_to_start_from_is_said(donor):
    assert refused(run="nowhere") == (
        "model.run: nowhere is not a run: there is no such folder; "
        "nothing is in runs/ here yet, and `windlass train RECIPE` makes a run"
    )
    assert refused(weights="ema") == (
        "donor has no averaged weights, since its train.ema is null; weights can be last or best"
    )
    assert refused(weights="bst") == (
        "1 problem in the recipe and the command line:\n"
        '  model.weights  is "bst"; did you mean best?'
    )
    assert refused("start.run=donor") == (
        "1 problem in the recipe and the command line:\n"
        "  start  is what model.run is written out as; leave one of them out"
    )
    shutil.rmtree("donor/checkpoints")
    assert refused() == "model.run is donor, which has no checkpoint yet"


def test_a_model_that_nothing_fits_is_refused_with_both_shapes(donor):
    said = refused(embed=16, layers=1, head_dim=16)
    first, *lines, last = said.splitlines()
    assert first == "no weight of donor fits this model:"
    assert lines[0] == "  embedding.weight  is [300, 32] there and [300, 16] here"
    assert len(lines) == 8 and last == "  and 5 more"


def test_other_tokens_under_the_same_weights_are_refused_and_under_new_ones_warned_of(donor):
    theirs = tokenizer_of(donor)
    said = refused("tokenizer=byte")
    ours = said.partition("this run is ")[2].partition(":")[0]
    assert ours.startswith("of 257 tokens (")
    assert said == (
        f"the tokenizer of donor is {theirs}, that of this run is {ours}: to embedding.weight they "
        "are other tokens. Without a tokenizer section that of donor is used; with another "
        "model.vocab these are initialized anew"
    )
    _, warnings = take("tokenizer=byte", vocab=257)
    assert warnings == [
        f"the tokenizer of donor is {theirs}, that of this run is {ours}: "
        "embedding and head are initialized anew"
    ]


def tokenizer_of(run: Path) -> str:
    return archive.manifest(folder_of(run) / "4")["identity"]["tokenizer"]
