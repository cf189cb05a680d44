"""A run looked back at, and runs side by side."""

import csv
import dataclasses
import html
import json
import math
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import trained
from windlass import api, seal
from windlass.cli.plot import plot
from windlass.reports import curves
from windlass.reports.comparison import RunComparison, at
from windlass.run_folder import plan_file
from windlass.telemetry import metrics
from windlass.telemetry.phases import PhasePiece


@pytest.fixture(scope="module")
def copies(place, tmp_path_factory) -> Path:
    """Two runs in a folder: one as it was, and one on a rented chip that planned too little."""
    folder = tmp_path_factory.mktemp("reported")
    for name in ("one", "two"):
        shutil.copytree(trained.only_run(place), folder / "runs" / name)
    other = folder / "runs" / "two"
    about = json.loads((other / "about.json").read_text())
    start = about["starts"][-1]
    start["chose"]["device"] = {"asked": "auto", "kind": "TPU v6 lite", "count": 8}
    seal.write_signed(other / "about.json", {"starts": [start]})
    hours = PhasePiece(1, "steps", began=1e9, seconds=7200.0, first=0, step=4, waited=0.0)
    (other / "phases.jsonl").write_text(hours.line())
    plan = {
        "planned": {
            "target": {"chips": 8},
            "memory": {
                "total_bytes": 3 * 2**30,
                "limit_bytes": 4 * 2**30,
                "parts_bytes": {"weights": 2**30, "activations": 2 * 2**30, "logits": 10},
            },
            "time": {"step_seconds": 0.15, "parts_seconds": {"matmuls": 0.1, "optimiser": 0.05}},
            "notes": [],
        },
        "measured": {
            "compiler_bytes": 4 * 2**30,
            "compiler_parts_bytes": {"arguments": 2**30, "results": 0, "temporaries": 3 * 2**30},
            "device_peak_bytes": 5 * 2**30,
            "step_seconds": 0.1,
            "tokens_per_second": 1000.0,
        },
    }
    (other / "plan.json").write_text(json.dumps(plan))
    recipe = other / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("remat: saved", "remat: full"))
    (other / "files.json").unlink()
    samples = "--- step 2\nOnce upon\n--- step 4\nOnce <b>upon</b>\n a time\n"
    (other / "samples.txt").write_text(samples)
    return folder


def test_a_run_keeps_its_plan_beside_what_it_measured(place):
    run = trained.only_run(place)
    found = plan_file.read(run / "plan.json")
    assert found is not None
    planned, measured = found["planned"], found["measured"]
    assert planned["target"]["name"] == "cpu" and planned["settings"]["batch"] == 16
    assert planned["time"] is None
    assert "no speed estimate for CPUs" in planned["notes"]
    records = metrics.read(run / "metrics.jsonl")
    steps = [record["step_ms"] / 1000 for record in records if "step_ms" in record]
    assert min(steps[1:]) <= measured["step_seconds"] <= max(steps[1:])
    assert measured["device_peak_bytes"] is None and measured["steps"] == 4
    parts = measured["compiler_parts_bytes"]
    assert measured["compiler_bytes"] == sum(parts.values())
    state = planned["memory"]["parts_bytes"]
    held = sum(state[name] for name in ("weights", "optimiser"))
    batch = 16 * 90 * 4 * 5  # rows × tokens × bytes × columns
    assert parts["arguments"] == pytest.approx(held + batch, rel=1e-3)
    (told,) = re.findall(r"^plan +(.* measured .*)$", (place / trained.OUTPUT).read_text(), re.M)
    assert told == plan_file.line(found)


def test_a_run_is_reported_with_its_curves_and_its_plan(program, copies):
    code, out, err = program("report", "one", cwd=copies)
    assert (code, err) == (0, "")
    facts = dict(re.findall(r"^(\w+) {2,}(.+)$", out, re.MULTILINE))
    assert facts["run"] == "runs/one" and facts["device"] == "1 × cpu"
    assert facts["state"] == "finished at step 4 of 4"
    assert re.search(r"^plan +predicted +measured +off by$", out, re.MULTILINE)
    assert re.search(r"^memory, by the compiler +\S+ \wiB +\S+ \wiB +[+-]\S+%$", out, re.MULTILINE)
    assert "no speed estimate for CPUs\n" in out
    assert len(re.findall(r"┤[⠀-⣿]+$", out, re.MULTILINE)) == 14
    assert (copies / facts["page"]).is_file()


def test_the_page_of_a_report_needs_nothing_from_elsewhere(program, copies):
    program("report", "two", cwd=copies)
    page = (copies / "runs" / "two" / "report.html").read_text()
    assert not re.search(r"https?://|<script[^>]|@import|url\(", page)
    assert re.findall("<link[^>]*>", page) == ['<link rel="icon" href="data:,">']
    sliders = re.findall(r'role="slider".*? aria-label="(.*?)"', page)
    assert sliders == ["Loss over steps", "Learning rate over steps", "Tokens/s over steps"]
    drawn = [ElementTree.fromstring(one) for one in re.findall("<svg.*?</svg>", page)]
    assert [len(one.findall("polyline")) for one in drawn[:3]] == [2, 1, 1]
    bars = [one.get("aria-label") for one in drawn[3:]]
    assert bars[0] == "all: steady steps 2h00m" and all(bars) and len(bars) == 6
    pictures = re.findall(r'<svg class="bar".*?</svg>', page)[1:]
    told = re.findall(r"<title>([a-z ]+): ([a-z ]+) ([\d.]+ \w+)</title>", "".join(pictures))
    assert told == [
        ("planned", "weights", "1.0 GiB"),
        ("planned", "activations", "2.0 GiB"),
        ("planned", "logits", "10 bytes"),
        ("by the compiler", "state", "1.0 GiB"),
        ("by the compiler", "temporaries", "3.0 GiB"),
        ("by the device", "peak", "5.0 GiB"),
        ("planned", "matmuls", "100 ms"),
        ("planned", "optimiser", "50.0 ms"),
        ("measured", "step time", "100 ms"),
    ]
    assert "<pre>Once &lt;b&gt;upon&lt;/b&gt;\n a time</pre>" in page
    bars = re.findall(r'<rect class="part ([\w-]+)"', page)
    assert len(bars) == len(told) + 1
    assert [name for name in bars if not re.search(rf"\.{name}[ ,].*background", page)] == []


def test_runs_are_put_side_by_side_with_what_differs(program, copies):
    code, out, err = program("compare", "one", "two", cwd=copies)
    assert (code, err) == (0, "") and not re.search(r" $", out, re.MULTILINE)
    lines = [*map(_cells, out.splitlines())]
    rows = {name: values for name, *values in lines}
    assert lines[0] == ["one", "two"]
    assert rows["device"] == ["1 × cpu", "8 × TPU v6 lite"]
    assert rows["train.remat"] == ["saved", "full"]
    assert rows["step time"][1] == "100 ms" and rows["tokens/s"][1] == "1.0k"
    assert rows["time off by"] == ["?", "+50.0%"] and rows["memory off by"][1] == "-40.0%"
    assert rows["by the device"] == ["?", "5.0 GiB"]
    assert rows["at step 4"][0] == rows["at step 4"][1]
    # Two hours of eight chips at 2.70 USD, and 8 × 2.70 USD / 3600 s for a thousand tokens.
    assert rows["chip-hours"] == ["?", "16"] and rows["on demand"] == ["?", "$43.20"]
    assert rows["per million tokens"] == ["?", "$6.00"]
    assert rows["trainable parameters"] == ["28,224"] * 2
    assert float(rows["perplexity, best"][0]) == pytest.approx(
        math.exp(float(rows["validation, best"][0])), rel=1e-3
    )
    assert out.endswith("\n\nsample of two, at step 4\n  Once <b>upon</b>\n   a time\n")


def test_report_and_compare_are_there_for_programs_too(program, copies):
    found = json.loads(program("report", "two", "--json", cwd=copies).out)
    assert found["plan_errors"] == pytest.approx(
        {"memory": -0.4, "compiler": -0.25, "device": -0.4, "time": 0.5}
    )
    assert [step for step, _ in found["curves"]["loss"]] == [1, 2, 4]
    both = json.loads(program("compare", "one", "two", "--json", cwd=copies).out)
    assert both["settings"] == {"train.remat": ["saved", "full"]}
    assert both["loss_at"]["4"][0] == found["loss"]
    assert [one["run"] for one in both["runs"]] == ["runs/one", "runs/two"]
    one, two = both["runs"]
    assert one["sample"] is None
    assert two["sample"] == {"step": 4, "text": "Once <b>upon</b>\n a time"}
    assert one["parameters"] == {"trainable": 28_224, "total": 28_224}
    assert one["perplexity"] == pytest.approx(math.exp(one["best"]["loss"]))


def test_losses_that_are_no_numbers_are_reported_and_are_not_the_best(program, copies):
    folder = Path(shutil.copytree(copies / "runs" / "one", copies / "runs" / "lost"))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lost = [
        one | {"validation_loss": "NaN"} if "validation_loss" in one else one for one in records
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lost))
    found = json.loads(program("report", "lost", "--json", cwd=copies).out)
    assert found["best"] is None and found["curves"]["validation_loss"][0][1] == "NaN"
    assert "validation   nan\n" in program("report", "lost", cwd=copies).out


def test_sections_in_a_list_are_compared_key_by_key(copies, monkeypatch):
    monkeypatch.chdir(copies)
    one, two = api.compare("one", "one").runs
    parts = [{"kind": "stories", "weight": 1}, {"kind": "stories", "weight": 2}]
    mixed = two.settings | {"data": two.settings["data"] | {"mixture": parts}}
    other = mixed | {"data": mixed["data"] | {"mixture": [parts[0], parts[1] | {"weight": 3}]}}
    runs = [dataclasses.replace(one, settings=settings) for settings in (mixed, other)]
    assert RunComparison(runs).settings == {"data.mixture.1.weight": [2, 3]}


def test_one_run_is_not_compared(program, copies):
    said = "which runs? windlass compare RUN RUN puts two or more side by side\n"
    assert program("compare", "one", cwd=copies) == (2, "", said)


@pytest.mark.long
def test_recipes_are_trained_to_their_end_and_then_compared(program, place, tmp_path):
    recipe = (place / "tiny.yaml").read_text()
    (tmp_path / "tiny.yaml").write_text(recipe)
    (tmp_path / "other.yaml").write_text(f"{recipe}\ntrain.seed: 1\n")
    shutil.copy(place / trained.CORPUS, tmp_path)
    keys = ["train.steps=2", "train.sample=One"]
    code, out, _ = program("compare", "--train", "tiny.yaml", "other.yaml", *keys, cwd=tmp_path)
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert code == 0 and len(runs) == 2
    table = out[out.rindex("\nrun\n") :]
    rows = {name: values for name, *values in map(_cells, table.splitlines())}
    assert rows["state"] == ["finished, step 2"] * 2 and rows["train.seed"] == ["0", "1"]
    assert [f"sample of {run}, at step 2\n  One" in table for run in runs] == [True, True]


def test_what_is_trained_already_is_only_compared(program, place, tmp_path):
    folder = Path(shutil.copytree(place, tmp_path / "copy"))
    run = trained.only_run(folder)
    other = shutil.copytree(run, run.with_name("other"))
    done = program("compare", "--train", "tiny.yaml", "other", "--json", cwd=folder)
    assert done.code == 0 and "this run is finished: step 4 of 4" in done.err
    assert [one["run"] for one in json.loads(done.out)["runs"]] == [
        *(str(path.relative_to(folder)) for path in (run, other)),
    ]


def test_a_recipe_that_is_refused_keeps_all_from_being_trained(program, place, tmp_path):
    (tmp_path / "tiny.yaml").write_text((place / "tiny.yaml").read_text())
    (tmp_path / "wrong.yaml").write_text("train: {steps: 1}\n")
    code, out, err = program("compare", "--train", "tiny.yaml", "wrong.yaml", cwd=tmp_path)
    assert (code, out) == (2, "") and "problems in wrong.yaml" in err
    assert not (tmp_path / "runs").exists()


def test_keys_without_recipes_to_train_and_several_hosts_are_refused(
    program, copies, monkeypatch, tmp_path
):
    said = "train.steps=2 is a key of a recipe; --train trains recipes with it\n"
    assert program("compare", "one", "two", "train.steps=2", cwd=copies) == (2, "", said)
    for name, value in dict(RANK=0, WORLD_SIZE=2, MASTER_ADDR="a", MASTER_PORT=1).items():
        monkeypatch.setenv(name, str(value))
    said = (
        "--train trains on one host, and this is process 0 of 2; windlass train on every host "
        "trains each recipe, and windlass compare RUN RUN compares them\n"
    )
    assert program("compare", "--train", "one", "two", cwd=copies) == (2, "", said)


def _cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_a_run_without_a_plan_is_reported_all_the_same(copies, monkeypatch):
    monkeypatch.chdir(copies)
    bare = shutil.copytree("runs/one", "runs/bare")
    for name in ("plan.json", "about.json", "metrics.jsonl", "phases.jsonl"):
        (Path(bare) / name).unlink()
    found = api.report("bare")
    assert found.errors == {} and found.cost is None and found.curves["loss"] == []
    assert "<svg" not in (Path(bare) / "report.html").read_text()


def test_a_page_that_cannot_be_written_is_refused_in_words(program, copies):
    other = Path(shutil.copytree(copies / "runs" / "one", copies / "runs" / "other"))
    (other / "report.html").unlink(missing_ok=True)
    (other / "report.html").mkdir()
    said = "runs/other/report.html cannot be written: Is a directory\n"
    assert program("report", "other", cwd=copies) == (2, "", said)


def test_a_curve_is_a_line_between_its_points():
    curve = [(1, 4.0), (3, 2.0), (7, 6.0)]
    assert [at(curve, step) for step in (0, 1, 2, 3, 4, 7, 8)] == [
        *(None, 4.0, 3.0, 2.0, 3.0, 6.0, None)
    ]


def test_a_falling_curve_falls_on_a_terminal_from_corner_to_corner():
    lines = [line.plain for line in plot([([(1, 9.0), (5, 1.0)], "")], width=4, height=2)]
    assert lines == ["9.0000 ┤⠑⢄⠀⠀", "1.0000 ┤⠀⠀⠑⢄", "       └────", "        1  5"]
    assert plot([([], "")], width=4) == []


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0.1, 3.9, [0, 1, 2, 3, 4]),
        (5.0, 5.0, [2, 4, 6, 8]),
        (5.0, 5.00001, [2, 4, 6, 8]),
        (0.0, 0.008, None),
    ],
)
def test_ticks_are_round_and_hold_all_values(low, high, marks):
    found = curves.ticks(low, high)
    assert found[0] <= low and high <= found[-1] and 3 <= len(found) <= 7
    assert marks is None or found == marks


def test_ticks_that_are_close_are_told_apart():
    curve = [(1, 0.003), (2, 0.003001)]
    picture = curves.chart("Rate", [curves.CurveStyle("rate", curve, "line-1")], "{:.3g}".format)
    labels = re.findall('class="tick".*?>(.*?)<', picture)
    assert len(labels) == len({*labels}) and labels[0].startswith("0.003")


def test_a_long_curve_is_drawn_in_few_points_and_keeps_its_ends_and_its_spikes():
    curve = [(step, float(step)) for step in range(5000)]
    curve[1234] = (1234, 9999.0)
    picture = curves.chart("Loss", [curves.CurveStyle("loss", curve, "line-1")], str)
    (given,) = re.findall(r'data-curves="(.*?)"', picture)
    points = [point[0] for point in json.loads(html.unescape(given))[0]["points"]]
    assert len(points) <= curves.MOST and (points[0], points[-1]) == (0, 4999)
    assert 1234 in points and points == sorted(points)


def test_metrics_are_written_as_csv_of_one_run_or_several(program, copies):
    code, out, err = program("report", "one", "--csv", "-", cwd=copies)
    rows = [*csv.DictReader(out.splitlines())]
    records = metrics.by_step(metrics.read(copies / "runs" / "one" / "metrics.jsonl"))
    assert (code, err) == (0, "") and [int(row["step"]) for row in rows] == [1, 2, 4]
    assert [float(row["loss"]) for row in rows] == [one["loss"] for one in records]
    assert rows[0]["validation_loss"] == "" and float(rows[-1]["validation_loss"]) > 0
    written = program("compare", "one", "two", "--csv", "both.csv", cwd=copies)
    assert written == (0, "written to both.csv\n", "")
    both = [*csv.DictReader((copies / "both.csv").read_text().splitlines())]
    assert [row["run"] for row in both] == ["runs/one"] * 3 + ["runs/two"] * 3


def test_a_comparison_is_written_as_a_page_with_all_runs_in_each_plot(program, copies):
    code, out, _ = program("compare", "one", "two", "--page", "both.html", cwd=copies)
    assert code == 0 and out.endswith("\npage         both.html\n")
    page = (copies / "both.html").read_text()
    plots = [ElementTree.fromstring(one) for one in re.findall("<svg viewBox.*?</svg>", page)]
    assert [len(plot.findall("polyline")) for plot in plots] == [2] * 4
    assert not re.search(r"https?://|<script[^>]|@import|url\(", page)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--csv", "-", "--json"], "--csv and --json are given; one of them at a time"),
        (["--port", "8000"], "--port is 8000; it needs --watch"),
        (["--watch", "--port", "70000"], "--port is 70000; it must be from 1 to 65535"),
        (["--watch", "--port", "x"], '--port is "x"; it must be a whole number'),
        (["--csv", "runs"], "runs cannot be written: Is a directory"),
        (["--wach"], "no option --wach; did you mean --watch?"),
    ],
)
def test_options_of_a_report_are_refused_in_words(program, copies, words, said):
    code, _, err = program("report", "one", *words, cwd=copies)
    assert (code, err) == (2, f"{said}\n")
