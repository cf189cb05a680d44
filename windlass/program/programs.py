"""The programs of a run: init, step and finish, and the abstract state and batch they take."""

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from windlass.checkpoint.fingerprint import named
from windlass.columns import DocumentsInRows
from windlass.devices.axes import layout
from windlass.devices.sketch import on_one_gpu
from windlass.layers.stack import by_layer
from windlass.objectives import BaseObjective, Carry, Stage
from windlass.program import trainable
from windlass.program.built import Built, InitialArrays
from windlass.program.step import (
    Batch,
    Frozen,
    State,
    TrainingCall,
    make_step,
    make_training_call,
    start,
)
from windlass.telemetry.compiles import Program

# A program that runs once is not worth optimising: 5 seconds of compilation become 2.
RUN_ONCE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Programs:
    """The programs of a run of `steps` steps. To be used with its mesh set.

    Devices that are described and not here will do, for whoever only compiles. Rows that are
    trained on are packed with such `documents`; None: where they lie is not known.
    """

    def __init__(self, built: Built, steps: int, documents: DocumentsInRows | None = None):
        self.built, self.run, self.mesh = built, built.run, built.mesh
        self.batches = built.described.batches
        self.documents: DocumentsInRows | None = documents
        trained, _ = built.parted(built.abstract)
        self.optimizer: optax.GradientTransformationExtraArgs
        self.steps, self.optimizer = steps, trainable.optimizer(self.run, steps, trained)

    @property
    def scales_loss(self) -> bool:
        return self.built.described.compute == "float16" and self.run.objective.has_gradient

    @property
    def has_carry(self) -> bool:
        """Carry of an objective: state that its `start` makes."""
        return type(self.run.objective).start is not BaseObjective.start

    @property
    def starts_from_data(self) -> bool:
        """Data-dependent carry: the objective makes it from the first batch."""
        return self.has_carry and self.run.objective.starts_from_data

    def init(
        self, initial: InitialArrays | None = None, batch: Batch | None = None
    ) -> tuple[State, Frozen]:
        """The state at step 0, made where it lives; `initial` arrays are used as they are.

        Those that are of the right dtype already are donated: they are gone afterwards.
        The first batch is needed where the objective `starts_from_data`. Helpers are not in it.
        """
        key, initial = jax.random.key(self.run.train.seed), initial or {}
        donated, others = {}, {}
        for number, arrays in initial.items():
            types = {path: x.dtype for path, x in named(self.built.stages[number]).items()}
            donated[number] = {path: x for path, x in arrays.items() if x.dtype == types[path]}
            others[number] = {path: x for path, x in arrays.items() if x.dtype != types[path]}
        return self.make_init()(key, donated, others, batch if self.starts_from_data else None)

    def abstract_state(self) -> tuple[State, Frozen]:
        """The shapes and shardings of `init`, and of the helpers, without making them."""
        # The key is made while tracing: where only a compiler is, nothing can be computed.
        shapes = jax.eval_shape(
            lambda arrays, batch: self._begun(jax.random.key(0), lambda _: arrays, batch),
            self.built.abstract,
            self.abstract_batch(),
        )
        state, frozen = jax.tree.map(self._placed, shapes)
        helpers = {name: helper.arrays for name, helper in self.built.helpers.items()}
        return state, frozen._replace(helpers=helpers)

    def resident(self, frozen: Frozen) -> Frozen:
        """Frozen arrays as a step reads them: on one GPU each layer by itself, not stacked.

        Stacks that are there and not shapes are gone afterwards.
        """
        if not on_one_gpu() or solves(self.run.objective):
            return frozen
        return by_layer(frozen, _split)

    def abstract_call(self) -> tuple[State, Frozen, dict[str, jax.ShapeDtypeStruct]]:
        """The shapes and shardings that a step is called with."""
        state, frozen = self.abstract_state()
        return state, self.resident(frozen), self.abstract_batch()

    def abstract_carry(self) -> Carry:
        """The shapes and shardings of the carry alone."""
        if not self.has_carry:
            return Carry()
        carry = jax.eval_shape(
            lambda arrays, batch: self._carry(*self.built.parted(arrays), batch),
            self.built.abstract,
            self.abstract_batch(),
        )
        return jax.tree.map(self._placed, carry)

    def _placed(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec() if x.sharding is None else x.sharding.spec
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct(shape, column.dtype, sharding=self.place(shape, name))
            for name, column in self.run.columns.items()
            for shape in [column.shape(self.batches.rows)]
        }

    def place(self, shape: Sequence[int], name: str) -> NamedSharding:
        """Sharding of a column of a batch. Called by the threads that prefetch, too."""
        spec = layout(("batch", *[""] * (len(shape) - 1)), shape, self.mesh)
        assert spec is not None
        return NamedSharding(self.mesh, spec)

    def make_init(self) -> Program:
        on_cpu = self.built.described.chosen.kind == "cpu"
        options = RUN_ONCE if on_cpu else {}
        return Program(self._init, "init", donate_argnums=1, compiler_options=options)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Parts of the run, each with a step of its own."""
        return self.run.objective.stages

    @cached_property
    def first_steps(self) -> tuple[int, ...]:
        """Number of the first step of each stage, counted from 0."""
        # Shares as they were written: in binary, 0.3 of 10 steps are not quite 3.
        shares = (Fraction(str(stage.begins)) for stage in self.stages)
        return tuple(math.ceil(share * self.steps) for share in shares)

    def stage(self, step: int) -> int:
        """Number of the stage that a step is of, both counted from 0."""
        return bisect(self.first_steps, step) - 1

    def step(self, stage: int = -1) -> Program:
        """The step of a stage, unless another is given of the last, which takes most."""
        number = stage % len(self.stages)
        step = make_step(
            self.built.model,
            self.stages[number].objective,
            self.optimizer,
            steps=self.steps,
            microbatches=self.batches.accumulation,
            skips=self.run.train.allowed,
            ema=self.run.train.ema,
            hashed=self.run.data.hashed,
            helpers=self.built.joined,
            documents=self.documents,
            deterministic=self.run.train.deterministic,
        )
        options = self.built.described.compiler_options
        is_last = number == len(self.stages) - 1
        name = "step" if is_last else f"step of stage {number + 1}"
        return Program(step, name, donate_argnums=0, compiler_options=options)

    def training_call(
        self, state: State, frozen: Frozen, stage: int = -1
    ) -> tuple[TrainingCall, Sequence[Any]]:
        """The objective's call on a microbatch in a stage, and its arguments as shapes."""
        objective = self.stages[stage].objective
        call = make_training_call(self.built.model, objective, self.steps, self.built.joined)
        rows, carried = jax.tree.map(self._microbatch, (self.abstract_batch(), state.carry.rows))
        key, carry = jax.eval_shape(jax.random.wrap_key_data, state.key), state.carry
        return call, (state.weights, frozen, rows, key, carry._replace(rows=carried), state.step)

    def _microbatch(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (x.shape[0] // self.batches.accumulation, *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)

    def finish(self, weights: PyTree, frozen: PyTree, carry: Carry) -> tuple[PyTree, PyTree]:
        """The arrays to use, trained and frozen, once the objective has solved for some.

        Training goes on from those that are given. An objective that leaves its `finish` as it is
        gets them back, and nothing is compiled.
        """
        if not solves(self.run.objective):
            return weights, frozen
        return self._finish(weights, frozen, carry)

    @cached_property
    def _finish(self) -> Program:
        def finish(weights: PyTree, frozen: PyTree, carry: Carry) -> tuple[PyTree, PyTree]:
            arrays = eqx.combine(weights, frozen)
            # Linear algebra of whole matrices, which the compiler lays out by what comes out.
            solve: Callable[..., PyTree] = jax.sharding.auto_axes(
                self._solved, out_sharding=jax.tree.map(lambda x: x.sharding, self.built.abstract)
            )
            return self.built.parted(solve(arrays, carry))

        return Program(finish, "finish", compiler_options=self.built.described.compiler_options)

    def _solved(self, arrays: PyTree, carry: Carry) -> PyTree:
        model = self.run.objective.finish(eqx.combine(arrays, self.built.static), carry)
        return eqx.filter(model, eqx.is_array)

    def _init(
        self,
        key: PRNGKeyArray,
        donated: dict[int, dict[str, Array]],
        others: dict[int, dict[str, Array]],
        batch: Batch | None,
    ) -> tuple[State, Frozen]:
        # The compiler follows the layout of what comes out back to the random bits: with explicit
        # axes every device would make all of the model, and cut its piece.
        make: Callable[..., PyTree] = jax.sharding.auto_axes(
            lambda key, initial: eqx.filter(self.built.init(key, initial), eqx.is_array),
            out_sharding=jax.tree.map(lambda x: x.sharding, self.built.abstract),
        )
        initial = {number: arrays | others[number] for number, arrays in donated.items()}
        return self._begun(key, lambda key: make(key, initial), batch)

    def _begun(
        self,
        key: PRNGKeyArray,
        make: Callable[[PRNGKeyArray], PyTree],
        batch: Batch | None,
    ) -> tuple[State, Frozen]:
        weights_key, run_key = jax.random.split(key)
        weights, frozen = self.built.parted(make(weights_key))
        state = start(
            weights,
            self.optimizer,
            self._carry(weights, frozen, batch),
            key=run_key,
            has_ema=self.run.train.ema is not None,
            has_loss_scale=self.scales_loss,
        )
        return state, Frozen(frozen, {})

    def _carry(self, weights: PyTree, frozen: PyTree, batch: Batch | None) -> Carry:
        if not self.has_carry:
            return Carry()
        assert batch is not None or not self.starts_from_data
        return self.run.objective.start(self.built.model(weights, frozen), batch or {})


def _split(x: Array | jax.ShapeDtypeStruct) -> list[Any]:
    """Rows of an array, which is deleted, or of its shape."""
    if isinstance(x, jax.ShapeDtypeStruct):
        assert isinstance(x.sharding, NamedSharding)
        place = NamedSharding(x.sharding.mesh, PartitionSpec(*x.sharding.spec[1:]))
        return [jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=place)] * x.shape[0]
    rows = [_row(x, i) for i in range(len(x))]
    x.delete()
    return rows


@jax.jit
def _row(x: Array, index: Int[Array, ""]) -> Array:
    """A row of an array, by a program that all rows share."""
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def solves(objective: BaseObjective) -> bool:
    """Return True if an objective solves for weights: the model to use is not the trained one."""
    return type(objective).finish is not BaseObjective.finish
