"""The summary at the end of a run: its figures, on one screen, in colour or plain."""

import re
from io import StringIO
from pathlib import Path

from rich.console import Console

from tests import trained
from windlass.planning import targets
from windlass.telemetry import metrics
from windlass.telemetry.console import ConsoleReport
from windlass.telemetry.metrics import Meter
from windlass.training import summary

ROWS, COLUMNS = 24, 80
# As long as each becomes, all at once: no run has them all.
LONGEST = [
    ("trained", "multiscale, 17,596,416 of 3,511,629,184 parameters; 100,000 steps, 12.50 epochs, "
     "104,857,600,000 tokens"),
    ("loss", "11.9565 at step 1, 1.5250 at the end; 1.4069 nats a token on validation rows "
     "(EMA), at best 1.3069 at step 99500"),
    ("unigram", "5.2738, the entropy of the corpus's token frequencies"),
    ("verdict", "overfits: the validation loss is 0.4132 above that of the last 10000 training "
     "steps, more than 0.2; fewer epochs, more documents or --weights best may help"),
    ("tasks", "arc_challenge/acc_norm 0.6250 ± 0.0343, 0.4500 at step 0"),
    ("tasks", "hellaswag/acc_norm 0.6250 ± 0.0343, 0.4500 at step 0; 12 more"),
    ("speed", "123.4k tok/s, 230 ms a step, 45.1% of peak (MFU)"),
    ("time", "2d04h, 2d03h of it in 100000 steps; an epoch takes 4h05m"),
    ("cost", "$1,234 on demand, $456 spot (v5e-256 for 2d04h, gcp)"),
    ("stopped", "early at step 99500 of 100000: no better in 3 evaluations than 1.3069 at step 1"),
    ("compiled", "1 program in 37 s; 37 programs from the cache (~/.cache/windlass/compiled, "
     "6.5 MiB)"),
    ("plan", "55.0 MiB and 214 ms per step predicted, 54.3 MiB and 221 ms measured (+1%, -3%)"),
    ("files", "runs/legal-cot-sft-3788f448: checkpoints, metrics.jsonl, samples.txt, lm_eval"),
    ("next", "windlass chat runs/legal-cot-sft-3788f448"),
    ("next", "windlass export runs/legal-cot-sft-3788f448 --to FOLDER"),
]  # fmt: skip


def shown(facts, **how) -> str:
    file = StringIO()
    console = Console(width=COLUMNS, height=ROWS, file=file, **how)
    ConsoleReport(console).end(facts)
    return file.getvalue()


def test_the_longest_summary_fits_one_screen_and_no_line_is_wider():
    text = shown(LONGEST, force_terminal=True, color_system="standard")
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    assert len(lines) <= ROWS - 1  # and the line of the shell below
    assert max(map(len, lines)) <= COLUMNS
    assert "".join(lines).count("windlass chat runs/legal-cot-sft-3788f448") == 1
    assert "\x1b[36mwindlass chat" in text and "\x1b[33moverfits" in text


def test_a_log_gets_plain_lines_a_fact_each():
    assert shown(LONGEST).splitlines() == [f"{name:<12} {value}" for name, value in LONGEST]


def test_a_run_ends_with_what_was_trained_its_losses_speed_and_files(tmp_path_factory):
    place = trained.workplace(tmp_path_factory)
    run, printed = trained.only_run(place), (place / trained.OUTPUT).read_text()
    records = [one for one in metrics.read(run / "metrics.jsonl") if "loss" in one]
    ended = dict(re.findall(r"^(\w+) +(.*)$", printed.partition("\ntrained ")[2], re.MULTILINE))
    assert "\ntrained      qwen3, all 28,224 parameters; 4 steps, 0.57 epochs, " in printed
    first, last = records[0]["loss"], records[-1]["loss"]
    assert ended["loss"].startswith(f"{first:.4f} at step 1, {last:.4f} at the end; ")
    assert "nats a token on validation rows, at best " in ended["loss"]
    assert re.fullmatch(r"[\d.]+k? tok/s, [\d.]+ m?s a step", ended["speed"])
    name = f"runs/{run.name}"
    assert ended["files"] == f"{name}: checkpoints, metrics.jsonl"
    assert printed.endswith(
        f'next         windlass generate {name} "Once upon a time"\n'
        f"next         windlass export {name} --to FOLDER\n"
    )
    assert "cost" not in ended  # of a CPU no price is known


def test_the_cost_is_the_rent_of_all_chips_for_the_time():
    text = summary.cost(targets.find("v5e-8"), 1800.0)
    assert text == "$4.80 on demand, $0.71 spot (v5e-8 for 30m00s, gcp)"
    assert summary.cost(targets.find("cpu"), 1800.0) is None


def test_speed_is_that_of_a_median_step_with_its_share_of_the_peak():
    times = iter([0.0, 9.0, 9.5, 10.0])
    meter = Meter(
        rows_per_step=4,
        tokens_per_step=1000,
        flops_per_step=3 * 10**12,
        peak_flops=2e13,
        clock=lambda: next(times),
    )
    assert summary.speed(meter) is None
    for _ in range(3):  # the first is of the start
        meter.step()
        meter.read()
    assert summary.speed(meter) == "2.0k tok/s, 500 ms a step, 30.0% of peak (MFU)"


def test_scores_of_tasks_are_shown_before_and_after_the_deciding_one_first():
    first = {"step": 0, "a/acc": 0.25, "a/acc_stderr": 0.1, "b/acc": 0.5, "c/ppl": 12.0}
    last = first | {"step": 9, "a/acc": 0.5, "b/acc": 0.75, "c/ppl": 9.0, "d/acc": 1.0}
    found = list(summary.scores([first, {"step": 3, "loss": 1.0}, last], "c/ppl"))
    assert found == [
        ("tasks", "c/ppl 9.0000, 12.0000 at step 0"),
        ("tasks", "a/acc 0.5000 ± 0.1000, 0.2500 at step 0; 2 more"),
    ]
    assert list(summary.scores([{"step": 3, "loss": 1.0}], None)) == []


def test_files_are_those_that_are_there(tmp_path: Path):
    (tmp_path / "samples.txt").touch()
    assert summary.files(tmp_path) == f"{tmp_path}: checkpoints, samples.txt"
