"""The clip search: what is known of Gaussian weights, and never worse than any scale tried."""

import numpy as np
import pytest

from windlass.quantization.clip import SAMPLE, best_scales, squared_error
from windlass.quantization.levels import Levels

# Balanced levels by bits, then for a normal distribution: the best clip 2^(bits − 1) s in standard
# deviations, the error there, and that of a scale at the largest of 65,536 weights.
GAUSSIAN = [
    (Levels(-2, 1, 0.5, 0.5), 2, 2.0, 0.120, 0.415),
    (Levels(-8, 7, 0.5, 0.5), 8, 2.7, 0.0118, 0.0254),
]


@pytest.mark.parametrize(("levels", "half", "clip", "error", "at_largest"), GAUSSIAN)
def test_the_best_clip_of_gaussian_weights_is_the_one_that_was_measured(
    levels, half, clip, error, at_largest
):
    sigma = 0.03
    rows = (sigma * np.random.default_rng(0).normal(size=(4, SAMPLE))).astype(np.float32)
    scales = best_scales(rows, levels)
    assert (scales * half / sigma).mean() == pytest.approx(clip, rel=0.02)
    least = squared_error(rows, scales, levels).mean() / sigma**2
    assert least == pytest.approx(error, rel=0.03) and least <= error * 1.001
    largest = squared_error(rows, np.abs(rows).max(1) / half, levels).mean() / sigma**2
    assert largest == pytest.approx(at_largest, rel=0.1)


@pytest.mark.parametrize("levels", [Levels(-8, 7), Levels(-1, 1), Levels(-4, 3, 0.5, 0.5)])
def test_no_scale_of_a_fine_search_is_better(levels):
    rng = np.random.default_rng(1)
    rows = (rng.normal(size=(40, 32)) * rng.uniform(1e-4, 10, (40, 1))).astype(np.float32)
    found = squared_error(rows, best_scales(rows, levels), levels)
    largest = np.abs(rows).max(1) / levels.largest
    tried = [squared_error(rows, share * largest, levels) for share in np.linspace(0.05, 1.5, 800)]
    assert (found / np.min(tried, axis=0)).mean() < 1.01
    assert (found <= tried[-1]).all()


def test_a_sign_is_used_where_levels_reach_further_down_than_up():
    rows = np.linspace(-7, 8, 16, dtype=np.float32)[None]
    assert best_scales(rows, Levels(-8, 7), signed=True) == -1
    assert best_scales(rows, Levels(-8, 7)) > 0


def test_rows_of_zeros_have_a_scale_of_0():
    assert best_scales(np.zeros((2, 32), np.float32), Levels(-8, 7)).tolist() == [0, 0]
