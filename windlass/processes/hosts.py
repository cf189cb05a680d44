"""Process group of a run: joining, barriers, broadcast and all-gather of text."""

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
from jax._src import distributed  # JAX shows its service of keys and barriers nowhere else
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

from windlass.errors import PeerLost, UserError
from windlass.processes import rendezvous
from windlass.processes.clusters import Hosts
from windlass.processes.signals import say

T = TypeVar("T")
HEARTBEAT_SECONDS = 30  # without a sign of life, after which a process counts as gone
WAITING = "waiting for the other processes"
PATIENCE_SECONDS = 10.0  # of waiting for them, before that is printed
JOINING_SECONDS = 300  # until all processes must be there
LEAVING_SECONDS = 60  # until all processes must have ended, once one has
HEARING_SECONDS = 5  # that process 0 goes on serving the others, when the run ends early
ANSWER_SECONDS = 2  # for which another process is waited for that may have gone meanwhile
ON_ITS_WAY_SECONDS = 0.05  # for an answer to reach a process, once its acknowledgement is here
A_DAY = 86_400_000  # milliseconds: who waits for a download is not late, and a dead peer is noticed
STOP, ACK = "windlass/stop", "windlass/heard"

_uses: Counter[str] = Counter()
_joined: Hosts | None = None


def join(hosts: Hosts, say: Callable[[str], None] = say) -> None:
    """Wait for the other processes; to be called before any device is touched.

    Where JAX itself finds the coordinator, it alone knows who is missing, and does not tell.
    """
    global _joined
    arguments: dict[str, Any] = {}  # by JAX itself
    if hosts.coordinator is not None:
        rendezvous.meet(hosts, say, seconds=JOINING_SECONDS)
        arguments = dict(coordinator_address=hosts.coordinator, num_processes=hosts.processes)
        arguments |= dict(process_id=hosts.process, local_device_ids=hosts.local_devices)
        arguments |= dict(cluster_detection_method="deactivate")
    try:
        with _print_after(PATIENCE_SECONDS, WAITING, say):
            jax.distributed.initialize(
                **arguments,
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


@contextmanager
def _print_after(seconds: float, text: str, say: Callable[[str], None]) -> Iterator[None]:
    """Print a line, should this block take longer than `seconds`."""
    timer = threading.Timer(seconds, say, [text])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def joined() -> Hosts | None:
    """Rank and world size of this process, once it has joined others."""
    return _joined


def count() -> int:
    """The number of processes (the world size)."""
    return _joined.processes if _joined else 1


def index() -> int:
    """The rank of this process, from 0."""
    return _joined.process if _joined else 0


def is_first() -> bool:
    """True on process 0, which prints and writes small files."""
    return index() == 0


def barrier(name: str) -> None:
    """Barrier: wait until every process is here, without a collective on devices."""
    if count() > 1:
        _call(lambda: _client().wait_at_barrier(_once(name), A_DAY))


def broadcast_text(name: str, value: str | None = None) -> str:
    """A broadcast of text from process 0; what the others give is ignored."""
    if count() == 1:
        assert value is not None
        return value
    key = _once(name)
    if is_first():
        assert value is not None
        _call(lambda: _client().key_value_set(key, value))
        return value
    return _call(lambda: _client().blocking_key_value_get(key, A_DAY))


def broadcast(name: str, look: Callable[[], Any]) -> Any:
    """A broadcast of what `look` returns on process 0: anything that JSON can hold."""
    if count() == 1:
        return look()
    return json.loads(broadcast_text(name, json.dumps(look()) if is_first() else None))


def each(name: str, value: str) -> list[str]:
    """An all-gather of text: that of every process, in their order."""
    if count() == 1:
        return [value]
    key = _once(name)
    _call(lambda: _client().key_value_set(f"{key}/{index()}", value))
    get = _client().blocking_key_value_get
    return [_call(lambda one=one: get(f"{key}/{one}", A_DAY)) for one in range(count())]


def ask_to_stop(number: int) -> None:
    """Have every process stop after the same step, because of this signal."""
    _try(lambda: _client().key_value_set(STOP, str(number)))
    # JAX's handler, in the place of ours, notifies its service, which decides on the step.
    os.kill(os.getpid(), signal.SIGTERM)


def stop_after(step: int) -> int | None:
    """The signal by which every process stops after this step; to be called after every step."""
    if not multihost_utils.reached_preemption_sync_point(step):
        return None
    # Without a word of ours: a machine that is about to be taken away sent SIGTERM itself.
    return int(_try(lambda: _client().key_value_try_get(STOP)) or signal.SIGTERM)


class Ending:
    """The early end of a run, and why: set by one process, and read by all."""

    def __init__(self):
        self._key = _once("ending")

    def set(self, why: str) -> None:
        """Set the reason; the first process to set one wins."""
        _try(lambda: _client().key_value_set(self._key, why))

    def wait(self) -> str | None:
        """The text that some process, perhaps this one, set; waits as long as there is a run."""
        return _try(lambda: _client().blocking_key_value_get(self._key, A_DAY))


def part(code: int) -> None:
    """End this process at once, in a run that ends early: nobody is waited for in vain."""
    reply = threading.Thread(target=_try, args=[_acknowledge], daemon=True)
    reply.start()
    reply.join(ANSWER_SECONDS)  # who is gone never answers, and JAX would end this process
    deadline = time.monotonic() + HEARING_SECONDS
    for one in range(1, count()) if is_first() else ():
        # The others communicate through this process, and abort when it is gone.
        left = int(1000 * max(0.001, deadline - time.monotonic()))
        _try(lambda one=one, left=left: _client().blocking_key_value_get(f"{ACK}/{one}", left))
        time.sleep(ON_ITS_WAY_SECONDS)
    os._exit(code)


def _acknowledge() -> None:
    _client().key_value_set(f"{ACK}/{index()}", "")


def is_everybody_here(name: str, seconds: float) -> bool:
    """A barrier with a timeout: True when every process arrives within `seconds`."""
    where = _once(name)
    try:
        _client().wait_at_barrier(where, int(1000 * seconds))
    except JaxRuntimeError:
        return False
    return True


def _once(name: str) -> str:
    """A unique key: JAX's key-value service takes each only once."""
    _uses[name] += 1
    return f"windlass/{name}/{_uses[name]}"


def _client() -> Any:
    return distributed.global_state.client


def _call(request: Callable[[], T]) -> T:
    try:
        return request()
    except JaxRuntimeError as error:
        raise PeerLost(str(error)) from None


def _try(request: Callable[[], T]) -> T | None:
    try:
        return request()
    except JaxRuntimeError:  # there is nothing of that name, or no service any more
        return None
