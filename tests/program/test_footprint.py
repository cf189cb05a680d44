"""The mesh that real models get on real slices, and the bytes it is chosen by."""

from functools import cache

import pytest

from windlass.config import load
from windlass.devices import chips
from windlass.devices.mesh import AXES
from windlass.devices.mesh_choice import ROOM, Footprint, Rows
from windlass.program.footprint import footprint
from windlass.run import Run
from windlass.run.batches import choice, microbatch

MODELS = {
    "0.5B": dict(embed=896, mlp=4864, layers=24, heads=14, kv_heads=2, head_dim=64),
    "0.6B": dict(embed=1024, mlp=3072, layers=28, heads=16, kv_heads=8, head_dim=128),
    "3B": dict(embed=2048, mlp=11_008, layers=36, heads=16, kv_heads=2, head_dim=128),
    "8B": dict(embed=4096, mlp=14_336, layers=32, heads=32, kv_heads=8, head_dim=128),
}
FAMILIES = {"0.5B": "qwen2", "0.6B": "qwen3", "3B": "qwen2", "8B": "llama"}
WORDS = {"8B": 128_256}


@cache
def read(model: str, *keys: str) -> Run:
    recipe = {
        "model": {"family": FAMILIES[model], "vocab": WORDS.get(model, 151_936), "theta": 1e6}
        | MODELS[model]
        | ({} if model == "8B" else {"tied": True}),
        "data": {"source": "stories", "length": 1024},
        "optim": {"kind": "adamw", "learning_rate": 1e-4},
        "train": {"steps": 9, "batch": 32},
    }
    return load(recipe, keys).read(Run, None)


V5E, V6E, LORA = "TPU v5 lite", "TPU v6 lite", "adapter=lora"


@cache
def on_v5e(model: str, *keys: str) -> Footprint:
    return footprint(read(model, *keys), known(V5E), "bfloat16")


def known(name: str) -> chips.Chip:
    chip = chips.find(name)
    assert chip is not None
    return chip


def bytes_of(model: str, chip: str, *keys: str) -> Footprint:
    """Rows are no part of it, and of the chip only the memory."""
    found, memory = on_v5e(model, *(key for key in keys if "adapter" in key)), known(chip)
    return found._replace(memory=memory.memory_bytes, room=ROOM["tpu"] * memory.memory_bytes)


CHOSEN = [
    (
        ("0.5B", V5E),
        (1, 8, 1),
        "weights and optimiser take 1.0 of 15.8 GiB, unsharded they would take 8.3",
    ),
    (
        ("0.5B", V5E, LORA),
        (8, 1, 1),
        "most weights are frozen; weights and optimiser take 1.1 of 15.8 GiB",
    ),
    (
        ("8B", V6E, LORA, "train.batch=8"),
        (8, 1, 1),
        "most weights are frozen; weights and optimiser take 15.7 of 31.2 GiB",
    ),
    (
        ("8B", V5E, LORA, "train.batch=8"),
        (1, 8, 1),
        "weights and optimiser take 2.0 of 15.8 GiB, unsharded they would take 15.7",
    ),
    (
        ("3B", V6E),
        (1, 8, 1),
        "weights and optimiser take 6.5 of 31.2 GiB, unsharded they would take 51.7",
    ),
    (
        ("0.6B", V6E, "train.batch=4"),
        (1, 4, 2),
        "4 rows for 8 devices; weights and optimiser take 1.2 of 31.2 GiB, "
        "unsharded they would take 5.0",
    ),
    (
        ("0.6B", V6E, "train.batch_per_device=2", "train.batch=null", "mesh.data=2"),
        (2, 4, 1),
        "weights and optimiser take 2.5 of 31.2 GiB, unsharded they would take 10.0",
    ),
]


@pytest.mark.parametrize(("case", "expected", "why"), CHOSEN, ids=lambda x: str(x)[:40])
def test_eight_devices_are_split_by_what_is_trained_and_what_fits(case, expected, why):
    model, chip, *keys = case
    found = choice(read(model, *keys), 8, bytes_of(*case))
    assert tuple(found.split[name] for name in AXES) == expected
    assert (found.why, found.lacks) == (why, None)


def test_what_fits_nowhere_is_in_as_many_pieces_as_can_be_and_says_what_it_needs():
    found = choice(read("8B"), 8, bytes_of("8B", V5E))
    assert found.split == {"data": 1, "fsdp": 8, "tensor": 1}
    assert found.lacks is not None and 25 < found.lacks / 2**30 < 45


def test_tensor_is_chosen_where_what_fsdp_gathers_does_not_fit_whole():
    run, held, split = read("8B"), bytes_of("8B", V6E), {"data": 1, "fsdp": 4, "tensor": 2}
    assert choice(run, 8, held).split == {"data": 1, "fsdp": 8, "tensor": 1}
    found = choice(run, 8, held._replace(room=held.needs(split, Rows(32, None))))
    assert found.split == split
    assert found.why is not None and found.why.startswith("less does not fit; ")


def test_slices_divide_the_data_and_each_has_the_weights_in_pieces():
    run, held = read("3B", "train.batch=64"), bytes_of("3B", V6E)
    found = choice(run, 32, held, slices=2)
    assert found.split == {"data": 2, "fsdp": 16, "tensor": 1}
    assert found.why == (
        "weights and optimiser take 3.2 of 31.2 GiB, unsharded they would take 51.7; "
        "data over the network between 2 slices"
    )
    # Each slice alone is too small for what is trained.
    pieces = {"data": 1, "fsdp": 32, "tensor": 1}
    few = held._replace(room=held.needs(pieces, Rows(64, None)))
    assert choice(run, 32, few, slices=2).split == pieces


def test_where_memory_is_not_known_weights_are_in_pieces_and_on_one_device_nothing_is_said():
    found = choice(read("0.5B"), 8)
    assert tuple(found.split.values()) == (1, 8, 1)
    assert found.why == "sharded, as the memory of such devices is not in the catalogue"
    assert choice(read("0.5B"), 1, bytes_of("0.5B", V5E)).why is None
    assert choice(read("0.5B", "mesh.fsdp=1"), 8).split["data"] == 8
    assert choice(read("0.5B", "mesh.tensor=2"), 8).split == {"data": 1, "fsdp": 4, "tensor": 2}


def test_rows_that_do_not_go_round_are_left_to_be_refused_unless_they_are_few():
    # Of 14 heads no device has a whole number in four pieces, so 2 rows do not fill 8 devices.
    for rows, expected in [(12, (1, 8, 1)), (4, (1, 4, 2)), (2, (1, 8, 1))]:
        found = choice(read("0.5B", f"train.batch={rows}"), 8).split
        assert tuple(found.values()) == expected


# What the TPU compiler found of the same steps: proofs/tpu.json has them.
COMPILED = [
    (("0.6B", V5E), (1, 8, 1), 7.86),
    (("0.6B", V5E), (2, 2, 2), 6.85),
    (("0.6B", V6E, "train.batch=4"), (1, 1, 1), 14.83),
    (("0.5B", V5E, LORA, "adapter.rank=32", "train.batch=64"), (8, 1, 1), 9.32),
    (("8B", V5E, LORA, "train.batch=8"), (1, 8, 1), 8.12),
]


@pytest.mark.parametrize(("case", "sizes", "gib"), COMPILED, ids=str)
def test_the_estimate_is_no_less_than_what_a_compiler_finds_and_at_most_a_third_more(
    case, sizes, gib
):
    split: dict[str, int] = dict(zip(AXES, sizes, strict=True))
    model, _, *keys = case
    needs = bytes_of(*case).needs(split, microbatch(read(model, *keys).train))
    assert gib <= needs / 2**30 <= 1.34 * gib


@pytest.mark.parametrize(("kind", "scales"), [("nf4", 2 / 64), ("int4", 2 / 128)])
def test_a_base_in_4_bits_has_half_a_byte_a_weight_and_its_scales(kind, scales):
    full, four = (
        on_v5e("8B", LORA, "start.path=there", *base) for base in ((), (f"start.base={kind}",))
    )
    size = MODELS["8B"]
    heads = size["head_dim"] * 2 * (size["heads"] + size["kv_heads"])
    weights = size["layers"] * size["embed"] * (heads + 3 * size["mlp"])
    assert full.state - four.state == weights * (2 - 0.5 - scales)
    assert (full.layer, full.row, full.vocabulary) == (four.layer, four.row, four.vocabulary)
