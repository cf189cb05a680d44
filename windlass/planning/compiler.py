"""The step of a run, compiled for devices that need not be here."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import NamedTuple

import jax

from windlass.config import AnyRecipe
from windlass.devices.selection import Chosen
from windlass.errors import UserError
from windlass.telemetry.kept import setting
from windlass.training import origin
from windlass.training.built import Built, Described, read_for
from windlass.training.programs import Programs

STEPS = 1000  # of the run; no schedule makes another program than a longer one does


class Compiled(NamedTuple):
    """A compiled step, and what it took."""

    program: jax.stages.Compiled
    seconds: float  # to trace and compile

    @property
    def peak_bytes(self) -> int:
        """On each device at most: what goes in, what comes out, and what is needed between."""
        memory = self.program.memory_analysis()
        assert memory is not None
        # What comes out in the place of what went in is there once.
        ends = memory.argument_size_in_bytes + memory.output_size_in_bytes
        return ends - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def topology(name: str, slices: int = 1) -> list:
    """The devices of a TPU slice, such as `v5e:2x4`, as its compiler knows them."""
    from jax.experimental import topologies

    if find_spec("libtpu") is None:
        raise UserError(
            "libtpu is missing, the compiler for TPUs; on an x86-64 host "
            "`pip install 'windlass[tpu]'` has it, and no TPU is needed"
        )
    # A chip alone on its host, where the compiler would look for four.
    alone = {"chips_per_host_bounds": (1, 1, 1)} if name.endswith(":1x1") else {}
    several = {"num_slices": slices} if slices > 1 else {}
    return list(topologies.get_topology_desc(name, "tpu", **alone, **several).devices)


def described(recipe: AnyRecipe, devices: list, overrides: Sequence[str] = ()) -> Described:
    """A recipe read for the devices of a TPU slice."""
    chosen = Chosen("tpu", len(devices), "tpu", [], [])
    return read_for(origin.load(recipe, overrides), chosen, devices)


def compiled(described: Described) -> Compiled:
    """The step that a described run takes, from shapes alone: no weight is made, no data read."""
    with described.scope():
        programs = Programs(Built(described), STEPS)
        began = time.monotonic()
        shapes = (*programs.abstract_state(), programs.abstract_batch())
        with _unkept():
            program = programs.step().lower(*shapes).compile()
        return Compiled(program, time.monotonic() - began)


@contextmanager
def _unkept() -> Iterator[None]:
    """Without JAX's cache, which keeps programs for absent devices and cannot read them back."""
    before = setting("jax_enable_compilation_cache")
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
