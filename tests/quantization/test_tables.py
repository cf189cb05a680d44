"""Tables: their values, the nearest entry, k-means, and what fp16 makes of them."""

import numpy as np
import pytest

from windlass.quantization import tables


def test_a_table_is_evenly_spaced_and_may_have_a_zero():
    assert tables.even(4).tolist() == pytest.approx([-1, -1 / 3, 1 / 3, 1])
    assert tables.even(3).tolist() == [-1, 0, 1]
    assert tables.even(4, zero=True).tolist() == [-1, 0, 0.5, 1]
    assert tables.even(2, zero=True).tolist() == [0, 1]
    sixteen = tables.even(16, zero=True)
    assert len(sixteen) == 16 and 0 in sixteen and (np.diff(sixteen) > 0).all()


def test_the_nearest_entry_is_that_of_the_least_distance_in_a_table_of_any_order():
    values = np.random.default_rng(0).normal(size=(40, 30)).astype(np.float32)
    for table in (tables.even(16), np.array([0.4, -0.9, 1.2, 0.1], np.float32)):
        found = tables.nearest(values, table)
        assert found.dtype == np.uint8
        expected = np.abs(values[..., None] - table).argmin(-1)
        assert (np.abs(table[found] - values) == np.abs(table[expected] - values)).all()


def test_kmeans_ends_where_every_centre_is_the_mean_of_its_cluster():
    rng = np.random.default_rng(1)
    values = rng.normal(size=2000)
    weights = rng.random(2000)
    for weight in (None, weights):
        centres = tables.kmeans(values, 8, weight)
        own = np.abs(values[:, None] - centres).argmin(1)
        means = [np.average(values[own == k], weights=_at(weight, own == k)) for k in range(8)]
        assert centres == pytest.approx(means, abs=1e-6)
    three = tables.kmeans(np.array([1.0, 1.0, 2.0, 5.0]), 3)
    assert three.tolist() == [1, 2, 5]
    assert set(tables.kmeans(np.array([1.0, 2.0]), 4)) == {1, 2}  # as many as there are


def _at(weights, mask):
    return None if weights is None else weights[mask]


def test_entries_that_fp16_cannot_tell_apart_are_moved_to_its_next_number():
    table = np.array([0.5, -1, 0.50001, 0.50002, 1], np.float32)
    found = tables.snapped(table)
    assert found.dtype == np.float16 and (np.diff(found) > 0).all()
    assert found.tolist() == [-1, 0.5, 0.5 + 2**-11, 0.5 + 2**-10, 1]
