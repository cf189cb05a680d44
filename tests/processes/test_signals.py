"""Signals: a line and an exit before the loop, a saved step within it, never a crash."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.spawn import free_port
from tests.training.campaign import Ended, Program, ended

# As a process starts that neither `nohup` nor a shell's `&` has made deaf to signals.
FIRST_LINES = """import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
from windlass.processes.signals import Signals"""


def told(body: str, *numbers: signal.Signals, gap: float = 0.3) -> Ended:
    """Run lines that print "ready" when they are, and send each signal in turn."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{FIRST_LINES}\n{textwrap.dedent(body)}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for number in numbers:
        process.send_signal(number)
        time.sleep(gap)
    return ended(process)


BEFORE_THE_LOOP = """
    import time
    with Signals().listening() as signals, signals.phase("compiling the step"):
        print("ready", flush=True)
        time.sleep(30)
"""
IN_THE_LOOP = """
    import time
    with Signals().listening() as signals, signals.waits():
        print("ready", flush=True)
        while signals.stop is None:
            time.sleep(0.01)
        print(f"step done, then saved", flush=True)
        time.sleep(1)
"""


def test_before_the_loop_a_signal_ends_the_process_with_its_line():
    assert told(BEFORE_THE_LOOP, signal.SIGTERM) == Ended(
        143, "SIGTERM while compiling the step: nothing was lost\n"
    )
    assert told(BEFORE_THE_LOOP, signal.SIGINT) == Ended(
        130, "Ctrl-C while compiling the step: nothing was lost\n"
    )


def test_in_the_loop_a_signal_is_only_noted():
    assert told(IN_THE_LOOP, signal.SIGTERM) == Ended(
        0,
        "SIGTERM: finishing this step, then saving; Ctrl-C again stops at once\n"
        "step done, then saved\n",
    )


AFTER_THE_LOOP = """
    import time
    with Signals().listening() as signals:
        with signals.waits():
            pass
        print("ready", flush=True)
        time.sleep(30)
"""


def test_after_the_loop_a_signal_is_not_said_to_come_while_starting():
    assert told(AFTER_THE_LOOP, signal.SIGTERM) == Ended(
        143, "SIGTERM while finishing: nothing was lost\n"
    )


AT_THE_VERY_END = """
    import atexit, time
    from windlass.cli import main

    def last():
        print("ready", flush=True)
        time.sleep(30)

    atexit.register(last)
    sys.argv = ["windlass", "--version"]
    main()
"""


def test_ctrl_c_while_the_interpreter_ends_is_no_traceback():
    """As SIGTERM then, it ends the process by itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{FIRST_LINES}\n{textwrap.dedent(AT_THE_VERY_END)}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("windlass ")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert ended(process) == Ended(-signal.SIGINT, "")


AT_THE_END_OF_ALL = """
    import os, signal, time
    from windlass.processes.clusters import Hosts
    from windlass.processes.peers import together

    place = Hosts(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]), "a test")
    with Signals().listening() as signals:
        with together(place, signals, lambda folder: None):
            pass
        if place.process == 1:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(1)
"""


@pytest.mark.long
def test_a_signal_to_one_process_when_all_are_done_makes_none_of_them_fail():
    """Who left at once was missed by the first, for 30 seconds, which then exited with 1."""
    port, started = str(free_port()), []
    for process in "01":
        words = ["-c", f"{FIRST_LINES}\n{textwrap.dedent(AT_THE_END_OF_ALL)}", port, process]
        started.append(
            subprocess.Popen(
                [sys.executable, *words],
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    first, second = map(ended, started)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert second.output == "SIGHUP: all is saved, the run ends; Ctrl-C again stops at once\n"


def test_a_closed_terminal_is_as_sigterm_and_under_nohup_it_is_nothing():
    assert told(BEFORE_THE_LOOP, signal.SIGHUP) == Ended(
        129, "SIGHUP while compiling the step: nothing was lost\n"
    )
    noted = told(IN_THE_LOOP, signal.SIGHUP)
    assert noted.code == 0 and noted.output.startswith("SIGHUP: finishing this step, then saving")
    ignoring = "    import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    assert told(f"{ignoring}{BEFORE_THE_LOOP}", signal.SIGHUP, signal.SIGTERM) == Ended(
        143, "SIGTERM while compiling the step: nothing was lost\n"
    )


def test_a_second_ctrl_c_stops_at_once():
    ended = told(IN_THE_LOOP, signal.SIGINT, signal.SIGINT)
    assert ended.code == 130
    assert ended.output.endswith(
        "Ctrl-C again: stopped at once; the last checkpoint is as it was\n"
    )


def test_a_signal_during_a_compilation_leaves_no_crash():
    """The compiler works in C++, where no Python handler runs: the line must come all the same."""
    compiles = """
        import jax, jax.numpy as jnp
        def slow(x):
            for i in range(400):
                x = jnp.sin(x @ x) + jnp.cumsum(jnp.sort(x, axis=i % 2), axis=0) * i
            return x
        lowered = jax.jit(slow).lower(jnp.ones((64, 64)))
        with Signals().listening() as signals, signals.phase("compiling the step"):
            print("ready", flush=True)
            lowered.compile()
            print("compiled", flush=True)
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        found = told(compiles, number)
        assert found.code == 128 + number, found.output
        assert "while compiling the step: nothing was lost" in found.output
        assert "compiled" not in found.output and "Traceback" not in found.output


def test_a_trainer_ends_when_its_parent_and_the_terminal_are_gone():
    body = """
        import time
        from windlass.processes.pipe import Pipe
        with Signals(Pipe(signals=0, facts=1, log="")).listening():
            print("ready", flush=True)
            time.sleep(30)
    """
    ours, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", f"{FIRST_LINES}\n{textwrap.dedent(body)}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    )
    os.close(terminal)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.close(ours)
    process.communicate(timeout=20)  # closes what it hears its parent by
    assert process.returncode == 1


def test_what_was_set_before_is_set_again_after():
    from windlass.processes.signals import HANDLED, Signals

    before = [signal.getsignal(number) for number in HANDLED]
    with pytest.raises(KeyError), Signals().listening():
        raise KeyError
    assert before == [signal.getsignal(number) for number in HANDLED]


@pytest.mark.long
def test_a_signal_while_a_run_starts_or_compiles_is_survived(tmp_path):
    """The real program, at moments spread over its start."""
    program = Program(tmp_path)
    for number, wait in ((signal.SIGINT, 0.6), (signal.SIGTERM, 3.0), (signal.SIGINT, 6.0)):
        process = program.start()
        time.sleep(wait)
        process.send_signal(number)
        found = ended(process)
        assert found.code == 128 + number, found.output
        assert "Traceback" not in found.output, found.output
