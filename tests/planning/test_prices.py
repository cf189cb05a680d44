"""Prices: those that come with windlass, and what a file of one's own may say."""

import datetime
from pathlib import Path

import pytest

from windlass.devices import chips
from windlass.errors import UserError
from windlass.planning import prices


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch) -> Path:
    """An empty configuration folder, where prices of one's own would be."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


def dollars(name: str, place: str) -> tuple[float | None, float | None]:
    (price,) = [one for one in prices.load().find(name) if one.place == place]
    return price.on_demand, price.spot


def test_the_prices_that_ship_are_those_of_the_catalogues_of_their_day():
    # v5e-8 in us-central1 is 9.60 USD an hour on demand and 2.74 on spot; v6e-4 10.80 and 2.61.
    assert [8 * price for price in dollars("v5e", "gcp us-central1") if price] == [
        pytest.approx(9.60),
        pytest.approx(2.74, abs=0.005),
    ]
    assert [4 * price for price in dollars("v6e", "gcp us-central1") if price] == [
        pytest.approx(10.80),
        pytest.approx(2.61, abs=0.005),
    ]
    assert dollars("h200", "vast") == (2.35, None)
    assert prices.load().unknown == ["7x", "8t", "8i", "v100-16gb", "v100-32gb", "gb200"]


def test_every_price_is_of_a_chip_and_no_trap_of_a_catalogue():
    names = {chip.slug for chip in chips.every()}
    for price in prices.load().prices:
        assert price.name in names
        assert max(price.on_demand or 0, price.spot or 0) < 15
        assert price.spot is None or price.on_demand is None or price.spot < price.on_demand
        # Where a catalogue has placeholders.
        assert (price.name, price.region) not in [("v6e", "asia-east1"), ("v6e", "us-central2")]


def test_the_cheapest_is_anywhere_or_where_one_asks_for_it():
    found = prices.load().find("v5e")
    cheapest = prices.cheapest(found, "spot")
    assert cheapest is not None and cheapest.region == "northamerica-northeast1"
    assert cheapest.spot == min(price.spot for price in found if price.spot)
    there = prices.cheapest(found, "spot", "us-east5")
    assert there is not None and there.spot == 0.60
    assert prices.cheapest(found, "on_demand", "europe-west3") is None
    assert prices.cheapest(found, "on_demand", "aws") is None
    assert prices.cheapest(prices.load().find("7x"), "spot") is None


def test_spot_stands_beside_the_price_on_demand_of_the_same_provider():
    for name in prices.load().chips:
        for where in (None, "gcp", "aws"):
            on_demand, spot = prices.of_one_provider(prices.load().find(name), where)
            if on_demand and spot:
                assert on_demand.provider == spot.provider
                assert spot.spot is not None and on_demand.on_demand is not None
                assert spot.spot < on_demand.on_demand
    on_demand, spot = prices.of_one_provider(prices.load().find("h200"))
    assert (on_demand and on_demand.provider, spot) == ("vast", None)


def test_a_place_that_no_price_is_of_is_refused_with_the_nearest():
    prices.check_place(prices.load(), "us-east5")
    with pytest.raises(UserError) as refusal:
        prices.check_place(prices.load(), "us-east-5")
    said, there = str(refusal.value).split("? ")
    assert said == "no price is known at us-east-5; did you mean us-east5"
    assert there.startswith("there are asia-east1, asia-northeast1, ") and "aws" in there


def test_slices_beyond_one_host_have_the_price_of_pods_where_there_is_one():
    known = prices.load()
    assert {price.pods for price in known.find("v3")} == {False}
    assert {price.pods for price in known.find("v3", hosts=4)} == {True}
    assert known.find("v5e", hosts=4) == known.find("v5e")


def test_old_prices_are_warned_about():
    day = datetime.date(2026, 8, 22)
    assert prices.days("2026-08-22", day + datetime.timedelta(91)) == 91
    first, *others = prices.load().prices
    new = first._replace(date=datetime.date.today().isoformat())
    assert prices.warning([new]) is None
    assert prices.warning([]) is None
    assert prices.warning([new, first._replace(date="2020-02-01"), *others]) == (
        f"prices are from 2020-02-01, {prices.days('2020-02-01')} days ago, and spot prices "
        "change daily: `windlass prices --update FILE` takes newer ones"
    )


WRONG = """\
date: tomorrow
sources: a friend
prices:
  - {chip: h10, provider: gcp, on_demand: 700, spot: 0, date: 2926-01-01}
  - {chip: v6e, provider: gcp, region: us-central1}
  - {chip: v6e, on_demand: cheap, regions: x}
"""
CHIPS = ", ".join(chip.slug for chip in chips.every()[:-1]) + " and rtx-pro-6000"
DOLLARS = "it must be USD per chip-hour, above 0 and at most 50; one that is not known is left out"


def refused(file: Path, text: str) -> list[str]:
    file.write_text(text)
    with pytest.raises(UserError) as refusal:
        prices.update(file)
    return str(refusal.value).splitlines()


def test_every_problem_of_a_file_is_said_at_once_and_nothing_is_stored(tmp_path, config):
    file = tmp_path / "mine.yaml"
    first, *lines = refused(file, WRONG)
    assert first == f"10 problems in {file}:"
    assert [tuple(line.split(maxsplit=1)) for line in lines] == [
        ("date", 'is "tomorrow"; it must be a day, such as 2026-08-22'),
        ("sources", 'is "a friend"; it must be a list, each item text'),
        ("prices.0.chip", f'is "h10"; did you mean h100? there are {CHIPS}'),
        ("prices.0.on_demand", f"is 700; {DOLLARS}"),
        ("prices.0.spot", f"is 0; {DOLLARS}"),
        ("prices.0.date", 'is "2926-01-01"; it must not be in the future'),
        ("prices.1", "has neither on_demand nor spot"),
        ("prices.2.regions", "unknown; did you mean region?"),
        ("prices.2.provider", "is required: text"),
        ("prices.2.on_demand", f'is "cheap"; {DOLLARS}'),
    ]
    row = "  - {chip: v6e, provider: gcp, spot: 1}\n"
    assert refused(file, f"date: 2026-01-01\nsources: []\nprices:\n{row}{row}") == [
        f"1 problem in {file}:",
        "  prices.1  has the same chip and place as prices.0",
    ]
    assert refused(file, "date: 2026-01-01\nsources: []\nprices: []\n")[1:] == [
        "  prices  is empty"
    ]
    assert refused(file, "v5e 1.20") == [
        f"{file} is no price file: these have date, sources and prices"
    ]
    assert not config.exists()


def test_a_file_that_is_not_there_or_is_no_text_is_refused(tmp_path):
    with pytest.raises(UserError) as refusal:
        prices.update(tmp_path / "none.yaml")
    assert str(refusal.value) == f"{tmp_path}/none.yaml cannot be read: No such file or directory"
    (tmp_path / "some.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError) as refusal:
        prices.update(tmp_path / "some.yaml")
    assert str(refusal.value) == f"{tmp_path}/some.yaml is not text"


def test_stored_prices_that_were_spoilt_since_say_the_way_back(config):
    (config / "windlass").mkdir(parents=True)
    (config / "windlass/prices.yaml").write_text("nothing")
    with pytest.raises(UserError) as refusal:
        prices.load()
    assert str(refusal.value) == (
        f"{config}/windlass/prices.yaml is no price file: these have date, sources and prices\n"
        "`windlass prices --reset` restores those of windlass"
    )
    assert prices.reset() == prices.load()
