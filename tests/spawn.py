"""Several real processes of `windlass train` on one machine, as hosts of a run."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.flags import with_devices
from tests.training.campaign import Ended

REPOSITORY = Path(__file__).parents[1]
LONGEST = 60.0  # seconds in which a process that is left alone must say so and end


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Processes:
    """The processes of one run, each with simulated devices of its own."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        processes: int = 2,
        devices: int = 4,
        each: Mapping[int, Sequence[str]] | None = None,
        environ: Mapping[str, str] | None = None,
        environ_of: Mapping[int, Mapping[str, str]] | None = None,  # of one process alone
        command: str = "train",
    ):
        self.started: list[subprocess.Popen] = []
        self.logs = [folder / f"output-{i}-{os.urandom(4).hex()}.txt" for i in range(processes)]
        place = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(processes)]
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        environ = {"PYTHONPATH": path, "XLA_FLAGS": with_devices(devices), **(environ or {})}
        for i, log in enumerate(self.logs):
            own = [*words, *(each or {}).get(i, ()), *place, "--process", str(i)]
            with log.open("wb") as output:
                self.started.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "windlass", command, *own],
                        cwd=folder,
                        env=os.environ
                        | {"JAX_PLATFORMS": "cpu", **environ, **(environ_of or {}).get(i, {})},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    def lose(self, process: int) -> None:
        """End a process and its child with kill -9, as when its machine is gone."""
        child = self.trainer(process)
        os.kill(child, signal.SIGSTOP)  # or it may tell the others that its parent was killed
        self.started[process].kill()
        os.kill(child, signal.SIGKILL)
        self.started[process].wait()

    def until(self, text: str) -> None:
        """Wait until the first process has said this."""
        while text not in self.output(0):
            assert all(one.poll() is None for one in self.started), self.output(0)
            time.sleep(0.002)

    def output(self, process: int) -> str:
        """What a process has said so far."""
        return self.logs[process].read_text(encoding="utf-8")

    def wait(self, process: int, seconds: float) -> Ended:
        """How a process ended, which it must do in so many seconds."""
        code = self.started[process].wait(seconds)
        return Ended(code, self.output(process))

    def finish(self, seconds: float = 300.0) -> list[Ended]:
        """How every process ended."""
        return [self.wait(i, seconds) for i in range(len(self.started))]

    def trainer(self, process: int) -> int:
        """The number, for the system, of the child in which a process trains."""
        parent = self.started[process].pid
        return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])

    def kill(self) -> None:
        """End what still runs."""
        for one in self.started:
            if one.poll() is None:
                one.kill()
            one.wait()


@contextmanager
def processes(folder: Path, words: Sequence[str], *args, **kwargs) -> Iterator[Processes]:
    """Processes of a run that do not outlive the test."""
    folder.mkdir(parents=True, exist_ok=True)
    running = Processes(folder, words, *args, **kwargs)
    try:
        yield running
    finally:
        running.kill()
