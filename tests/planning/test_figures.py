"""Figures as people read them."""

import pytest

from windlass.planning import figures


@pytest.mark.parametrize(
    "said, expected",
    [
        (figures.seconds(30e-6, 0.15), "30 ±4 µs"),
        (figures.seconds(0.182, 0.15), "182 ±27 ms"),
        (figures.seconds(1.5, 0.12), "1.5 ±0.2 s"),
        (figures.seconds(4.55, 0.25), "4.5 ±1.1 s"),  # 5 ±1 would be a tenth off by itself
        (figures.seconds(90), "90.0 s"),  # one minute and a half is said in seconds
        (figures.seconds(9000, 0.2), "2.5 ±0.5 h"),
        (figures.seconds(200_000, 0.2), "2.3 ±0.5 days"),
        (figures.count(999, 0.1), "999 ±100"),
        (figures.count(45_100, 0.15), "45 ±7k"),
        (figures.share(0.41, 0.15), "41 ±6%"),
        (figures.dollars(3.1, 0.15), "$3.10 ±0.46"),
        (figures.dollars(1234.4, 0.15), "$1,234 ±185"),
        (figures.dollars(0.0012, 0.15), "<$0.01"),
        (figures.dollars(None), "?"),
        (figures.gib(9.13 * 2**30), "9.1"),
        (figures.gib(0.371 * 2**30), "0.37"),
        (figures.gib(0.1001 * 2**30), "0.10"),
        (figures.gib(0.0283 * 2**30), "0.028"),
    ],
)
def test_a_figure_has_as_many_digits_as_its_error_leaves(said, expected):
    assert said == expected
