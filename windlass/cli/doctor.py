"""The command that looks at a machine: what is here, what is wrong, what to do."""

import json
import os
import sys
import time
from typing import Annotated, Any

import typer
from rich.text import Text

from windlass.cli.options import OptionalRecipe, options, say, waiting
from windlass.config import section
from windlass.devices import versions
from windlass.errors import UserError
from windlass.units import duration

MARKS = {"well": ("✓", "green"), "wrong": ("✗", "bold red"), "absent": ("·", "dim")}
PLAIN = {"well": "ok", "wrong": "NO", "absent": "--"}  # where the locale has no ticks
WIDTH = 15
# Most of a smoke test is compiling: code that is optimised less is compiled in half the time.
QUICK = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")


def doctor(
    ctx: typer.Context,
    recipe: OptionalRecipe = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="train a reduced model: of RECIPE, or of quickstart")
    ] = False,
    expect: Annotated[
        str | None, typer.Option(metavar="N", help="number of devices that must be here")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="measure reading from this folder, file or gs:// URL"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """Check this machine: what is here, what is wrong, what to do.

    Versions of JAX, jaxlib, libtpu and the CUDA plugin and whether they agree; devices; memory;
    disk; compile cache; credentials, of which only their presence is shown; the hub; and how fast
    data is read. ✓ is well, ✗ is wrong, with what to do, and · is absent and may be needed. Exits
    with 1 if anything is wrong, for scripts.

    --smoke also trains a reduced model for a few steps, in less than a minute on a CPU, and checks
    device, data, loop, gradient sync (on two simulated devices where there is one), checkpoint
    and resume. Nothing of it is kept.

    windlass doctor
    windlass doctor --expect 8
    windlass doctor --smoke
    windlass doctor --smoke mine.yaml device=cpu
    windlass doctor --data gs://mine/rows --json
    """
    wanted = options(DoctorOptions, expect=expect)
    if (recipe is not None or ctx.args) and not smoke:
        given = recipe or ctx.args[0]
        raise UserError(f"{given} is for a smoke test; windlass doctor --smoke {given} makes one")
    if smoke:
        _compile_quickly()
    began, shown = time.monotonic(), _Shown(as_json)
    with ctx.obj.phase("looking at this machine"), waiting("looking at this machine"):
        try:
            from windlass.api import doctor as call
        except (ImportError, RuntimeError) as error:
            if (advice := versions.refusal(error)) is None:
                raise
            shown.refused(advice)
            return 1
        checks = call(
            expect=wanted.expect,
            data=data,
            smoke=(recipe or True) if smoke else False,
            overrides=ctx.args,
            say=shown,
            signals=ctx.obj,
        )
    is_well = all(check.is_well for check in checks)
    shown.end(is_well, time.monotonic() - began)
    return 0 if is_well else 1


@section
class DoctorOptions:
    """The options of `doctor`."""

    expect: int | None

    def __post_init__(self):
        if self.expect is not None and self.expect < 1:
            raise ValueError(f"expect is {self.expect}; it must be 1 or more")


class _Shown:
    """Checks as they are printed: a line each when it is done, or JSON at the end."""

    def __init__(self, as_json: bool):
        self.as_json = as_json
        self.checks: list[Any] = []
        encoding = getattr(sys.stdout, "encoding", None) or "ascii"
        try:
            "".join(mark for mark, _ in MARKS.values()).encode(encoding)
            self.marks = MARKS
        except UnicodeEncodeError:
            self.marks = {state: (PLAIN[state], style) for state, (_, style) in MARKS.items()}

    def __call__(self, check: Any) -> None:
        self.checks.append(check._asdict())
        if not self.as_json:
            self._line(*check)

    def refused(self, advice: str) -> None:
        """Print that JAX itself cannot be imported, so that nothing else can be looked at."""
        found, _, how = advice.partition("; ")
        self.checks.append(
            {"name": "versions", "state": "wrong", "found": found, "advice": how},
        )
        if self.as_json:
            self.end(False, 0.0)
        else:
            self._line("versions", "wrong", found, how)

    def end(self, is_well: bool, seconds: float) -> None:
        if self.as_json:
            whole = {"well": is_well, "seconds": round(seconds, 1), "checks": self.checks}
            print(json.dumps(whole, indent=2))
            return
        wrong = sum(check["state"] == "wrong" for check in self.checks)
        said = "all is well" if is_well else f"{wrong} of {len(self.checks)} checks failed"
        say(Text(f"{said}, in {duration(seconds)}", "" if is_well else "red"))

    def _line(self, name: str, state: str, found: str, advice: str | None) -> None:
        mark, style = self.marks[state]
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")  # over the line that says what goes on
        say(Text.assemble((mark, style), " ", (f"{name:<{WIDTH}}", "bold"), found))
        if advice is not None:
            indent = " " * (len(mark) + 1 + WIDTH)
            say(Text(f"{indent}{advice}", "dim" if state == "absent" else ""))


def _compile_quickly() -> None:
    """Set XLA's flags, before anything starts a device, unless the user has."""
    flags = os.environ.get("XLA_FLAGS", "")
    wanted: list[str] = [*QUICK]
    if (versions.installed("jaxlib") or "").startswith("0.10."):  # later ones refuse to start
        wanted.append("--xla_cpu_use_fusion_emitters=false")
    own = [flag for flag in wanted if flag.partition("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *own])
