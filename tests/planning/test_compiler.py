"""A step compiled for devices that need not be here."""

import math
from importlib.util import find_spec

import jax
import pytest

from tests.trained import recipe
from windlass.errors import UserError
from windlass.planning import compiler
from windlass.training.built import Built, describe
from windlass.training.programs import Programs


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


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="the compiler for TPUs is here")
def test_where_there_is_no_compiler_for_tpus_it_is_said_how_to_get_it():
    with pytest.raises(UserError) as refusal:
        compiler.topology("v5e:2x4")
    assert str(refusal.value) == (
        "libtpu is missing, the compiler for TPUs; on an x86-64 host "
        "`pip install 'windlass[tpu]'` has it, and no TPU is needed"
    )
