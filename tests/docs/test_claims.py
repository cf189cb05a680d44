"""Claims of public guides come out wrong by themselves."""

import pytest

from docs import claims
from docs.claims import HALF, needed, recipe
from windlass.planning import targets


def test_a_claimed_speed_is_the_share_of_the_peak_that_arithmetic_gives():
    small = recipe(HALF, 32, 1000)
    # Six operations for each of 494 million weights, and causal attention of 24 layers.
    a_token = 6 * 494e6 + 6 * 24 * 14 * 64 * 1000
    asked = needed(small, targets.find("v5e-8"), 320)
    assert asked.share == pytest.approx(a_token * 320e3 / (8 * 197e12), rel=0.01)
    assert needed(small, targets.find("2xt4"), 110).share == pytest.approx(2.62, abs=0.02)


def test_the_page_has_the_rents_of_whole_slices():
    assert claims._rent("v5e-8", "on_demand") == pytest.approx(9.60)
    assert claims._rent("v6e-4", "on_demand") == pytest.approx(10.80)
