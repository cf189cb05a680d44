from collections.abc import Callable
from itertools import islice

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from windlass.data import Prepared
from windlass.data.load import Loader, addressable_rows, evaluation_batches
from windlass.data.pack import Sequences
from windlass.data.shuffle import permuted
from windlass.errors import UserError

Documents = Callable[..., Prepared]


def whole(shape: tuple[int, ...], name: str) -> NamedSharding:
    return NamedSharding(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]), P())


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(
        (np.asarray(left[name]) == np.asarray(right[name])).all() for name in left
    )


@pytest.fixture
def rows(documents: Documents) -> Sequences:
    """Ten rows, each with a document of another length."""
    found = documents(["x" * n for n in range(1, 11)], packing="none").split("train")
    assert isinstance(found, Sequences)
    return found


def test_a_batch_is_the_same_iterated_or_by_number_and_from_any_start(rows: Sequences):
    loader = Loader(rows, 3, seed=5, shuffle=True)
    for start in (0, 1, 7):
        for step, batch in enumerate(islice(loader.iterate(start, whole), 5), start=start):
            assert same(batch, loader.batch(step))


def test_a_batch_follows_from_the_seed_and_its_number_alone(rows: Sequences):
    first, again, other = (Loader(rows, 3, seed=seed, shuffle=True) for seed in (5, 5, 6))
    far = 10**9 + 1
    assert first.row_numbers(far).tolist() == again.row_numbers(far).tolist()
    assert any((first.row_numbers(i) != other.row_numbers(i)).any() for i in range(5))


def test_an_epoch_covers_every_row_once_but_those_dropped(rows: Sequences):
    loader = Loader(rows, 3, seed=0, shuffle=True)
    assert (loader.batches_per_epoch, loader.dropped) == (3, 1)
    epochs = []
    for epoch in range(4):
        steps = range(3 * epoch, 3 * epoch + 3)
        epochs.append(np.concatenate([loader.row_numbers(step) for step in steps]).tolist())
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


@pytest.mark.parametrize("at_once", [1, 6, 4096])
def test_rows_are_the_same_however_many_are_shuffled_at_once(
    rows: Sequences, monkeypatch: pytest.MonkeyPatch, at_once: int
):
    monkeypatch.setattr("windlass.data.load.SHUFFLED", at_once)
    loader = Loader(rows, 3, seed=5, shuffle=True)
    for step in (0, 1, 2, 3, 100, 5, 4):
        epoch, number = divmod(step, 3)
        places = np.arange(3 * number, 3 * number + 3)
        expected = permuted(places, len(rows), seed=5, epoch=epoch)
        assert loader.row_numbers(step).tolist() == expected.tolist()


def test_without_shuffling_rows_come_in_their_order(rows: Sequences):
    loader = Loader(rows, 4, seed=0, shuffle=False)
    assert [loader.row_numbers(step).tolist() for step in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [0, 1, 2, 3],
    ]
    assert loader.dropped == 2


@pytest.mark.parametrize("batch", [1, 3, 7, 10, 16])
def test_evaluation_counts_every_row_once(rows: Sequences, batch: int):
    batches = list(evaluation_batches(rows, batch, whole))
    assert len(batches) == -(-len(rows) // batch)
    assert all(one["tokens"].shape == (batch, rows.length) for one in batches)
    joined = {name: np.concatenate([one[name] for one in batches]) for name in batches[0]}
    assert same({name: column[:10] for name, column in joined.items()}, rows.batch(range(10)))
    assert (joined["weight"][10:] == 0).all() and (joined["document"][10:] == -1).all()


def test_devices_hold_their_part_and_rows_are_read_once(
    rows: Sequences, monkeypatch: pytest.MonkeyPatch
):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"))
    read: list[list[int]] = []
    plain = Sequences.batch

    def watched(self, numbers, *epochs):
        read.append(np.asarray(numbers).tolist())
        return plain(self, numbers, *epochs)

    monkeypatch.setattr(Sequences, "batch", watched)
    loader = Loader(rows, 8, seed=0, shuffle=False, prefetch=0)
    for spec in (P("data"), P("data", "tensor"), P(None, "tensor"), P()):
        place = NamedSharding(mesh, spec)
        batch = next(loader.iterate(0, lambda shape, name, place=place: place))
        assert all(column.sharding == place for column in batch.values())
        assert same(batch, plain(rows, range(8)))
        assert read.pop() == list(range(8)) and not read


def test_a_process_reads_the_rows_of_its_own_devices_alone():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"))
    parts = NamedSharding(mesh, P("data")).devices_indices_map((8, 16))
    mine = [parts[device] for device in mesh.devices[1:3].flat]
    assert addressable_rows(mine, 8).tolist() == [2, 3, 4, 5]
    assert addressable_rows(parts.values(), 8).tolist() == list(range(8))


def test_fewer_rows_than_a_batch_are_refused(rows: Sequences):
    with pytest.raises(UserError) as refused:
        Loader(rows, 11, seed=0, shuffle=True)
    assert str(refused.value) == (
        "train.batch is 11 and there are 10 rows of 16 tokens to train on; a batch of 10, "
        "shorter rows (data.length) or more documents would do"
    )
