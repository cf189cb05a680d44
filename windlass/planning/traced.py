"""Jaxpr of a run's step on devices that need not be here, traced and never run."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from windlass.analysis import cost_model
from windlass.analysis.work import Work
from windlass.config import AnyRecipe, Layers
from windlass.devices.selection import DeviceChoice
from windlass.devices.sketch import sketched
from windlass.planning.targets import Target
from windlass.program.built import Built
from windlass.program.described import Described, read_for
from windlass.program.programs import Programs
from windlass.program.step import Frozen, State
from windlass.run.batches import Batches
from windlass.starting import origin

STEPS = 1000  # of the run; no schedule makes another program than a longer one does
# A function of arrays and its arguments, as shapes, for the programs of a run.
MakeCall = Callable[[Programs], tuple[Callable, Sequence[Any]]]


class Traced(NamedTuple):
    """A run laid out on a target, and the program of its step.

    Every array of the jaxpr has its sharding, from which the per-device program follows.
    """

    target: Target
    described: Described
    state: State  # shapes
    frozen: Frozen
    batch: dict[str, jax.ShapeDtypeStruct]
    program: Jaxpr

    @property
    def split(self) -> dict[str, int]:
        return dict(self.described.mesh.shape)

    @property
    def work(self) -> Work:
        """Cost model of the step: FLOPs, memory traffic and collectives per device."""
        vocab = getattr(self.described.run.model, "vocab", None)
        fuses_epilogues = self.target.chip.kind == "tpu"
        return cost_model.read(
            self.program, self.split, vocab=vocab, fuses_epilogues=fuses_epilogues
        )

    @property
    def batches(self) -> Batches:
        return self.described.batches


def described(recipe: AnyRecipe, target: Target, overrides: Sequence[str] = ()) -> Described:
    """A recipe read for a target that need not be here."""
    return laid_out(origin.load(recipe, overrides), target)


def laid_out(layers: Layers, target: Target) -> Described:
    """The same for a recipe that is loaded."""
    chosen = DeviceChoice(target.chip.kind, target.devices, target.chip.kind, [], [])
    return read_for(layers, chosen, target.absent)


def trace(described: Described, target: Target, make: MakeCall | None = None) -> Traced:
    """Trace the step of a described run, in a few tenths of a second; nothing is compiled.

    Or the call that `make` has in its place, of the same model on the same devices.
    """
    with described.scope(), sketched(kernels=True):
        programs = Programs(Built(described), STEPS)
        state, frozen, batch = programs.abstract_call()
        step = (programs.step().function, (state, frozen, batch))
        function, arguments = step if make is None else make(programs)
        whole = jax.make_jaxpr(function)(*arguments).jaxpr
        # Dead code elimination, as by a compiler.
        program, _ = dce_jaxpr(whole, [True] * len(whole.outvars), instantiate=True)
    return Traced(target, described, state, frozen, batch, program)


def trace_stage(described: Described, target: Target, number: int) -> Traced:
    """Trace the step of a stage of a run, of which there are several."""

    def make(programs: Programs) -> tuple[Callable, Sequence[Any]]:
        return programs.step(number).function, programs.abstract_call()

    return trace(described, target, make)
