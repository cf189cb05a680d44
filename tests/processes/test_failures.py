"""What is said of a run that lost a process."""

import signal

import pytest

from windlass.checkpoint.store import newest_step
from windlass.processes.failures import Lost, in_log, left
from windlass.processes.parent import explained

# As JAX 0.10.2 and 0.11.2 log it before they abort.
SILENT = """\
F1115 11:47:04.210157    4274 client.h:80] Terminating process because the JAX distributed service \
detected fatal errors. absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped \
sending heartbeats):
1
3
The tasks have crashed. Check the task logs for an earlier error, or scheduler events (e.g. \
preemption, eviction) to debug further.
"""
CLOSED = """\
F1115 11:51:26.632364   15203 client.h:80] Terminating process because the JAX distributed service \
detected fatal errors. absl::Status: UNAVAILABLE: Failed to send RPC to coordination service. \
Either the leader task was preempted/died/restarted unexpectedly or this task is experiencing \
network issues.
"""
NEVER_CAME = """\
F1115 13:00:33.742567    7020 client.h:80] Terminating process because the JAX distributed service \
detected fatal errors. absl::Status: DEADLINE_EXCEEDED: Deadline Exceeded

RPC: /xla.coordination.CoordinationService/RegisterTask
"""


@pytest.mark.parametrize(
    "log, lost",
    [
        (SILENT, Lost([1, 3], "no sign of life for 30 s")),
        (CLOSED, Lost([0], "its connection is closed")),
        ("[Gloo] Rank 0 is connected to 1 peer ranks.\n", None),
    ],
)
def test_what_jax_logs_before_it_aborts_names_the_processes_that_are_gone(log, lost):
    assert in_log(log) == lost


def test_before_the_first_checkpoint_there_is_nothing_to_go_on_from(tmp_path):
    names = ["host-a", "host-b", "host-c", "host-d"]
    again = "Nothing was saved yet: the same command on every host begins again"
    assert left(str(tmp_path), newest_step) == left(None, newest_step) == again
    assert Lost([1, 3], "no sign of life for 30 s").message(names, again) == (
        f"process 1 (host-b) and process 3 (host-d) are gone: no sign of life for 30 s. {again}"
    )
    assert Lost([], "Gloo failed").message(names, again) == (
        f"another process is gone: Gloo failed. {again}"
    )


def test_a_parent_says_that_a_process_never_came_or_that_its_trainer_was_killed(tmp_path):
    log = tmp_path / "log"
    log.write_text(NEVER_CAME)
    assert explained(signal.SIGABRT, str(log), [], None, newest_step) == (
        "not all processes were there within 5 minutes; every host needs the same command, and "
        f"must reach the coordinator. What JAX said is in {log}"
    )
    log.write_text("")
    assert explained(signal.SIGKILL, str(log), ["host-a", "host-b"], None, newest_step) == (
        "the trainer was ended by SIGKILL, as happens where memory runs out. Nothing was saved "
        "yet: the same command on every host begins again"
    )
