"""Processes that meet before JAX joins them: who is missing is said, and what cannot be refused."""

import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.spawn import free_port
from windlass.errors import PeerLost, UserError
from windlass.processes import rendezvous
from windlass.processes.clusters import Hosts

NAME = socket.gethostname()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Every wait of minutes as one of tenths of a second."""
    for name in ("FIRST_SECONDS", "NEXT_SECONDS"):
        monkeypatch.setattr(rendezvous, name, 0.2)
    monkeypatch.setattr(rendezvous, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "SILENT_SECONDS", 1.0)


@pytest.fixture
def begin():
    """Start a process of so many, in a thread: what becomes of it, and what it says."""
    at = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor() as threads:

        def start(process: int, of: int, seconds: float = 20.0) -> tuple[Future, list[str]]:
            said, hosts = [], Hosts(at, of, process, "--coordinator")
            met = threads.submit(rendezvous.meet, hosts, said.append, seconds=seconds)
            return met, said

        start.at = at
        yield start


def said_soon(said: list[str], begins: str) -> None:
    """Wait until a process has said a line that begins so."""
    for _ in range(6000):
        if any(line.startswith(begins) for line in said):
            return
        time.sleep(0.01)
    raise AssertionError(f"nothing begins with {begins!r}: {said}")


def test_whoever_is_missing_is_named_by_all_until_it_comes(begin):
    second, second_said = begin(1, 3)
    said_soon(second_said, f"waiting for process 0 at {begin.at}, for ")
    assert second_said[0].endswith(" so far: Connection refused")
    first, first_said = begin(0, 3)
    said_soon(first_said, "waiting for process 2 of 3, for ")
    assert first_said[-1].endswith(f" so far: this one listens at {begin.at}")
    said_soon(second_said, "waiting for process 2 of 3, for ")
    assert second_said[-1].endswith(" so far: process 0 is there")
    third, third_said = begin(2, 3)
    assert [one.result() for one in (first, second, third)] == [None] * 3
    assert not third_said


def test_one_that_never_comes_is_named_when_it_is_given_up(begin):
    first, second = begin(0, 3, seconds=1.0)[0], begin(1, 3, seconds=3.0)[0]
    with pytest.raises(PeerLost) as lost:
        first.result()
    assert str(lost.value) == (
        f"process 2 of 3 did not come within 1.0 s: this one listens at {begin.at}. Every host "
        f"needs the same command, and must reach {begin.at}"
    )
    with pytest.raises(PeerLost) as lost:
        second.result()
    assert str(lost.value) == (
        f"process 0 at {begin.at} did not come within 3.0 s: Connection refused. Every host needs "
        f"the same command, and must reach {begin.at}"
    )


def test_different_numbers_of_processes_are_refused_by_all(begin):
    first, said = begin(0, 4)
    second, _ = begin(1, 4)
    said_soon(said, "waiting for process 2 and process 3 of 4, for ")
    for one in (first, second, begin(2, 3)[0]):
        with pytest.raises(UserError) as refused:
            one.result()
        assert str(refused.value) == (
            f"process 2 ({NAME}) was started as one of 3 processes, and process 0 as one of 4; "
            "start every host with the same number of them"
        )


def test_two_processes_of_one_number_are_told_apart_and_the_others_wait_on(begin):
    first, _ = begin(0, 3)
    twice = [begin(1, 3)[0] for _ in range(2)]
    while not any(one.done() for one in twice):
        time.sleep(0.01)
    twin = next(one for one in twice if one.done())
    with pytest.raises(UserError) as refused:
        twin.result()
    assert str(refused.value) == (
        f"{NAME} is process 1 already, and so is {NAME}; every host needs a number of its own, 0 "
        "to 2"
    )
    begin(2, 3)
    assert first.result() is None


def test_one_that_goes_is_missing_again_and_strangers_are_no_processes(begin):
    first, said = begin(0, 3)
    said_soon(said, "waiting for process 1 and process 2 of 3")
    host, port = begin.at.split(":")
    deep = b"[" * 9000
    for words in (b"GET / HTTP/1.1\n", b'{"process": 1}\n', b"[1]\n", b"x" * 9000, deep, b""):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(words)
    with socket.create_connection((host, int(port))) as leaving:
        leaving.sendall(b'{"process": 1, "proc')
        leaving.sendall(b'esses": 3, "host": "b"}\n')
        said_soon(said, "waiting for process 2 of 3")
    said.clear()
    said_soon(said, "waiting for process 1 and process 2 of 3")
    others = [begin(process, 3)[0] for process in (1, 2)]
    assert [one.result() for one in (first, *others)] == [None] * 3


def test_a_port_at_which_something_else_answers_is_waited_for_and_said(begin):
    host, port = begin.at.split(":")
    with socket.create_server((host, int(port))) as server:
        with pytest.raises(PeerLost) as lost:
            begin(1, 2, seconds=0.5)[0].result()
        assert f"process 0 at {begin.at} did not come within 0.5 s: timed out" in str(lost.value)
        server.accept()[0].close()
        other, _ = begin(1, 2, seconds=0.5)
        with server.accept()[0] as connection:
            connection.sendall(b'{"error": "no such request"}\n')
        with pytest.raises(PeerLost, match="within 0.5 s: "):
            other.result()


def test_a_thousand_processes_are_waited_for_and_not_all_of_them_named(begin):
    both = [begin(process, 1000, seconds=1.0) for process in (0, 1)]
    eight = ", ".join(f"process {rank}" for rank in range(2, 10))
    said_soon(both[1][1], f"waiting for {eight} and 990 more of 1000, for ")
    for met, _ in both:
        with pytest.raises(PeerLost):
            met.result()
