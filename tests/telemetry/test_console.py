import io
import re
import sys

import pytest
from rich.console import Console

from windlass.telemetry.console import ConsoleReport
from windlass.terminal import Terminal

SPEEDS = {"loss": 3.21456, "step_ms": 250, "tokens_per_second": 12_345.0, "mfu": 0.4123}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tell_everything(report: ConsoleReport, clock: Clock):
    with report:
        report.banner([("device", "8 × TPU v5 lite"), ("run", "runs/[quickstart]-1a2b")])
        report.note("going on from step 10")
        report.warning("bfloat16 on a CPU is slow")
        with report.phase("compiling the step"):
            clock.now += 8.24
        report.start(1000, 10)
        report.step(11, SPEEDS)
        report.step(20, SPEEDS)
        report.evaluation(20, {"validation_loss": 3.1, "validation_perplexity": 22.198})
        report.sample("Ada saw a [red] :cat: " + "that ran and ran " * 10 + "\nThe end.")
        with report.phase("saving"):
            clock.now += 75
        report.step(1000, {"loss": 0.0001})
        report.end([("loss", "3.1000")])


def plain(environ=None) -> tuple[ConsoleReport, io.StringIO, Clock]:
    file, clock = io.StringIO(), Clock()
    return ConsoleReport(Console(file=file, _environ=environ or {}), clock=clock), file, clock


def terminal(**environ) -> tuple[ConsoleReport, io.StringIO, Clock]:
    file, clock = io.StringIO(), Clock()
    console = Console(
        file=file, force_terminal=True, width=120, _environ={"TERM": "xterm-256color"} | environ
    )
    return ConsoleReport(console, clock=clock), file, clock


def test_without_a_terminal_everything_is_a_plain_line():
    report, file, clock = plain()
    tell_everything(report, clock)
    assert file.getvalue().splitlines() == [
        "device       8 × TPU v5 lite",
        "run          runs/[quickstart]-1a2b",
        "going on from step 10",
        "warning: bfloat16 on a CPU is slow",
        "compiling the step took 8.2 s",
        "step   11/1000  loss 3.2146  12.3k tok/s  41.2% MFU  4m07s left",
        "step   20/1000  loss 3.2146  12.3k tok/s  41.2% MFU  4m05s left",
        "step 20  validation loss 3.1000  perplexity 22.1980",
        "  Ada saw a [red] :cat: " + "that ran and ran " * 10,
        "  The end.",
        "saving took 1m15s",
        "step 1000/1000  loss 0.0001",
        "loss         3.1000",
    ]


def test_the_time_left_is_over_the_last_five_readings():
    report, file, _ = plain()
    report.start(1000)
    for step, milliseconds in ((1, 9000), (2, 8000), *((2 + 10 * i, 100) for i in range(1, 5))):
        report.step(step, {"step_ms": milliseconds})
    report.step(52, {"step_ms": 2600})
    report.step(62, {"step_ms": 100})
    left = [line.rpartition("  ")[2] for line in file.getvalue().splitlines()]
    assert left[0] == "2h29m left"  # of the first step, which counts only alone
    assert left[1] == "2h13m left"
    # (8 s + 10 · 0.1 s) / 11 · 988, and so on, until the second step is the sixth before.
    assert left[2:] == ["13m28s left", "7m46s left", "5m43s left", "4m40s left", *left[6:]]
    assert left[6:] == ["9m29s left", "9m23s left"]


def test_a_terminal_gets_a_bar_with_lines_above_it():
    report, file, clock = terminal()
    tell_everything(report, clock)
    shown = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", file.getvalue())
    assert re.search(r"step 20/1000 ━+ +loss 3.2146  12.3k tok/s  41.2% MFU  4m05s left", shown)
    assert re.search(r"step 1000/1000 ━+ +loss 0.0001", shown)
    assert "\nstep 20  validation loss 3.1000" in shown.replace("\r", "\n")
    assert "compiling the step took 8.2 s" in shown


def test_a_terminal_is_left_with_its_cursor():
    for fails in (False, True):
        report, file, clock = terminal()
        try:
            with report:
                report.start(10, 0)
                report.step(1, SPEEDS)
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


def colours(text: str) -> list[str]:
    return re.findall(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|9[0-7])[0-9;]*m", text)


def test_no_color_is_honoured():
    report, file, clock = terminal()
    tell_everything(report, clock)
    assert colours(file.getvalue())
    report, file, clock = terminal(NO_COLOR="1")
    tell_everything(report, clock)
    assert not colours(file.getvalue())


def test_a_terminal_that_cannot_move_its_cursor_gets_lines():
    report, file, clock = terminal(TERM="dumb")
    tell_everything(report, clock)
    assert "step   20/1000  loss 3.2146" in file.getvalue()
    assert "\x1b[" not in file.getvalue()


def test_a_phase_that_fails_is_not_said_to_be_done():
    report, file, clock = plain()
    with pytest.raises(KeyboardInterrupt), report.phase("compiling the step"):
        raise KeyboardInterrupt
    assert file.getvalue() == ""


def waiting(milliseconds: float) -> dict[str, float]:
    return {"loss": 1.0, "step_ms": 200.0, "data_wait_ms": milliseconds}


def test_waiting_for_data_is_said_once_with_what_helps_and_not_of_the_first_step():
    report, file, _ = plain()
    with report:
        report.start(100, 10)
        for step, wait in [(11, 150.0), (12, 19.0), (13, 50.0), (14, 90.0)]:
            report.step(step, waiting(wait))
    assert [line for line in file.getvalue().splitlines() if "waiting" in line] == [
        "warning: 25% of a step is spent waiting for data (see data_wait_ms in metrics.jsonl); "
        "more data.workers or a larger data.prefetch may help"
    ]


def test_the_time_since_the_beginning_includes_everything():
    report, _, clock = plain()
    with report.phase("preparing the data"):
        clock.now += 20
    clock.now += 5
    assert report.seconds == 25


def test_a_silence_is_explained_ever_less_often():
    report, file, clock = plain()
    report.beat()  # nothing goes on
    with report.phase("compiling the step", last=65.2):
        for clock.now in (4, 5, 9, 10, 72, 107, 108, 3700, 3759, 3760, 3800):
            report.beat()
    assert file.getvalue().splitlines() == [
        *(f"compiling the step, {at}; last time 1:05" for at in ("0:05", "0:10", "1:12", "1:48")),
        *(f"compiling the step, {at}; last time 1:05" for at in ("1:01:40", "1:02:40")),
        "compiling the step took 1h03m",
    ]


def test_what_is_said_in_between_puts_off_the_next_sign_of_life():
    report, file, clock = plain()
    with report.doing("evaluating"):
        clock.now = 4
        report.beat()
        report.note("half of it")
        clock.now = 8
        report.beat()
        clock.now = 9
        report.beat()
    clock.now = 60
    report.beat()
    assert file.getvalue() == "half of it\nevaluating, 0:05\n"


def test_on_a_terminal_a_silence_is_explained_in_place():
    report, file, clock = terminal()
    with report:
        with report.doing("restoring"):
            clock.now = 30
            report.beat()
        with report.doing("training"):
            report.start(10, 0)
            with report.doing("saving"):
                clock.now = 120
                report.beat()
            report.step(1, SPEEDS)
    shown = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", file.getvalue())
    assert "restoring, 0:30" in shown
    assert re.search(r"\rstep 0/10 ━+ +saving, 1:30 *\r", shown), shown
    # The bar takes the place of whatever was drawn before it.
    assert "training" not in shown.partition("step 0/10")[2] and shown.rstrip().endswith("left")


def test_what_may_draw_a_bar_of_its_own_has_lines_above_it():
    report, file, clock = terminal()
    with report, report.doing("preparing the data", draws=True):
        clock.now = 30
        report.beat()
        assert "preparing the data, 0:30\n" in file.getvalue()
        assert "..." not in file.getvalue()


def test_a_loss_that_jumps_far_above_the_last_ones_is_warned_of_once():
    report, file, _ = plain()
    losses = [6.9, 5.0, 5.2, 4.8, 9.0, 4.7, 117.0, 120.0, float("inf"), 300.0]
    for step, loss in enumerate(losses, start=1):
        report.step(step, {"loss": loss})
    warnings = [line for line in file.getvalue().splitlines() if line.startswith("warning")]
    assert warnings == [
        "warning: the loss jumped to 117.0000 at step 7, from 9.0000 at most in the 6 reports "
        "before; if it stays there, a lower optim.learning_rate, a longer warm-up or a smaller "
        "optim.clip_norm may help in another run, and `windlass data` shows the rows"
    ]


def test_escape_codes_in_a_sample_do_not_reach_the_terminal():
    file = io.StringIO()
    console = Terminal(file=file, force_terminal=True, color_system=None, width=120)
    with ConsoleReport(console, clock=Clock()) as report:
        report.sample("a\x1b]0;title\x07b\x1b[2J\x9b31mc\u202ed\udce9 [/x] \u0645\u200c\u06cc")
    assert (
        file.getvalue()
        == "  a\ufffd]0;titleb\ufffd[2J\ufffd31mc\ufffdd\ufffd [/x] \u0645\u200c\u06cc\n"
    )


def test_a_standard_output_that_was_closed_before_is_written_to_by_nobody(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it after `>&-`
    with ConsoleReport(clock=Clock()) as report:
        report.note("going on from step 10")
        assert not report.has_lost_reader()


def test_metrics_of_many_layers_or_experts_are_left_to_files():
    report, file, _ = plain()
    many = {f"validation_expert_load_{number}": 1.0 for number in range(8)}
    few = {f"validation_dead_experts_{layer}": 0.0 for layer in range(2)}
    with report:
        report.evaluation(5, {"validation_loss": 3.1} | many | few)
    said = "step 5  validation loss 3.1000  dead experts 0 0.0000  dead experts 1 0.0000\n"
    assert file.getvalue() == said
