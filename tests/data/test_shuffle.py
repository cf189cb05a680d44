import numpy as np
import pytest

from windlass.chance import keys, permutations, subsets
from windlass.data.shuffle import permuted


@pytest.mark.parametrize("count", [1, 2, 3, 10, 64, 65, 1000])
def test_every_number_has_one_place(count: int):
    for epoch in range(3):
        found = permuted(np.arange(count), count, seed=1, epoch=epoch)
        assert sorted(found.tolist()) == list(range(count))


def test_a_place_is_the_same_alone_or_with_others_in_the_largest_corpus():
    count = 10**12 + 39
    places = np.array([0, 1, count - 1, 5 * 10**11])
    together = permuted(places, count, seed=7, epoch=3)
    alone = [permuted(places[i : i + 1], count, seed=7, epoch=3)[0] for i in range(4)]
    assert together.tolist() == alone
    assert (together < count).all() and len(set(alone)) == 4


def test_neighbouring_seeds_and_epochs_share_no_order():
    orders = {
        tuple(permuted(np.arange(12), 12, seed=seed, epoch=epoch).tolist())
        for seed in range(20)
        for epoch in range(20)
    }
    assert len(orders) == 400


@pytest.mark.parametrize("count", [5, 12])
def test_every_number_comes_to_every_place_equally_often(count: int):
    epochs = 500
    drawn = [permuted(np.arange(count), count, seed=0, epoch=epoch) for epoch in range(epochs)]
    for place in np.array(drawn).T:
        seen = np.bincount(place, minlength=count)
        # Five standard deviations.
        spread = 5 * np.sqrt(epochs / count * (1 - 1 / count))
        assert abs(seen - epochs / count).max() < spread


def test_the_order_is_this_one_on_every_machine():
    assert permuted(np.arange(8), 8, seed=0, epoch=0).tolist() == [1, 0, 4, 3, 7, 6, 2, 5]


def test_a_key_follows_from_the_seed_and_each_number_and_from_no_neighbour():
    rows, epochs = np.arange(50).repeat(20), np.tile(np.arange(20), 50)
    together = keys(3, epochs, rows)
    assert len(set(together.tolist())) == 1000
    assert keys(3, epochs[[7]], rows[[7]]) == together[7]
    assert not set(keys(4, epochs, rows).tolist()) & set(together.tolist())
    found = permutations(together, 4)
    assert (np.sort(found, axis=1) == np.arange(4)).all()
    counts = [np.bincount(column, minlength=4) for column in found.T]
    assert abs(np.array(counts) - 250).max() < 5 * np.sqrt(250 * 0.75)


def test_a_random_subset_has_different_numbers_each_as_often_as_any_other():
    drawn = subsets(keys(3, np.arange(40_000)), 3, 7)
    assert (np.diff(np.sort(drawn, axis=1), axis=1) > 0).all()
    assert drawn.min() == 0 and drawn.max() == 6
    every, counts = np.unique(np.sort(drawn, axis=1), axis=0, return_counts=True)
    assert len(every) == 35  # 7 over 3
    assert np.abs(counts / len(drawn) * 35 - 1).max() < 0.1
    assert (subsets(keys(3, np.arange(5)), 7, 7).sum(axis=1) == 21).all()
    assert (subsets(keys(3, np.arange(10, 20)), 3, 7) == drawn[10:20]).all()
