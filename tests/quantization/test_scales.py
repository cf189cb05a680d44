"""Scales of low rank: from the SVD of a small matrix, and their products rank by rank."""

import numpy as np
import pytest

from windlass.quantization import scales, tables


def varied(inputs: int = 256, outputs: int = 256) -> np.ndarray:
    """A Gaussian matrix whose rows and columns vary in scale."""
    rng = np.random.default_rng(0)
    rows = np.exp(0.44 * rng.normal(size=(inputs, 1)))
    columns = np.exp(0.5 * rng.normal(size=outputs))
    return (rng.normal(size=(inputs, outputs)) * rows * columns).astype(np.float32)


def quantised(weight: np.ndarray, table: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return table[tables.nearest(weight / scale, table)] * scale


@pytest.mark.parametrize(("inputs", "group", "rank"), [(96, 32, 2), (80, 32, 3), (40, 7, 5)])
def test_factors_are_the_svd_of_the_magnitudes_repeated_for_each_input(inputs, group, rank):
    weight = varied(inputs, 24)
    ends = [*range(0, inputs, group), inputs]
    repeated = np.concatenate(
        [
            np.tile(np.abs(weight[a:b]).max(0), (b - a, 1))
            for a, b in zip(ends, ends[1:], strict=False)
        ]
    )
    assert (scales.spread(scales.largest(weight, group), inputs, group) == repeated).all()
    u, s, vt = np.linalg.svd(repeated, full_matrices=False)
    found = scales.factored(weight, group, rank)
    assert found.gains == pytest.approx(s[:rank], rel=1e-5)
    best = (u[:, :rank] * s[:rank]) @ vt[:rank]
    assert np.abs(found.matrix() - best).max() < 1e-5 * s[0]
    assert np.linalg.norm(found.inputs, axis=0) == pytest.approx(np.ones(rank), rel=1e-5)


def test_ranks_beyond_the_groups_change_nothing_and_have_directions_to_train_from():
    weight = varied()
    exact = scales.spread(scales.largest(weight, 32), 256, 32)
    found = scales.factored(weight, 32, 32)
    assert np.abs(found.matrix() / exact - 1).max() < 1e-4
    assert (found.gains[8:] == 0).all() and len(found.gains) == 32
    assert np.linalg.norm(found.outputs, axis=1) == pytest.approx(np.ones(32), rel=1e-5)


def test_relative_errors_at_the_start_are_those_that_were_measured_elsewhere():
    weight, errors = varied(), {}
    for levels, rank in ((16, 32), (16, 4), (4, 32)):
        scale = scales.factored(weight, 32, rank).matrix()
        found = quantised(weight, tables.even(levels), scale)
        errors[levels, rank] = scales.relative_error(found, weight)
    assert errors[16, 32] == pytest.approx(0.112, abs=0.002)
    assert errors[16, 4] == pytest.approx(0.132, abs=0.005)
    assert errors[4, 32] == pytest.approx(0.621, abs=0.02)


def test_a_sum_over_ranks_is_the_product_with_the_whole_matrix():
    weight, x = varied(64, 48), np.random.default_rng(2).normal(size=(5, 64))
    factors = scales.factored(weight, 16, 3)
    values = tables.even(16)[tables.nearest(weight / factors.matrix(), tables.even(16))]
    exact = scales.Factors(*(part.astype(np.float64) for part in factors))
    found = scales.rank_sum(x, values.astype(np.float64), exact)
    assert np.abs(found - x @ (values * exact.matrix())).max() < 1e-13


def test_factors_of_a_product_have_its_norms_as_gains_and_more_ranks_are_noise():
    rng = np.random.default_rng(3)
    b, a = rng.normal(size=(20, 3)), rng.normal(size=(3, 10))
    found = scales.normalised(b, a)
    assert np.abs(found.matrix() - b @ a).max() < 1e-12
    norms = np.linalg.norm(b, axis=0) * np.linalg.norm(a, axis=1)
    assert found.gains == pytest.approx(norms)
    more = scales.padded(found, 5, gain=0.01)
    assert more.gains[3:].tolist() == pytest.approx([0.01, 0.01])
    assert scales.padded(found, 2, gain=0.0).gains == pytest.approx(np.sort(norms)[:0:-1])
