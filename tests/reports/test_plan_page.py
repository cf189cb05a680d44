"""The page of plans: what is drawn, against the figures it is drawn from."""

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.planning.plans import made, without_time
from windlass.planning import memory, time
from windlass.planning.plan import Plan, Refused
from windlass.planning.search import Best
from windlass.planning.targets import find
from windlass.planning.winner import chosen
from windlass.reports import charts, plan_page
from windlass.reports.plan_page import page

VOID = {"meta", "line", "rect", "circle", "br"}


class Checked(HTMLParser):
    """A page whose elements must all be closed; keeps them with what they say of themselves."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.said.append(data)

    def every(self, tag: str, of: str) -> list[dict[str, str | None]]:
        return [
            attrs for name, attrs in self.found if name == tag and of in (attrs.get("class") or "")
        ]


def percent(text: str | None) -> float:
    return float((text or "").rstrip("%"))


def drawn(*found: Plan | Refused) -> Checked:
    return Checked(page(found, "windlass plan mine --on v5e-8"))


def test_a_page_asks_nobody_for_anything():
    text = page([made("v5e-8"), made("h100", gib=80)], "windlass plan mine")
    assert not re.search(r"https?:|//|<script|<link|<img|@import|url\(", text)


def test_the_pieces_of_a_bar_are_as_long_as_the_parts_of_the_memory_beside_its_limit():
    plan = made("v5e-8", gib=8)
    (limit,) = drawn(plan).every("rect", "back")
    parts = drawn(plan).every("rect", "part")[:3]
    shares = [percent(one["width"]) / percent(limit["width"]) for one in parts]
    assert shares == pytest.approx([2 / 15.75, 4 / 15.75, 2 / 15.75], rel=1e-3)
    ends = [percent(one["x"]) + percent(one["width"]) for one in parts]
    assert [percent(one["x"]) for one in parts] == pytest.approx([0, *ends[:-1]], abs=1e-2)


@pytest.mark.parametrize("part", sorted({*memory.PARTS, *time.PARTS}))
def test_every_part_of_memory_and_of_a_step_has_a_colour(part):
    sheet = (Path(plan_page.__file__).parent / "page.css").read_text()
    assert re.search(rf"\.{charts.style(part)}[ ,].*background", sheet)


def test_points_stand_in_the_order_of_hours_and_of_money_and_inside_the_picture():
    plans = [made("v5e-8", seconds=0.1), made("v5e-1", seconds=0.6), made("h100", seconds=0.3)]
    found = drawn(*plans)
    circles = found.every("circle", "")
    # On demand and spot of each, but for the H100, which has no price of spot.
    assert len(circles) == 5
    on_demand = [circles[0], circles[2], circles[4]]
    bills = [plan.cost.run for plan in plans if plan.cost and plan.cost.run]

    def order(values) -> list[int]:
        return sorted(range(3), key=[float(value) for value in values].__getitem__)

    assert order(one["cx"] for one in on_demand) == order(bill.hours.expected for bill in bills)
    dollars = [-bill.on_demand.expected for bill in bills if bill.on_demand]  # up is less
    assert order(one["cy"] for one in on_demand) == order(dollars)
    assert all(84 <= float(one["cx"] or 0) <= 876 for one in circles)
    assert all(20 <= float(one["cy"] or 0) <= 384 for one in circles)


def test_what_a_recipe_is_called_is_text_and_no_markup():
    plan = dataclasses.replace(made(), recipe="<b>mine</b>", notes=["a < b & c"])
    found = drawn(plan)
    assert "<b>mine</b>" in found.said and "a < b & c" in found.said


def test_what_is_not_known_or_cannot_be_laid_out_is_on_the_page_all_the_same():
    found = drawn(
        without_time(made("v5e-1")), Refused("mine", find("v5e-8"), "7 rows on 8 devices")
    )
    assert "7 rows on 8 devices" in found.said and "too large" not in found.said
    assert "Memory by part" in found.said
    assert "Cost against time" not in found.said and "Step time by part" not in found.said


def test_runs_that_read_different_amounts_are_drawn_by_a_million_tokens():
    small, large = made("v5e-1", rows=8, seconds=0.125), made("v5e-8", rows=64, seconds=0.125)
    found = drawn(small, large)
    assert (
        "8 to 64 sequences of 1,024 tokens per step, 7,200 steps, 59.0M to 471.9M tokens: runs "
        "of different lengths, compared by a million tokens"
    ) in found.said
    assert "USD per million tokens" in found.said and "per 1M on demand" in found.said
    heights = [one["cy"] for one in found.every("circle", "")]  # on demand, and spot, of each
    assert heights[:2] == heights[2:] and heights[0] != heights[1]
    same = drawn(large, large)
    assert "USD of the whole run" in same.said and "per 1M on demand" not in same.said


def test_the_legend_says_of_restarts_what_the_notes_say():
    assert "spot, without restarts" in drawn(made()).said
    assert "spot, with restarts" in drawn(made(preemptions=0.1)).said


def test_the_page_of_a_search_has_the_settings_it_found_and_the_best_target():
    found = Best(made("v5e-8"), made("v5e-8", gib=20), {"train": {"remat": "full"}}, 5)
    ranking = chosen([found, Best(made("v5e-1"), made("v5e-1"), {}, 3)], "cheapest")
    shown = Checked(page([one.plan for one in ranking.each], "windlass plan mine", [ranking]))  # type: ignore[union-attr]
    assert "train:\n  remat: full" in shown.said
    assert any("the fastest of 5 settings tried that fits" in text for text in shown.said)
    assert "cheapest" in shown.said and any("v5e-1: 131" in text for text in shown.said)
    assert "Best settings" not in drawn(made()).said
