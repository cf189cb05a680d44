"""Numbers as people read them."""

import pytest

from windlass import units


@pytest.mark.parametrize(
    "said, expected",
    [
        (units.seconds(30e-6, 0.15), "30 ±4 µs"),
        (units.seconds(0.182, 0.15), "182 ±27 ms"),
        (units.seconds(1.5, 0.12), "1.5 ±0.2 s"),
        (units.seconds(4.55, 0.25), "4.5 ±1.1 s"),  # 5 ±1 would be a tenth off by itself
        (units.seconds(90), "90.0 s"),  # one minute and a half is said in seconds
        (units.seconds(9000, 0.2), "2.5 ±0.5 h"),
        (units.seconds(200_000, 0.2), "2.3 ±0.5 days"),
        (units.count(999, 0.1), "999 ±100"),
        (units.count(45_100, 0.15), "45 ±7k"),
        (units.percent(0.41, 0.15), "41 ±6%"),
        (units.dollars(3.1, 0.15), "$3.10 ±0.46"),
        (units.dollars(1234.4, 0.15), "$1,234 ±185"),
        (units.dollars(0.0012, 0.15), "<$0.01"),
        (units.dollars(None), "?"),
        (units.gib(9.13 * 2**30), "9.1"),
        (units.gib(0.371 * 2**30), "0.37"),
        (units.gib(0.1001 * 2**30), "0.10"),
        (units.gib(0.0283 * 2**30), "0.028"),
    ],
)
def test_a_figure_has_as_many_digits_as_its_error_leaves(said, expected):
    assert said == expected


@pytest.mark.parametrize(
    "bytes, text",
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1024**2 - 1, "1.0 MiB")]
    + [(12.34 * 2**20, "12.3 MiB"), (5 * 2**30, "5.0 GiB"), (3 * 2**50, "3072.0 TiB")],
)
def test_sizes_are_in_units_of_1024(bytes, text):
    assert units.size(bytes) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0.0 s"),
        (8.24, "8.2 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1m00s"),
        (250, "4m10s"),
        (3599.7, "1h00m"),
        (11_100, "3h05m"),
        (187_200, "2d04h"),
    ],
)
def test_durations_have_two_units(seconds, text):
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    "value, text",
    [(7.0, "7"), (999.4, "999"), (999.97, "1.0k"), (12_345.0, "12.3k"), (3.2e6, "3.2M")]
    + [(4.56e9, "4.6G"), (1e15, "1000.0T")],
)
def test_measured_counts_have_three_digits_or_four(value, text):
    assert units.count(value) == text


@pytest.mark.parametrize(
    "value, text",
    [(3.21456, "3.2146"), (0.0, "0.0000"), (0.00012345, "0.0001234"), (123_456.0, "1.235e+05")]
    + [(12_000, "12,000"), (float("nan"), "nan"), (float("inf"), "inf")],
)
def test_measured_numbers_keep_four_digits(value, text):
    assert units.number(value) == text
