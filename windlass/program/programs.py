"""What a run computes, before it has data: its state, its batches and its step."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PRNGKeyArray, PyTree

from windlass.checkpoint.fingerprint import named
from windlass.devices.axes import layout
from windlass.program.built import Built
from windlass.program.step import (
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
    """The programs of a run of so many steps. To be used with its mesh set.

    Devices that are described and not here will do, for whoever only compiles.
    """

    def __init__(self, built: Built, steps: int):
        self.built, self.run, self.mesh = built, built.run, built.mesh
        self.batches = built.described.batches
        trained, _ = built.parted(built.abstract)
        self.optimizer: optax.GradientTransformationExtraArgs
        self.steps, self.optimizer = steps, self.run.optim.build(steps, trained)

    @property
    def scales_loss(self) -> bool:
        return self.built.described.compute == "float16"

    def init(self, taken: dict[str, Array] | None = None) -> tuple[State, Frozen]:
        """The state at step 0, made where it lives; arrays that are `taken`, by path, as given.

        Those that are of the right type already become the state's own, and are gone afterwards.
        """
        key, taken = jax.random.key(self.run.train.seed), taken or {}
        own = named(self.built.base) | named(self.built.abstract)
        given = {path: x for path, x in taken.items() if x.dtype == own[path].dtype}
        rest = {path: x for path, x in taken.items() if path not in given}
        return self.start()(key, given, rest)

    def abstract_state(self) -> tuple[State, Frozen]:
        """The shapes and places of `init`, without making it."""

        def placed(x):
            spec = PartitionSpec() if x.sharding is None else x.sharding.spec
            sharding = NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        # The key is made while tracing: where only a compiler is, nothing can be computed.
        shapes = jax.eval_shape(
            lambda arrays: self._begun(jax.random.key(0), lambda _: arrays), self.built.abstract
        )
        return jax.tree.map(placed, shapes)

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct(shape, column.dtype, sharding=self.place(shape, name))
            for name, column in self.run.data.columns.items()
            for shape in [column.shape(self.batches.rows)]
        }

    def place(self, shape: Sequence[int], name: str) -> NamedSharding:
        """Where a column of a batch lives. Called by the threads that read ahead, too."""
        spec = layout(("batch", *[""] * (len(shape) - 1)), shape, self.mesh)
        assert spec is not None
        return NamedSharding(self.mesh, spec)

    def start(self) -> Program:
        on_cpu = self.built.described.chosen.kind == "cpu"
        options = RUN_ONCE if on_cpu else {}
        return Program(self._start, "start", donate_argnums=1, compiler_options=options)

    def step(self) -> Program:
        step = make_step(
            self.built.model,
            self.run.objective,
            self.optimizer,
            steps=self.steps,
            microbatches=self.batches.accumulation,
            skips=self.run.train.allowed,
            ema=self.run.train.ema,
            hashed=self.run.data.hashed,
        )
        options = self.built.described.compiler_options
        return Program(step, "step", donate_argnums=0, compiler_options=options)

    def training_call(self, state: State, frozen: Frozen) -> tuple[TrainingCall, Sequence[Any]]:
        """The objective's call on a microbatch, and its arguments as shapes."""
        call = make_training_call(self.built.model, self.run.objective, self.steps)
        rows, carried = jax.tree.map(self._microbatch, (self.abstract_batch(), state.carry.rows))
        key, carry = jax.eval_shape(jax.random.wrap_key_data, state.key), state.carry
        return call, (state.weights, frozen, rows, key, carry._replace(rows=carried), state.step)

    def _microbatch(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (x.shape[0] // self.batches.accumulation, *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)

    def finish(self, state: State, frozen: Frozen) -> State:
        """The state after the last step, with what the objective solves for at the end."""

        def finished(weights: PyTree) -> PyTree:
            model = eqx.combine(weights, frozen.model, self.built.static)
            solved = self.run.objective.finish(model, state.carry)
            return self.built.parted(eqx.filter(solved, eqx.is_array))[0]

        ema = None if state.ema is None else finished(state.ema)
        return state._replace(weights=finished(state.weights), ema=ema)

    def _start(
        self, key: PRNGKeyArray, taken: dict[str, Array], lowered: dict[str, Array]
    ) -> tuple[State, Frozen]:
        # The compiler follows the layout of what comes out back to the random bits: with explicit
        # axes every device would make all of the model, and cut its piece.
        made: Callable[..., PyTree] = jax.sharding.auto_axes(
            lambda key, given: eqx.filter(self.built.init(key, given), eqx.is_array),
            out_sharding=jax.tree.map(lambda x: x.sharding, self.built.abstract),
        )
        return self._begun(key, lambda key: made(key, taken | lowered))

    def _begun(
        self, key: PRNGKeyArray, made: Callable[[PRNGKeyArray], PyTree]
    ) -> tuple[State, Frozen]:
        weights_key, run_key = jax.random.split(key)
        weights, frozen = self.built.parted(made(weights_key))
        batch = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding.spec),
            self.abstract_batch(),
        )
        carry = self.run.objective.start(self.built.model(weights, frozen), batch)
        state = start(
            weights,
            self.optimizer,
            carry,
            key=run_key,
            has_ema=self.run.train.ema is not None,
            has_loss_scale=self.scales_loss,
        )
        return state, Frozen(frozen, {})
