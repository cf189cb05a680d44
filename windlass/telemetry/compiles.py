"""The compile watch: every compilation of a run is written down, with its cause."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from windlass.errors import UserError
from windlass.processes import hosts
from windlass.processes.exclusive import EXCLUSIVE
from windlass.processes.garbage import uncollected
from windlass.telemetry.compile_cache import Kept
from windlass.telemetry.compile_debug import CompileDebug
from windlass.telemetry.console import ConsoleReport
from windlass.telemetry.metrics import mend, read
from windlass.telemetry.phases import Phases
from windlass.telemetry.signature import Signature, key, summarize
from windlass.units import counted, duration, size

# Events of JAX's monitoring. The hit, the lowering and the compilation of a program come one
# after the other in the thread that needs it.
HIT = "/jax/compilation_cache/cache_hits"
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"
REPEATS = 3  # steps at which a small program is compiled before that is worth a warning


class Recompiled(UserError):
    """A program of ours would be compiled again, and `train.strict` is set.

    Raised before anything is compiled or run: the arguments are as they were.
    """


class Program:
    """A jitted function of ours: compiled ahead of time, once for each signature of arguments."""

    def __init__(self, function: Callable, name: str, **jit: Any):
        self.name, self.function = name, function
        self._jitted = jax.jit(function, **jit)
        self._compiled: list[tuple[Signature, jax.stages.Compiled]] = []
        self._by_key: dict[Any, jax.stages.Compiled] = {}
        self._ran: list[jax.stages.Compiled] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self.prepare(*args, **kwargs)
        if any(compiled is one for one in self._ran):
            return compiled(*args, **kwargs)
        with EXCLUSIVE:
            result = jax.block_until_ready(compiled(*args, **kwargs))
        self._ran.append(compiled)
        return result

    def prepare(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        """The program for arguments like these, which may be shapes without values."""
        signature_key = key((args, kwargs))
        compiled = self._by_key.get(signature_key)
        if compiled is None:
            compiled = self._by_key[signature_key] = self._find(args, kwargs)
        return compiled

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self._jitted.lower(*args, **kwargs)

    def _find(self, args: Sequence[Any], kwargs: dict[str, Any]) -> jax.stages.Compiled:
        new = Signature.of(self.function, args, kwargs)
        nearest: list[str] | None = None
        for old, compiled in self._compiled:
            changes = new.changes_from(old)
            if not changes:
                return compiled
            if nearest is None or len(changes) < len(nearest):
                nearest = changes
        compiled = self._compile(nearest, args, kwargs)
        self._compiled.append((new, compiled))
        return compiled

    def _compile(
        self, changes: list[str] | None, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> jax.stages.Compiled:
        if Watch.current is None:
            return self.lower(*args, **kwargs).compile()
        return Watch.current.compile(self, changes, lambda: self._jitted.trace(*args, **kwargs))


class Here(threading.local):
    """Thread-local state of the compilation that JAX is in."""

    hit = False
    lowered = 0.0
    is_ours = False


class Watch:
    """Logs every compilation of the process while it is open, and reports those of ours.

    Listeners are called by JAX in the midst of its work, in any thread; they only take note, and
    `flush` writes and warns.
    """

    current: "Watch | None" = None

    def __init__(
        self,
        report: ConsoleReport,
        *,
        strict: bool,
        cache: Kept,
        former: Sequence[Path] = (),
        phases: Phases | None = None,
        debug: CompileDebug | None = None,
    ):
        self.report, self.strict, self.cache = report, strict, cache
        self.phases, self.debug = phases or Phases(), debug or CompileDebug()
        self.step, self.has_begun = 0, False
        self.records: list[dict[str, Any]] = []
        self.seconds = 0.0  # of all compilations
        self._former: Sequence[Path] = former
        self._file: Path | None = None
        self._unwritten: list[dict[str, Any]] = []
        self._ours: set[str] = set()
        self._small: dict[str, list[list[str]]] = {}  # by function: the types of its arguments
        self._late: dict[str, set[int]] = {}  # by function: steps at which it was compiled
        self._warned: set[str] = set()
        self._here = Here()

    def __enter__(self) -> "Watch":
        jax.monitoring.register_event_listener(self._on_event)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        Watch.current = self
        return self

    def __exit__(self, *_) -> None:
        Watch.current = None
        jax.monitoring.unregister_event_listener(self._on_event)
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        self.flush()

    def open(self, path: Path, step: int) -> None:
        """Write to this file from now on, and what was noted before it was known to be right."""
        self._file, self.step = path, step
        for record in self._unwritten:
            record["step"] = step
        if hosts.is_first() and (mended := mend(path)) is not None:
            self.report.warning(mended)
        self.debug.open(path.parent)
        self.flush()

    def took(self, step: int) -> None:
        """A step is done: from here on a program that is compiled again is worth a warning."""
        self.step, self.has_begun = step, True

    def flush(self) -> None:
        """Write what was noted, and warn of small programs that are compiled again and again."""
        if self._file is None:
            return
        lines = []
        while self._unwritten:
            record = self._unwritten.pop(0)
            lines.append(json.dumps(record) + "\n")
            if record["program"] is None:
                self.debug.log(record)
        if lines and hosts.is_first():
            with open(self._file, "a", encoding="utf-8") as file:
                file.writelines(lines)
        for name, steps in list(self._late.items()):
            if len(steps) >= REPEATS and name not in self._warned:
                self._warned.add(name)
                at = ", ".join(map(str, sorted(steps)))
                cause = next(r["cause"] for r in reversed(self.records) if r["function"] == name)
                self.report.warning(f"{name} is compiled over and over, at steps {at}: {cause}")

    def summary(self) -> str:
        """Cache misses and hits in a line: programs that were compiled, and that were not."""
        compiled = [record for record in self.records if not record["cached"]]
        hits = len(self.records) - len(compiled)
        where = "not kept"
        if self.cache.folder is not None:
            where = f"{self.cache.folder}, {size(self.cache.size)}"
        if not compiled:
            return f"nothing: {counted(hits, 'program')} from the cache ({where})"
        parts = []
        for kind, is_ours in (("program", True), ("small program", False)):
            some = [r["seconds"] for r in compiled if (r["program"] is not None) == is_ours]
            if some:
                parts.append(f"{counted(len(some), kind)} in {duration(sum(some))}")
        more = f"; {counted(hits, 'program')} from the cache" if hits else ""
        return f"{', '.join(parts)}{more} ({where})"

    def last(self, program: str) -> float | None:
        """The seconds it took to compile a program the last time, in this run or one before it."""
        for path in self._former:
            try:
                records = read(path) if path.exists() else []
            except (UserError, OSError):  # somebody spoilt it, and it is no reason not to train
                continue
            for record in reversed(records):
                if record.get("program") == program and not record.get("cached"):
                    return record.get("seconds")
        return None

    def compile(
        self, program: Program, changes: list[str] | None, trace: Callable[[], jax.stages.Traced]
    ) -> jax.stages.Compiled:
        """A program of ours, for arguments that differ by `changes` from those it is known for."""
        cause, here, began = self._cause(program.name, changes), self._here, time.monotonic()
        name = f"compiling the {program.name}"
        last = self.last(program.name)
        with self.phases("compile"), self.report.phase(name, last=last) as remarks:
            with uncollected():
                traced = trace()
                lowered = traced.lower()
            here.is_ours, here.hit = True, False
            try:
                compiled = lowered.compile()
            finally:
                here.is_ours = False
            if here.hit:
                remarks.append("from the cache")
        self.note(
            program=program.name,
            function=program.function.__name__,
            seconds=round(time.monotonic() - began, 4),
            cached=here.hit,
            fingerprint=_short(lowered.as_text()),
            inputs=compiled.in_tree.num_leaves,
            outputs=compiled.out_tree.num_leaves,
            cause=cause,
        )
        here.hit, here.lowered = False, 0.0
        self.debug.log(self.records[-1])
        self.debug.dump(program.name, traced, lowered, compiled)
        self.flush()
        return compiled

    def _cause(self, program: str, changes: list[str] | None) -> str:
        cause = "first"
        if changes is not None:
            cause = summarize(changes)
        elif program in self._ours:
            cause = "another function of the same name"
        self._ours.add(program)
        if self.has_begun and cause != "first":
            again = f"the {program} is compiled again after step {self.step}: {cause}"
            if self.strict:
                raise Recompiled(
                    f"{again}. train.strict ends the run there, saved; train.strict=false goes on "
                    "with a warning, and every such compilation costs its time"
                )
            self.report.warning(again)
        return cause

    def note(self, **record: Any) -> None:
        whole = {"step": self.step, "time": round(time.time(), 3), **record}
        self.records.append(whole)
        self.seconds += record["seconds"]
        self._unwritten.append(whole)

    def _on_event(self, event: str, **_: Any) -> None:
        if event == HIT:
            self._here.hit = True

    def _on_duration(self, event: str, duration_secs: float, **about: Any) -> None:
        here = self._here
        if event == LOWERED:
            here.lowered = duration_secs
        if event != COMPILED or here.is_ours:
            return
        function = re.sub(r"^jit\((.*)\)$", r"\1", str(about.get("fun_name")))
        inputs, outputs, fingerprint = _newest(function)
        self.note(
            program=None,
            function=function,
            seconds=round(here.lowered + duration_secs, 4),
            cached=here.hit,
            fingerprint=fingerprint,
            inputs=None if inputs is None else len(inputs),
            outputs=None if outputs is None else len(outputs),
            cause=self._small_cause(function, inputs or []),
        )
        here.hit, here.lowered = False, 0.0
        if self.has_begun:
            self._late.setdefault(function, set()).add(self.step)

    def _small_cause(self, function: str, types: list[str]) -> str:
        former = self._small.setdefault(function, [])
        nearest = min((_type_changes(old, types) for old in former), key=len, default=None)
        former.append(types)
        if nearest is None:
            return "first"
        return summarize(nearest) or "another function, static argument or sharding"


def _newest(function: str) -> tuple[list[str] | None, list[str] | None, str | None]:
    """Input types, output types and fingerprint of the program that was compiled last."""
    client = jax.devices()[0].client
    live = client.live_executables() if hasattr(client, "live_executables") else []
    module = live[0].hlo_modules()[0] if live else None
    # One of another platform is not among them, and then the first is another function's.
    if module is None or _letters(module.name) != _letters(f"jit {function}"):
        return None, None, None
    # Without the lines of source it comes from, which differ once it was cached.
    text = re.sub(r"(?m)^\d+ .*\n|, metadata={[^}]*}", "", module.to_string())
    match = re.search(r"entry_computation_layout={\((.*?)\)->(.*)", text)
    assert match is not None
    inputs, outputs = match[1], match[2].partition("}, ")[0]
    return _types(inputs), _types(outputs), _short(text)


def _types(text: str) -> list[str]:
    return re.findall(r"\w+\[[\d,<=]*\]", text)


def _type_changes(old: list[str], new: list[str]) -> list[str]:
    if len(old) != len(new):
        return [f"{len(old)} arguments -> {len(new)}"]
    pairs = enumerate(zip(old, new, strict=True))
    return [f"argument {i}: {before} -> {now}" for i, (before, now) in pairs if before != now]


def _letters(text: str) -> str:
    return re.sub(r"[\W_]", "", text)


def _short(text: str) -> str:
    """Fingerprint of a program's text: the same in every compilation of it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
