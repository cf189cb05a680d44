"""A `residual:` section: what it changes of a run, and what it leaves as it was."""

from tests.trained import recipe
from windlass.devices import chips
from windlass.layers.names import named
from windlass.program.built import Built
from windlass.program.footprint import footprint
from windlass.run.identity import digest
from windlass.starting.describe import describe

STREAMS = {"residual": {"kind": "hc", "streams": 4}}


def built(*keys: str, **sections) -> Built:
    return Built(describe(recipe() | sections, ["device.count=1", *keys]))


def test_lora_on_every_linear_map_adapts_none_of_a_residual_which_is_trained_itself():
    both = built(**STREAMS, adapter={"kind": "lora", "targets": ["*"]})
    is_trained = dict(named(both.trainable.mask))
    connections = {name: trained for name, trained in is_trained.items() if "_residual" in name}
    assert len(connections) == 2 * 5 and all(connections.values())
    assert not any("lora" in name or "base" in name for name in connections)
    adapted = {name for name, trained in is_trained.items() if trained}
    alone = dict(named(built(adapter={"kind": "lora", "targets": ["*"]}).trainable.mask))
    assert adapted - connections.keys() == {name for name, is_on in alone.items() if is_on} != set()
    assert both.identity["trainable"] == "the adapter and the residual"


def test_a_residual_is_of_the_identity_and_of_the_folder_and_the_plain_one_as_if_unsaid():
    unsaid, plain, wide = built(), built("residual=plain"), built(**STREAMS)
    assert wide.identity == unsaid.identity | {"residual": "hc (streams 4)"}
    assert plain.identity == unsaid.identity
    assert digest(plain.run) == digest(unsaid.run) != digest(wide.run)
    assert built("residual.streams=2", **STREAMS).identity["residual"] == "hc (streams 2)"


def test_the_footprint_counts_every_stream_and_the_weights_between_them():
    chip = chips.find("TPU v5 lite")
    assert chip is not None
    one, four = (footprint(each.run, chip, "bfloat16") for each in (built(), built(**STREAMS)))
    extra = [x.size for name, x in named(built(**STREAMS).abstract) if "_residual" in name]
    assert four.state - one.state >= 12 * sum(extra)  # the weights and two moments in float32
    run = built().run
    saved = 3 * 2 * run.model.layers * run.model.embed * run.data.length  # of two branches a layer
    assert four.row - one.row >= 2 * saved  # in bfloat16
