"""A step compiled for devices that need not be here."""

import dataclasses
import json
import math
import os
import platform
from importlib.util import find_spec

import jax
import pytest

from tests.trained import recipe
from windlass.errors import UserError
from windlass.planning import compiler, prices, targets, traced
from windlass.planning.plan import PlanRequest, planned
from windlass.program.built import Built
from windlass.program.programs import Programs
from windlass.starting import origin
from windlass.starting.describe import describe


def test_the_peak_of_a_step_is_its_pieces_of_the_state_once_its_rows_and_what_it_needs_between():
    described = describe(recipe(device={"kind": "cpu", "count": 2}, mesh={"fsdp": 2}))
    compiled = compiler.compiled(described)
    with described.scope():
        programs = Programs(Built(described), compiler.STEPS)
        shapes = jax.tree.leaves((programs.abstract_state(), programs.abstract_batch()))
    pieces = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in shapes]
    memory = compiled.program.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes > 0
    figures = compiled.peak_bytes - sum(pieces) - memory.temp_size_in_bytes
    assert 0 < figures < 512  # the step's metrics alone come out in a new place


def test_a_compiler_that_is_here_is_asked_once_and_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path))
    layers, here = origin.load(recipe(train={"batch": 4}), []), targets.find("cpu")
    found = compiler.find(layers, here)
    assert isinstance(found, compiler.CompilerReport) and found.fits
    described = describe(recipe(train={"batch": 4}))
    assert found.peak_bytes == compiler.compiled(described).peak_bytes
    assert found.compiler == f"JAX {jax.__version__}, for cpu"
    run = described.run
    tokens = 4 * run.data.length
    head = 3 * 2 * tokens * run.model.vocab * run.model.embed
    assert found.flops is not None and found.flops > head  # and the layers
    assert compiler.find(layers, here) == found  # with the seconds that it took
    (kept,) = (tmp_path / "plans").iterdir()
    assert compiler.key(layers, here) == kept.stem
    kept.write_text('{"compiler": ')
    again = compiler.find(layers, here)
    assert isinstance(again, compiler.CompilerReport) and again.peak_bytes == found.peak_bytes
    assert json.loads(kept.read_text())["peak_bytes"] == found.peak_bytes


@pytest.mark.long
def test_a_step_is_compiled_with_the_microbatches_that_were_chosen_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path))
    chosen = origin.load(recipe(), ["train.batch=4", "train.microbatch=auto"])
    said = origin.load(recipe(), ["train.batch=4", "train.accumulation=4"])
    here = targets.find("cpu")
    small = here._replace(chip=dataclasses.replace(here.chip, memory_bytes=2**20))
    asked = PlanRequest(compiles=True)
    plan = planned(traced.laid_out(chosen, small), small, prices.load(), asked)
    assert plan.settings["accumulation"] == 4 and plan.compiled is not None
    report = compiler.find(said, here)
    assert isinstance(report, compiler.CompilerReport)
    assert plan.compiled.report.peak_bytes == report.peak_bytes


def test_a_lock_of_libtpu_is_one_clear_message():
    locked = 'ABORTED: Internal error when accessing libtpu multi-process lockfile. Run "$ sudo...'
    assert compiler._why_not("v5e:2x4", locked) == (
        "libtpu is in use, which one process at a time may load where there is a TPU; if none "
        "does, one that was killed has left /tmp/libtpu_lockfile, which may be deleted then"
    )
    assert compiler._why_not("v9:2x4", "INVALID_ARGUMENT: v9\nmore") == (
        "libtpu does not compile for v9:2x4: INVALID_ARGUMENT: v9"
    )


@pytest.mark.skipif(find_spec("libtpu") is None, reason="the compiler for TPUs is not here")
def test_a_chip_of_v4_is_one_device_and_several_processes_compile_at_once(monkeypatch):
    monkeypatch.delenv("ALLOW_MULTIPLE_LIBTPU_LOAD", raising=False)
    assert len(compiler.topology("v4:2x2x1")) == targets.find("v4-8").devices == 4
    assert os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"


@pytest.mark.skipif(
    any(map(find_spec, ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin"))),
    reason="a compiler for TPUs or GPUs is here",
)
@pytest.mark.parametrize(
    ("on", "why"),
    [
        ("v5e-8", "libtpu is missing, the compiler for TPUs{}"),
        (
            "h100",
            "no H100 is here, and JAX's plugin for CUDA is missing, which cross-compiles for "
            "one; `pip install 'windlass-lm[cuda]'` has it",
        ),
    ],
)
def test_where_there_is_no_compiler_for_a_target_it_is_said_in_a_line(on, why):
    here = platform.machine()
    no_wheel = "" if here == "x86_64" else f", and has no wheel for {here}"
    found = compiler.find(origin.load(recipe(), []), targets.find(on))
    assert found == compiler.NoCompiler(why.format(no_wheel))


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="the compiler for TPUs is here")
def test_where_there_is_no_compiler_for_tpus_it_is_said_how_to_get_it():
    with pytest.raises(UserError) as refusal:
        compiler.topology("v5e:2x4")
    assert str(refusal.value) == (
        "libtpu is missing, the compiler for TPUs; on an x86-64 host "
        "`pip install 'windlass-lm[tpu]'` has it, and no TPU is needed"
    )
