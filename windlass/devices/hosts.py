"""The processes of a run: how they find each other, and what they say to each other."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax._src import distributed  # JAX shows its service of keys and barriers nowhere else
from jax.errors import JaxRuntimeError

from windlass.config import listing, section
from windlass.errors import UserError

HEARTBEAT_SECONDS = 30  # without a sign of life, after which a process counts as gone
A_DAY = 86_400_000  # milliseconds: who waits for a download is not late, and a dead peer is noticed


class Hosts(NamedTuple):
    """How the processes of a run find each other, and how that was found out."""

    coordinator: str | None  # HOST:PORT of process 0; None: JAX finds it
    processes: int
    process: int
    found: str  # "--coordinator", "torchrun", "Slurm", "GKE" or "TPU metadata"
    local_devices: tuple[int, ...] | None = None  # of this host's, by number; None: all of them


class PeerLost(Exception):
    """Another process of the run does not answer any more."""


_said: Counter[str] = Counter()


@section
class Asked:
    """Where a process was told its place, on a command line."""

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None


def find(asked: Asked | None, environ: Mapping[str, str]) -> Hosts | None:
    """How the processes of this run find each other; None where there is only one."""
    if asked is None or asked == Asked():
        return None
    missing = [f"--{name}" for name, value in vars(asked).items() if value is None]
    if missing:
        raise UserError(f"{listing(missing, 'and')} is missing")
    assert asked.processes is not None and asked.process is not None
    hosts = Hosts(asked.coordinator, asked.processes, asked.process, "--coordinator")
    return hosts if hosts.processes > 1 else None


def join(hosts: Hosts) -> None:
    """Wait for the other processes; to be called before any device is touched."""
    jax.distributed.initialize(
        hosts.coordinator,
        hosts.processes,
        hosts.process,
        local_device_ids=hosts.local_devices,
        cluster_detection_method=None if hosts.coordinator is None else "deactivate",
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )


def count() -> int:
    """How many processes the run has."""
    return distributed.global_state.num_processes or 1


def index() -> int:
    """The number of this one, from 0."""
    return distributed.global_state.process_id or 0


def is_first() -> bool:
    """Whether this is the process that prints and writes small files."""
    return index() == 0


def barrier(name: str) -> None:
    """Wait until every process is here; no device has a part in it."""
    if count() > 1:
        _ask(lambda: _client().wait_at_barrier(_once(name), A_DAY))


def told(name: str, value: str | None = None) -> str:
    """What the first process says, on all of them; what the others give is not asked for."""
    if count() == 1:
        assert value is not None
        return value
    key = _once(name)
    if is_first():
        assert value is not None
        _ask(lambda: _client().key_value_set(key, value))
        return value
    return _ask(lambda: _client().blocking_key_value_get(key, A_DAY))


def found(name: str, look: Callable[[], Any]) -> Any:
    """What the first process finds when it looks, on all of them: anything that JSON can hold."""
    if count() == 1:
        return look()
    return json.loads(told(name, json.dumps(look()) if is_first() else None))


def each(name: str, value: str) -> list[str]:
    """What every process says, in their order."""
    if count() == 1:
        return [value]
    key = _once(name)
    _ask(lambda: _client().key_value_set(f"{key}/{index()}", value))
    ask = _client().blocking_key_value_get
    return [_ask(lambda one=one: ask(f"{key}/{one}", A_DAY)) for one in range(count())]


def _once(name: str) -> str:
    """A name that was not used before: the service takes each only once."""
    _said[name] += 1
    return f"windlass/{name}/{_said[name]}"


def _client():
    return distributed.global_state.client


def _ask(question):
    try:
        return question()
    except JaxRuntimeError as error:
        raise PeerLost(str(error)) from None
