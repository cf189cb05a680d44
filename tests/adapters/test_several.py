"""Several adapters in order: a look-up table that drops the matrices, and LoRA over it."""

import equinox as eqx
import jax
import numpy as np
import pytest
import yaml
from windlass.adapters.codebook import Adapter as Table  # pyright: ignore[reportMissingImports]

from tests import strangers, tiny
from windlass import adapters
from windlass.adapters.lora import Adapter as Lora
from windlass.checkpoint.fingerprint import named
from windlass.config import json_schema, load, read, tree
from windlass.config.reading import describe as words
from windlass.config.sections import fields
from windlass.errors import UserError
from windlass.program.trainable import choose
from windlass.run import Run

RECIPE = yaml.safe_load((strangers.HERE / "recipes" / "codebook.yaml").read_text())
ALONE = ["device.kind=cpu", "device.count=1"]


def made(*chosen):
    """The tiny llama with these adapters."""
    return tiny.adapted(tiny.model("llama"), *chosen)


def query(model):
    """The map of queries of the first layer."""
    return jax.tree.map(lambda x: x[0], model.blocks.kinds[0].attention.query)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.long
def test_lora_over_a_table_starts_as_the_table_and_merges_into_one_matrix(dora):
    model = made(Table(), Lora(rank=3, dora=dora))
    table, batch = made(Table()), tiny.rows(96)
    measured = eqx.filter_jit(tiny.loss)
    loss = lambda *given: float(measured(*given))  # noqa: E731
    assert loss(model, batch) == pytest.approx(loss(table, batch), rel=1e-6)
    assert loss(table, batch) != pytest.approx(loss(tiny.model("llama"), batch), rel=1e-6)
    moved = eqx.tree_at(
        lambda m: m.blocks.kinds[0].attention.query.up.weight, model, replace_fn=lambda x: x + 0.1
    )
    merged = eqx.filter_jit(adapters.merged)(moved)
    assert not adapters.is_adapted(merged)
    assert loss(moved, batch) != pytest.approx(loss(table, batch), rel=1e-4)
    assert loss(merged, batch) == pytest.approx(loss(moved, batch), rel=1e-5)
    assert eqx.tree_equal(adapters.plain(moved), table)
    if dora:  # the norms are those of what the table says
        codes, values = (np.asarray(x) for x in (query(table).codes, query(table).table))
        flat = codes.reshape(32, len(values), -1)
        weight = values[np.arange(len(values))[:, None], flat].reshape(32, -1)
        found = np.asarray(query(model).magnitude).ravel()
        assert np.abs(found - np.linalg.norm(weight, axis=0)).max() < 1e-5


def test_each_adapter_declares_what_it_trains_and_codes_are_fixed():
    def trained(*chosen) -> set[str]:
        arrays = eqx.filter(made(*chosen), eqx.is_array)
        mask = choose(arrays, None).mask
        return {
            path.rpartition("query.")[2]
            for path, x in named(eqx.filter(arrays, mask)).items()
            if "query" in path
        }

    assert trained(Table(), Lora()) == {"down.weight", "up.weight"}
    assert trained(Table(trained=True), Lora()) == {
        "base.table",
        "base.bias",
        "down.weight",
        "up.weight",
    }
    assert trained(Table(trained=True)) == {"table", "bias"}
    arrays = eqx.filter(made(Table(), Lora()), eqx.is_array)
    assert choose(arrays, ("*.query.*",)).mask.blocks.kinds[0].attention.query.base.table
    with pytest.raises(UserError) as refusal:
        choose(arrays, ("blocks.attention.query.base.codes",))
    assert str(refusal.value) == (
        "train.trainable: blocks.attention.query.base.codes matches only fixed arrays, which are "
        "never trained: blocks.attention.query.base.codes; leave it out, or name others"
    )
    with pytest.raises(UserError) as refusal:
        choose(eqx.filter(made(Table()), eqx.is_array), None)
    assert str(refusal.value) == (
        "nothing would be trained: no adapter here trains an array of its own; a key of it may "
        "change that, and train.trainable names what to train"
    )


def test_a_recipe_has_no_adapter_one_or_a_list_and_each_is_written_as_it_was_said():
    for said in (None, RECIPE["adapter"][1], RECIPE["adapter"]):
        run = read(Run, RECIPE | {"adapter": said})
        written = tree(run)["adapter"]
        assert (written is None, isinstance(written, list)) == (
            said is None,
            isinstance(said, list),
        )
        assert read(Run, RECIPE | {"adapter": written}).adapter == run.adapter
    assert run.adapter == (Table(trained=True), Lora(rank=4))


def test_the_command_line_names_an_adapter_of_a_list_by_its_number():
    run = load(RECIPE, ["adapter.1.rank=8", "adapter.0.trained=false"]).read(Run, None)
    assert run.adapter == (Table(), Lora(rank=8))
    assert load(RECIPE, ["adapter=[lora]"]).read(Run, None).adapter == (Lora(),)
    one = load(RECIPE | {"adapter": {"kind": "lora"}}, ["adapter=[codebook, {rank: 2}]"])
    assert one.read(Run, None).adapter == (Table(), Lora(rank=2))


def test_wrong_keys_of_a_list_are_named_with_their_number():
    with pytest.raises(UserError) as refusal:
        load(RECIPE, ["adapter.1.rank=0", "adapter.0.rang=2"]).read(Run, None)
    assert str(refusal.value) == (
        "2 problems in the recipe and the command line:\n"
        "  adapter.0.rang  unknown; it can be group, targets or trained\n"
        "  adapter.1.rank  is 0; it must be 1 or more"
    )
    with pytest.raises(UserError) as refusal:
        load(RECIPE, ["adapter.rank=8", "adapter.2.rank=8"]).read(Run, None)
    assert str(refusal.value) == (
        "2 problems in the recipe and the command line:\n"
        "  adapter.rank  unknown; adapter is a list, of which adapter.0 or adapter.1 can be named\n"
        "  adapter.2     unknown; adapter is a list, of which adapter.0 or adapter.1 can be named"
    )


def test_schema_and_reference_know_the_list():
    schema = json_schema(Run)["properties"]["adapter"]
    kinds = [one.get("type") or one.get("enum") for one in schema["anyOf"]]
    assert schema["default"] is None and kinds[-2:] == ["array", "null"]
    assert words(fields(Run)["adapter"][1]) == (
        "a section with kind: codebook, grid, lookup, lora or scalar; or a list of such, or null"
    )
