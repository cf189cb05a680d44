"""The profiler: a trace of some steps for XProf and Perfetto, and a table of their operations."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from windlass import files
from windlass.analysis import profile
from windlass.processes import hosts
from windlass.telemetry import Profile
from windlass.telemetry.console import ConsoleReport
from windlass.telemetry.metrics import Meter
from windlass.units import seconds

TABLE = "operations.txt"  # beside the trace


class Profiler:
    """Profiler of a run, which traces the steps that its recipe names, in the first process."""

    def __init__(self, section: Profile, folder: Path, peak: float | None, report: ConsoleReport):
        self._steps = section.steps if hosts.is_first() else None
        self._folder, self._peak, self._report = folder, peak, report
        self._program: jax.stages.Compiled | None = None  # that is being traced
        self._taken = 0

    def begin(self, first: int) -> None:
        """Note that a start resumes behind the steps, where it does."""
        if self._steps is not None and first >= self._steps[0]:
            self._report.note(
                f"profile.steps is {[*self._steps]}, and this start begins after step {first}: "
                "nothing is profiled"
            )
            self._steps = None

    @contextmanager
    def step(
        self, done: int, program: jax.stages.Compiled, state: Any, meter: Meter
    ) -> Iterator[None]:
        """A step of a program on a state, which is in the trace where its number is."""
        if self._steps is not None and done == self._steps[0]:
            jax.block_until_ready(state)  # or the steps before would be in the trace, too
            with meter.paused():
                self._start(program)
        if self._program is None:
            yield
            return
        with jax.profiler.StepTraceAnnotation("train", step_num=done):
            yield
        self._taken += 1

    def _start(self, program: jax.stages.Compiled) -> None:
        try:
            jax.profiler.start_trace(self._folder)
            self._program = program
        except RuntimeError as error:  # of a process that is being profiled already
            self._report.warning(f"nothing is profiled: {error}")

    def after(self, done: int, result: Any, meter: Meter) -> None:
        """The end of a step, which is that of the trace, too, after the last."""
        if self._program is not None and self._steps is not None and done == self._steps[1]:
            with meter.paused():
                jax.block_until_ready(result)
                self.close()

    def close(self) -> None:
        """End the trace, where there is one, and report what is in it."""
        if self._program is None or self._steps is None:
            return
        program, self._program = self._program, None
        jax.profiler.stop_trace()
        # The folder of a trace is the time of its end.
        trace = max(self._folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda x: x.parent.name)
        found = profile.read(trace, program.as_text() or "", self._taken)
        lines = [*self._lines(found, trace.parent)]
        files.write(trace.parent / TABLE, "\n".join(lines) + "\n")
        for line in lines:
            self._report.note(line)
        self._steps = None

    def _lines(self, found: profile.StepProfile, folder: Path) -> Iterator[str]:
        assert self._steps is not None
        first, last = self._steps[0], self._steps[0] + self._taken - 1
        yield f"profile of steps {first} to {last} in {folder}"
        if not found.operations:
            yield "the trace has no operation of the step"
            return
        shares = ", ".join(f"{part} {share:.0%}" for part, share in found.by_part.items())
        yield f"operations take {seconds(found.seconds)} per step: {shares}"
        if [*found.by_part] == [profile.OTHER]:
            yield (
                "the step was compiled without the names of parts, by another version, and comes "
                "from the cache: JAX_ENABLE_COMPILATION_CACHE=false compiles it anew"
            )
        yield from profile.table(found, self._peak)
