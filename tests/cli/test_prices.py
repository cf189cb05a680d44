"""Prices on the command line."""

import json
import re
from pathlib import Path

import pytest

from windlass.planning import prices

DOCS = (Path(__file__).parents[2] / "docs/prices.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(prices, "OLD", 10**6)  # whatever day these tests are run on
    return tmp_path / "config"


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_prices_are_a_line_each_and_what_is_unknown_is_said(program):
    code, out, err = program("prices", "v5e-8", "7x", "lambda-is-no-chip")
    assert (code, out) == (2, "") and err.startswith('no chip is called "lambda-is-no-chip"; ')
    code, out, err = program("prices", "v5x")
    assert (code, out) == (2, "") and err.startswith(
        'no chip is called "v5x"; did you mean v5p? there are v2, v3, v4, v5e, v5p, '
    )
    code, out, err = program("prices", "v5e-8", "7x", "A100")
    assert (code, err) == (0, "") and not re.search(r" $", out, re.MULTILINE)
    title, *lines = out.splitlines()
    assert cells(title) == ["chip", "provider", "region", "on demand", "spot", "date", "note"]
    assert cells(lines[0]) == ["v5e", "gcp", "us-central1", "1.200", "0.342", "2026-08-22"]
    assert cells(lines[7]) == ["v5e", "gcp", "europe-west3", "unknown", "0.190", "2026-08-22"]
    assert [cells(line)[0] for line in lines[:-2]] == ["v5e"] * 11 + ["a100-40gb"] * 3
    assert lines[-2] == "no price is known of 7x"
    assert lines[-1].startswith("shipped with windlass, of 2026-08-22, from SkyPilot's ")


def test_the_file_of_the_documents_is_taken_shown_and_given_up_again(program, config, tmp_path):
    (example,) = re.findall(r"^```yaml\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.yaml").write_text(example)
    code, out, err = program("prices", "--update", "mine.yaml")
    assert (code, err) == (0, "")
    stored = config / "windlass/prices.yaml"
    assert stored.read_text() == example
    lines = out.splitlines()
    assert [cells(line) for line in lines[1:4]] == [
        ["v5e", "gcp", "us-central1", "0.840", "0.342", "2026-08-22"],
        ["h100", "ours", "2.100", "unknown", "2026-08-22", "the machines in the basement"],
        ["v3", "gcp", "europe-west4", "unknown", "0.660", "2026-08-01", "slices beyond one host"],
    ]
    assert lines[5:7] == [
        "used from now on; `windlass prices --reset` goes back to the shipped ones",
        f"{stored}, of 2026-08-22, from our contract of August",
    ]
    shown = json.loads(program("prices", "--json").out)
    assert (shown["file"], shown["date"]) == (str(stored), "2026-08-22")
    assert shown["prices"][1] == {
        **{"name": "h100", "provider": "ours", "region": None, "on_demand": 2.1, "spot": None},
        **{"date": "2026-08-22", "pods": False, "note": "the machines in the basement"},
    }
    assert "h200" in shown["unknown"]
    assert program("prices", "--update", "mine.yaml", "--reset") == (
        *(2, "", "one thing at a time: --update and --reset are given\n"),
    )
    assert program("prices", "--reset").code == 0
    assert not stored.exists()
    assert json.loads(program("prices", "h200", "--json").out)["unknown"] == []


def test_old_prices_are_shown_with_a_warning(program, monkeypatch):
    monkeypatch.setattr(prices, "OLD", 30)
    warning = program("prices", "v4").out.splitlines()[-1]
    assert warning == prices.warning(prices.load().find("v4"))
    assert "prices are from 2026-08-22, " in warning


def test_a_file_with_problems_is_refused_and_what_there_was_stays(program, config, tmp_path):
    (tmp_path / "mine.yaml").write_text("date: 2026-01-01\nsources: []\nprices: []\n")
    assert program("prices", "--update", "mine.yaml") == (
        *(2, "", "1 problem in mine.yaml:\n  prices  is empty\n"),
    )
    assert not config.exists()
