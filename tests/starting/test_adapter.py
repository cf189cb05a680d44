"""A run with an adapter: what it stores, how it goes on, and what another run takes from it."""

import copy
import dataclasses
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from tests import published
from tests.training.campaign import RECIPE
from tests.training.test_loop import SMALL, Told
from windlass import adapters, api
from windlass.adapters.lora import Adapter
from windlass.checkpoint import archive
from windlass.checkpoint.fingerprint import measure, named
from windlass.checkpoint.store import FROZEN, Store, folder_of, load, load_frozen
from windlass.errors import UserError
from windlass.models import qwen3
from windlass.run_folder import folder as folders
from windlass.starting import adapter, origin
from windlass.starting.describe import describe
from windlass.training.session import Session, open_session

ADAPTER: dict[str, Any] = {
    "kind": "lora",
    "rank": 4,
    "dropout": 0.2,
    "targets": ["blocks.mlp.*", "q_proj"],
}
LORA = RECIPE | {"adapter": ADAPTER}
KEYS = [
    "device.count=1",
    "train.ema=0.9",
    "optim.schedule.shape=constant",
    "train.steps=4",
    "checkpoint.every=2",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Told]:
    run = tmp_path_factory.mktemp("adapter") / "run"
    return run, Told(f"run.dir={run}", *KEYS, recipe=LORA)


@pytest.fixture
def run(finished, here) -> Path:
    return Path(shutil.copytree(finished[0], here / "run"))


def session(*keys: str, recipe: dict | None = None) -> Session:
    described = describe(copy.deepcopy(recipe or LORA), [*SMALL, *KEYS, *keys])
    with described.scope():
        return open_session(described, Console(quiet=True))


def lora(of: Session) -> Adapter:
    (found,) = of.run.adapter
    assert isinstance(found, Adapter)
    return found


def written(folder: Path) -> dict[str, int]:
    return {name: x["fingerprint"] for name, x in archive.manifest(folder)["arrays"].items()}


def test_a_checkpoint_holds_the_adapter_alone_and_the_base_never_changes(finished):
    run, told = finished
    assert "parameters   2,816 trainable of 29,664 (9.4930%)" in told.text
    state = written(folder_of(run) / "4")
    parts = {name for name in state if name.startswith(("weights.", "ema.", "moments."))}
    assert {name.split(".")[-2] for name in parts if "blocks" in name} == {"down", "up"}
    assert not any("base" in name or "embedding" in name for name in state)
    assert written(folder_of(run) / "2") != state
    plain = session(recipe=RECIPE)
    with plain.built.described.scope():
        start = measure(plain.programs.init()[0].weights)
    frozen = written(folder_of(run) / FROZEN)
    assert {
        name.removeprefix("model.").replace(".base", ""): x for name, x in frozen.items()
    } == start


@pytest.mark.long
def test_a_run_with_dropout_goes_on_with_the_same_bits_on_the_same_keys(finished, run):
    shutil.rmtree(folder_of(run) / "4")
    Told(f"run.dir={run}", *KEYS, recipe=LORA)
    assert written(folder_of(run) / "4") == written(folder_of(finished[0]) / "4")


def test_a_run_with_an_adapter_is_evaluated_and_writes(finished, run):
    told = finished[1].trained.last
    for kind, name in (("last", "validation_loss"), ("ema", "validation_ema_loss")):
        assert api.evaluate(run, weights=kind)["loss"] == pytest.approx(told[name], rel=1e-6)
    assert api.generate(run, "Once", tokens=4)


def taken(*keys: str, recipe: dict) -> tuple[Session, origin.Taken]:
    new = session(*keys, recipe=recipe)
    with new.built.described.scope():
        said = str(new.identity["tokenizer"])
        return new, origin.take(new.built, said, lambda text: None)


@pytest.mark.long
def test_the_adapter_of_another_run_goes_on_or_is_merged_as_the_recipe_says(run):
    other = {key: x for key, x in RECIPE.items() if key != "model"} | {"model": {"run": str(run)}}
    old = session()
    with old.built.described.scope():
        state, frozen = old.programs.abstract_state()
        state = load(run, {"weights": state.weights}, {}).state["weights"]
        whole = eqx.combine(state, load_frozen(run, frozen, {}).model)

    same, further = taken(recipe=other)
    assert same.run.adapter == old.run.adapter
    assert measure(further.arrays[1]) == measure(named(whole))

    plain, merged = taken("adapter=null", recipe=other)
    assert plain.run.adapter == ()
    assert merged.facts[0] == ("start", f"{run} at step 4, last weights, the adapter merged")
    expected = named(
        eqx.filter(adapters.merged(eqx.combine(whole, old.built.static)), eqx.is_array)
    )
    assert merged.arrays[0].keys() == expected.keys()
    for path, x in expected.items():
        assert np.abs(np.asarray(x) - np.asarray(merged.arrays[0][path])).max() < 1e-6

    another, base = taken("adapter.rank=2", recipe=other)
    assert lora(another) == dataclasses.replace(lora(old), rank=2)
    assert measure(base.arrays[0]) == measure(merged.arrays[0])
    with another.built.described.scope():
        start, kept = another.programs.init(base.arrays)
    ups = [x for path, x in named(start.weights).items() if path.endswith(".up.weight")]
    assert ups and not any(x.any() for x in ups)
    assert measure(adapters.plain(eqx.combine(start.weights, kept.model))) == measure(
        merged.arrays[0]
    )


def test_what_is_frozen_is_of_the_precision_it_is_multiplied_in_and_adapters_are_float32():
    built = session("precision.compute=bfloat16").built
    weights, frozen = built.parted(built.abstract)
    assert {x.dtype.name for x in jax.tree.leaves(weights)} == {"float32"}
    types = {path: x.dtype.name for path, x in named(frozen).items()}
    norms = {path for path, dtype in types.items() if dtype == "float32"}
    assert norms == {path for path in types if path.endswith(".scale")}
    assert {path for path, x in types.items() if x == "bfloat16"} == types.keys() - norms


def test_frozen_arrays_of_one_precision_are_read_in_another(tmp_path):
    stored = {"weight": jnp.arange(6.0).astype(jnp.bfloat16), "count": jnp.arange(3)}
    with closing(Store(tmp_path, say=print, keep=1, best="loss")) as store:
        store.save_frozen(stored, {})
        store.wait()
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        "weight": jax.ShapeDtypeStruct((6,), jnp.float32, sharding=place),
        "count": jax.ShapeDtypeStruct((3,), jnp.int32, sharding=place),
    }
    found = load_frozen(tmp_path, wanted, {})
    assert eqx.tree_equal(found, {"weight": jnp.arange(6.0), "count": jnp.arange(3)})


def test_an_adapter_that_peft_wrote_goes_on_and_its_folder_is_not_needed_again(run):
    old = session()
    with old.built.described.scope():
        state, frozen = old.programs.abstract_state()
        state = load(run, {"weights": state.weights}, {}).state["weights"]
    whole = eqx.combine(state, old.built.static)
    published.save_adapter(Path("from"), whole, lora(old), qwen3.NAMES, "owner/name")
    recipe = RECIPE | {"adapter": {"kind": "lora", "path": "from", "dropout": 0.2}}

    new = session("run.dir=new", recipe=recipe)
    assert lora(new) == dataclasses.replace(
        lora(old),
        alpha=8.0,
        path="from",
        targets=("down_proj", "gate_proj", "q_proj", "up_proj"),
    )
    with new.built.described.scope():
        arrays, facts = adapter.take(new.built, print)
        begun = new.programs.init(arrays)[0]
    assert facts == [("adapter", "2,816 parameters of from")]
    assert measure(begun.weights) == measure(state)

    Path("new").mkdir()
    folders.store(Path("new"), new.run, None)
    shutil.rmtree("from")
    again = session("run.dir=new", recipe=recipe)
    assert again.run.adapter == new.run.adapter
    assert refused(recipe=recipe) == (
        "adapter.path is from; a PEFT adapter is a folder with adapter_config.json"
    )


def test_a_field_that_disagrees_with_the_folder_of_an_adapter_is_refused(run):
    begun = session()
    whole = begun.built
    arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), whole.abstract)
    model = eqx.combine(arrays, whole.static)
    published.save_adapter(Path("from"), model, lora(begun), qwen3.NAMES, None)
    given = {"kind": "lora", "path": "from", "rank": 8, "alpha": 8, "dora": True}
    assert refused(recipe=RECIPE | {"adapter": given}) == (
        "2 problems in the recipe and the command line:\n"
        "  adapter.rank  is 8; that of from is 4\n"
        "  adapter.dora  is true; that of from is false"
    )


def test_targets_that_choose_nothing_are_refused_with_what_there_is():
    targets = ["blocks.mpl.*", "q_proj", "k_prj"]
    assert refused(recipe=RECIPE | {"adapter": {"kind": "lora", "targets": targets}}) == (
        "adapter.targets: blocks.mpl.*, k_prj matches no linear map; did you mean blocks.mlp.up "
        "or k_proj? there are\n  blocks.attention.query\n"
        "  blocks.attention.key\n  blocks.attention.value\n"
        "  blocks.attention.output\n  blocks.mlp.gate\n  blocks.mlp.up\n  blocks.mlp.down\n"
        "  q_proj\n  k_proj\n  v_proj\n  o_proj\n  gate_proj\n  up_proj\n  down_proj"
    )


def test_every_number_of_an_adapter_is_checked():
    wrong = {"kind": "lora", "rank": 0, "alpha": 0, "dropout": 1, "targets": []}
    assert refused(recipe=RECIPE | {"adapter": wrong}) == (
        "4 problems in the recipe and the command line:\n"
        "  adapter.rank     is 0; it must be 1 or more\n"
        "  adapter.alpha    is 0.0; it must be above 0\n"
        "  adapter.dropout  is 1.0; it is a share, 0 or more and below 1\n"
        "  adapter.targets  is empty; it must choose a linear map"
    )


def refused(*keys: str, recipe: dict) -> str:
    with pytest.raises(UserError) as refusal:
        session(*keys, recipe=recipe)
    return str(refusal.value)
