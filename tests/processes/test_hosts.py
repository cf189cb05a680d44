"""A process that is alone speaks to itself, and one that cannot listen for others says so."""

import socket

import pytest

from windlass.errors import UserError
from windlass.processes import hosts
from windlass.processes.clusters import Hosts


def test_a_single_process_speaks_to_itself_without_any_service():
    hosts.barrier("a test")
    assert (hosts.count(), hosts.index(), hosts.is_first(), hosts.joined()) == (1, 0, True, None)
    assert hosts.broadcast_text("a test", "a word") == "a word"
    assert hosts.each("a test", "a word") == ["a word"]


def test_a_port_that_something_else_listens_on_is_refused_before_jax_sees_it():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        at = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UserError) as refused:
            hosts.join(Hosts(at, 2, 0, "--coordinator"))
    assert str(refused.value) == (
        f"process 0 of 2 cannot listen for the others at {at} (Address already in use); "
        "another port would do, on every host"
    )
