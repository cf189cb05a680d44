"""The processes of a run: how they join, and what they say to each other."""

import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax._src import distributed  # JAX shows its service of keys and barriers nowhere else
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

from windlass.errors import PeerLost, UserError
from windlass.processes.clusters import Hosts

T = TypeVar("T")
HEARTBEAT_SECONDS = 30  # without a sign of life, after which a process counts as gone
JOINING_SECONDS = 300  # until all processes must be there
LEAVING_SECONDS = 60  # until all processes must have ended, once one has
HEARING_SECONDS = 5  # that process 0 goes on serving the others, when the run ends early
ANSWER_SECONDS = 2  # for which another process is waited for that may have gone meanwhile
ON_ITS_WAY_SECONDS = 0.05  # for an answer to reach a process, once what it said is known here
A_DAY = 86_400_000  # milliseconds: who waits for a download is not late, and a dead peer is noticed
STOP, HEARD = "windlass/stop", "windlass/heard"

_said: Counter[str] = Counter()
_joined: Hosts | None = None


def join(hosts: Hosts) -> None:
    """Wait for the other processes; to be called before any device is touched."""
    global _joined
    _check_port(hosts)
    found: dict[str, Any] = {}  # by JAX itself
    if hosts.coordinator is not None:
        found = dict(coordinator_address=hosts.coordinator, num_processes=hosts.processes)
        found |= dict(process_id=hosts.process, local_device_ids=hosts.local_devices)
        found |= dict(cluster_detection_method="deactivate")
    try:
        jax.distributed.initialize(
            **found,
            initialization_timeout=JOINING_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=LEAVING_SECONDS,
        )
    except JaxRuntimeError as error:
        where = hosts.coordinator or "the port that JAX chose for it (JAX_COORDINATOR_PORT)"
        what = str(error).partition("\n")[0]
        raise UserError(f"{hosts} cannot join the others at {where} ({what})") from None
    if hosts.coordinator is None and hosts.local_devices is None:
        # Under Slurm JAX leaves a process one GPU, even where it is alone on its host.
        jax.config.update("jax_cuda_visible_devices", "all")
        jax.config.update("jax_rocm_visible_devices", "all")
    _joined = hosts


def _check_port(hosts: Hosts) -> None:
    """Refuse a port that something else listens on.

    JAX may crash there without a word, or share it with another run and mix the processes of both.
    """
    if hosts.coordinator is None or hosts.process:
        return
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", int(hosts.coordinator.rpartition(":")[2])))
        except OSError as error:
            raise UserError(
                f"{hosts} cannot listen for the others at {hosts.coordinator} ({error.strerror}); "
                "another port would do, on every host"
            ) from None


def joined() -> Hosts | None:
    """The place of this process, once it has joined others."""
    return _joined


def count() -> int:
    """The number of processes (the world size)."""
    return _joined.processes if _joined else 1


def index() -> int:
    """The number of this one, from 0."""
    return _joined.process if _joined else 0


def is_first() -> bool:
    """True on process 0, which prints and writes small files."""
    return index() == 0


def barrier(name: str) -> None:
    """Wait until every process is here; no device has a part in it."""
    if count() > 1:
        _ask(lambda: _client().wait_at_barrier(_once(name), A_DAY))


def told(name: str, value: str | None = None) -> str:
    """A broadcast of text from process 0; what the others give is ignored."""
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
    """A broadcast of what process 0 finds when it looks: anything that JSON can hold."""
    if count() == 1:
        return look()
    return json.loads(told(name, json.dumps(look()) if is_first() else None))


def each(name: str, value: str) -> list[str]:
    """An all-gather of text: that of every process, in their order."""
    if count() == 1:
        return [value]
    key = _once(name)
    _ask(lambda: _client().key_value_set(f"{key}/{index()}", value))
    ask = _client().blocking_key_value_get
    return [_ask(lambda one=one: ask(f"{key}/{one}", A_DAY)) for one in range(count())]


def ask_to_stop(number: int) -> None:
    """Have every process stop after the same step, because of this signal."""
    _try(lambda: _client().key_value_set(STOP, str(number)))
    # What JAX put in the place of our handler tells its service, which decides on the step.
    os.kill(os.getpid(), signal.SIGTERM)


def stop_after(step: int) -> int | None:
    """The signal by which every process stops after this step; to be asked after every step."""
    if not multihost_utils.reached_preemption_sync_point(step):
        return None
    # Without a word of ours: a machine that is about to be taken away sent SIGTERM itself.
    return int(_try(lambda: _client().key_value_try_get(STOP)) or signal.SIGTERM)


class Ending:
    """The early end of a run, and why: set by one process, and read by all."""

    def __init__(self):
        self._key = _once("ending")

    def say(self, why: str) -> None:
        """The first to say it is heard."""
        _try(lambda: _client().key_value_set(self._key, why))

    def heard(self) -> str | None:
        """The text that some process, perhaps this one, set; waits as long as there is a run."""
        return _try(lambda: _client().blocking_key_value_get(self._key, A_DAY))


def part(code: int) -> None:
    """End this process at once, in a run that ends early: nobody is waited for in vain."""
    heard = threading.Thread(target=_try, args=[_hears], daemon=True)
    heard.start()
    heard.join(ANSWER_SECONDS)  # who is gone never answers, and JAX would end this process
    deadline = time.monotonic() + HEARING_SECONDS
    for one in range(1, count()) if is_first() else ():
        # The others speak through this process, and end in an abort when it is gone.
        left = int(1000 * max(0.001, deadline - time.monotonic()))
        _try(lambda one=one, left=left: _client().blocking_key_value_get(f"{HEARD}/{one}", left))
        time.sleep(ON_ITS_WAY_SECONDS)
    os._exit(code)


def _hears() -> None:
    _client().key_value_set(f"{HEARD}/{index()}", "")


def is_everybody_here(name: str, seconds: float) -> bool:
    """A barrier with a timeout: True when every process arrives within so many seconds."""
    where = _once(name)
    try:
        _client().wait_at_barrier(where, int(1000 * seconds))
    except JaxRuntimeError:
        return False
    return True


def _once(name: str) -> str:
    """A name that was not used before: the service takes each only once."""
    _said[name] += 1
    return f"windlass/{name}/{_said[name]}"


def _client() -> Any:
    return distributed.global_state.client


def _ask(question: Callable[[], T]) -> T:
    try:
        return question()
    except JaxRuntimeError as error:
        raise PeerLost(str(error)) from None


def _try(question: Callable[[], T]) -> T | None:
    try:
        return question()
    except JaxRuntimeError:  # there is nothing of that name, or nobody to ask any more
        return None
