"""Compile debugging: the option, and the variables of other systems that are parts of it."""

import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from tests.flags import quick
from tests.training.campaign import RECIPE
from windlass.processes.signals import Signals
from windlass.telemetry.compile_debug import FOLDER, VARIABLES, requested
from windlass.telemetry.console import ConsoleReport
from windlass.training.train import train

KEYS = ["run.dir=run", "data.validation=0", "train.evaluate_every=null", "train.accumulation=null"]
KEYS += ["checkpoint.every=1000", "train.steps=5"]
BATCH = ", ".join(
    f"{name} {dtype} (8, 64)"
    for name, dtype in (
        *(("tokens", "int32"), ("targets", "int32"), ("weight", "float32")),
        *(("position", "int32"), ("document", "int32")),
    )
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def trained(*keys: str, debug_compile: bool = False) -> list[str]:
    """Lines that a run printed."""
    console = Console(record=True, width=1000, file=StringIO())
    with ConsoleReport(console) as report:
        how = {"signals": Signals(), "report": report, "debug_compile": debug_compile}
        train(RECIPE, [*KEYS, *keys], **how)
    return console.export_text().splitlines()


def notes(lines: list[str]) -> list[str]:
    return [line for line in lines if "--debug-compile" in line]


def compilations(lines: list[str]) -> list[str]:
    """Programs whose compilation was logged, but small ones."""
    found = [
        re.match(r"compiled (init|step) in .*; cause: .*; fingerprint \w+; ", x) for x in lines
    ]
    return [line[1] for line in found if line]


def written() -> set[str]:
    return {path.name for path in Path("run", FOLDER).glob("*")}


def test_a_run_without_any_is_left_as_it_is():
    lines = trained()
    assert (notes(lines), compilations(lines), written()) == ([], [], set())
    assert not [line for line in lines if "dispatched" in line]


@pytest.mark.long
def test_pt_xla_debug_logs_compilations_and_times_the_first_steps(monkeypatch):
    monkeypatch.setenv("PT_XLA_DEBUG", "1")
    lines = trained()
    assert notes(lines) == [
        "PT_XLA_DEBUG is 1: a part of --debug-compile, which logs each compilation and times the "
        "first 3 steps"
    ]
    assert compilations(lines) == ["init", "step"] and written() == set()
    timed = [line for line in lines if re.match(r"step \d: ", line)]
    assert [re.sub(r"after .*", "after", line) for line in timed] == [
        text
        for step in (1, 2, 3)
        for text in (
            f"step {step}: batch of {BATCH}",
            f"step {step}: dispatched after",
            f"step {step}: finished after",
        )
    ]


@pytest.mark.long
def test_xla_hlo_debug_writes_programs_as_the_compiler_has_them(monkeypatch):
    monkeypatch.setenv("XLA_HLO_DEBUG", "1")
    lines = trained()
    assert notes(lines) == [
        "XLA_HLO_DEBUG is 1: a part of --debug-compile, which writes each program as StableHLO "
        "and optimized HLO to debug_compile/"
    ]
    programs = ("001-init", "002-step")
    assert written() == {f"{x}.{form}" for x in programs for form in ("stablehlo.mlir", "hlo.txt")}
    assert "stablehlo.dot_general" in Path("run", FOLDER, "002-step.stablehlo.mlir").read_text()
    assert Path("run", FOLDER, "002-step.hlo.txt").read_text().startswith("HloModule jit_step")
    assert compilations(lines) == []


@pytest.mark.long
def test_xla_ir_debug_writes_jaxprs_and_a_later_start_writes_its_own(monkeypatch):
    monkeypatch.setenv("XLA_IR_DEBUG", "true")
    assert notes(trained("train.steps=2")) == [
        "XLA_IR_DEBUG is true: a part of --debug-compile, which writes each program as a jaxpr to "
        "debug_compile/"
    ]
    assert written() == {"001-init.jaxpr.txt", "002-step.jaxpr.txt"}
    assert "dot_general" in Path("run", FOLDER, "002-step.jaxpr.txt").read_text()
    trained("train.steps=3")
    assert written() == {"001-init.jaxpr.txt", "002-step.jaxpr.txt", "003-step.jaxpr.txt"}


def program(*words: str, **environ: str) -> subprocess.CompletedProcess:
    """The command in a process of its own: JAX's runtime reads its level once."""
    Path("tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    ours = {"PYTHONPATH": str(Path(__file__).parents[2]), "XLA_FLAGS": quick()} | environ
    command = [sys.executable, "-m", "windlass", "train", "tiny.yaml", *KEYS, *words]
    done = subprocess.run(command, env=os.environ | ours, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


RUNTIME, COMPILING = r"(?m)^I\d{4} .*pjrt_client.cc", r"Compiling jit\(step\) with global shapes"


@pytest.mark.long
def test_tf_cpp_min_log_level_shows_the_logs_of_the_runtime_and_of_jax():
    quiet = program("train.steps=1", TF_CPP_MIN_LOG_LEVEL="1")
    assert notes(quiet.stdout.splitlines()) == [] and not re.search(RUNTIME, quiet.stderr)
    verbose = program("train.steps=2", TF_CPP_MIN_LOG_LEVEL="0")
    assert notes(verbose.stdout.splitlines()) == [
        "TF_CPP_MIN_LOG_LEVEL is 0: a part of --debug-compile, which shows the log of XLA's "
        "runtime and of JAX's compilations"
    ]
    assert re.search(RUNTIME, verbose.stderr) and re.search(COMPILING, verbose.stderr)


def test_debug_compile_is_all_of_them():
    done = program("--debug-compile")
    lines = done.stdout.splitlines()
    assert notes(lines) == [] and compilations(lines) == ["init", "step"]
    assert len([line for line in lines if ": dispatched after " in line]) == 3
    assert len(written()) == 6
    assert re.search(RUNTIME, done.stderr) and re.search(COMPILING, done.stderr)


def test_a_variable_that_turns_itself_off_requests_nothing():
    off = dict.fromkeys(VARIABLES, "0") | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    assert requested(False, off) == (set(), [])
    assert requested(False, dict.fromkeys(VARIABLES, "")) == (set(), [])
