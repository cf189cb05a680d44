"""A run made real: its devices, data, model and compiled functions."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PRNGKeyArray, PyTree
from rich.console import Console

from windlass import adapters
from windlass import run as runs
from windlass.checkpoint.fingerprint import named
from windlass.config import AnyRecipe, Layers, tree
from windlass.config.sections import flat
from windlass.data import Prepared, prepare, reference
from windlass.data.load import evaluation_batches
from windlass.devices import alignment, chips, mesh, precision, selection
from windlass.devices.axes import annotate, cast, is_cast, layout, placements
from windlass.devices.selection import Chosen, Device
from windlass.errors import UserError
from windlass.evaluation.loss import average, make_evaluation
from windlass.layers.kernels import Kernel
from windlass.layers.stack import arrange
from windlass.run import Batches, Run
from windlass.telemetry.compiles import Program
from windlass.telemetry.kept import Kept, keep
from windlass.training import folder as folders
from windlass.training import origin, trainable
from windlass.training.length import Length
from windlass.training.step import Frozen, State, make_step, start

# A program that runs once is not worth optimising: 5 seconds of compilation become 2.
RUN_ONCE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

ADAPTER_KEY = 1  # what is folded into the key of the weights for those of the adapter

# What decides, of given documents, which rows a step has.
ROWS = ("stride", "packing", "shuffle", "validation", "test", "split_seed")


@dataclass(frozen=True)
class Described:
    """A recipe read for the devices that are here: everything that is known before any data is."""

    layers: Layers
    run: Run
    chosen: Chosen
    devices: list  # of JAX's
    warnings: list[str]
    kept: Kept  # where compiled programs are

    @property
    def name(self) -> str:
        return self.layers.name

    @cached_property
    def mesh(self) -> jax.sharding.Mesh:
        return mesh.build(self.run.mesh, self.devices)

    @cached_property
    def chip(self) -> chips.Chip | None:
        return chips.find(self.devices[0].device_kind)

    @cached_property
    def compute(self) -> str:
        return precision.resolve(self.run.precision, self.chosen.kind, self.chip)

    @property
    def attention(self) -> Kernel | None:
        return runs.attention(self.run, self.chosen.kind, self.devices[0].device_kind)

    @property
    def compiler_options(self) -> dict[str, bool]:
        """For the programs that train and evaluate."""
        exact = self.run.train.deterministic and self.chosen.kind == "gpu"
        return {"xla_gpu_deterministic_ops": True} if exact else {}

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Where programs are traced: on this mesh, in products as exact as the numbers are."""
        exactly = precision.products(self.compute, self.chosen.kind)
        with jax.set_mesh(self.mesh), jax.default_matmul_precision(exactly):
            yield

    @cached_property
    def batches(self) -> Batches:
        shape = self.mesh.shape
        return runs.batches(self.run.train, shape["data"] * shape["fsdp"])

    @property
    def facts(self) -> dict[str, Any]:
        """What was asked for on the command line, and what was chosen where it was left open."""
        kind = self.devices[0].device_kind
        device = {"asked": self.chosen.asked, "kind": kind, "count": len(self.devices)}
        chose = {"device": device, "mesh": dict(self.mesh.shape)}
        chose |= {"batch": self.batches._asdict(), "compute": self.compute}
        asked = {"recipe": self.name, "command_line": flat(self.layers.command_line)}
        return {**asked, "chose": chose}

    @property
    def folder(self) -> Path:
        default = Path("runs") / f"{self.name}-{runs.digest(self.run)}"
        return Path(self.run.run.dir).expanduser() if self.run.run.dir else default


def describe(recipe: AnyRecipe, overrides: Sequence[str] = ()) -> Described:
    """Read a recipe, choose the devices, and check that one goes with the other."""
    layers = origin.load(recipe, overrides)
    asked = layers.peek("device", Device) or Device()
    if asked.kind == "cpu":
        # An accelerator that is not asked for is not taken from whoever else may use it.
        jax.config.update("jax_platforms", "cpu")
    try:
        chosen = selection.choose(asked, selection.present(), os.environ)
    except UserError:
        layers.read(Run, None)  # what is wrong with the keys comes first, and all at once
        raise
    devices = selection.devices(chosen)
    run = layers.read(
        Run,
        chosen.kind,
        checks=[
            lambda run: runs.problems(run, chosen.kind, [each.device_kind for each in devices])
        ],
    )
    chip = chips.find(devices[0].device_kind)
    kept = keep()
    warnings = chosen.warnings + precision.warnings(run.precision, chosen.kind, chip)
    warnings += alignment.warnings(runs.widths(run), chosen.kind, chip)
    warnings += [kept.warning] if kept.warning else []
    return Described(layers, run, chosen, devices, warnings, kept)


class Built:
    """The model of a described run, before it has any numbers in it."""

    def __init__(self, described: Described):
        self.described, self.run, self.mesh = described, described.run, described.mesh
        self.base: PyTree = None  # the shapes are known before the types
        self.abstract: PyTree = None
        whole = eqx.filter_eval_shape(self.init, jax.random.key(0))
        arrays, self.static = eqx.partition(whole, _is_shape)
        self.trainable = trainable.choose(arrays, self.run.train.trainable)
        # What is not trained need not be more precise than what it is multiplied in.
        lowered = annotate(
            arrays, lambda x, about: described.compute if is_cast(x, about) else x.dtype
        )
        self.abstract = jax.tree.map(
            lambda x, low, is_trained, place: jax.ShapeDtypeStruct(
                x.shape, x.dtype if is_trained else low, sharding=place
            ),
            arrays,
            lowered,
            self.trainable.mask,
            placements(arrays, self.mesh),
        )
        self.base = adapters.plain(self.abstract)  # the model as its family has it

    def init(self, key: PRNGKeyArray, taken: dict[str, Array] | None = None) -> Any:
        """The model with random weights, but for arrays that are `taken`, by path.

        A path is one of the family's own model, or of the adapted one.
        """
        train, taken = self.run.train, taken or {}
        model = arrange(self.run.model.init(key), remat=train.remat, unroll=train.layers_per_loop)
        model = _filled(model, taken, self.base)
        if self.run.adapter is None:
            return model
        own_key = jax.random.fold_in(key, ADAPTER_KEY)
        adapted = self.run.adapter.adapt(model, names=self.names, key=own_key)
        return _filled(adapted, taken, self.abstract)

    @property
    def names(self) -> Mapping[str, str]:
        """The family's table of names elsewhere; of a family that has none it is empty."""
        return getattr(import_module(type(self.run.model).__module__), "NAMES", {})

    def parted(self, arrays: PyTree) -> tuple[PyTree, PyTree]:
        """What is trained, and what is not."""
        return eqx.partition(arrays, self.trainable.mask)

    def model(self, weights: PyTree, frozen: PyTree) -> Any:
        """The model as it computes."""
        return cast(eqx.combine(weights, frozen, self.static), self.described.compute)

    @property
    def identity(self) -> dict[str, str | int | float]:
        """What a checkpoint must agree on with whoever reads its weights."""
        family = type(self.run.model).__module__.rpartition(".")[2]
        given = {name: x for name, x in tree(self.run.model).items() if x is not None}
        fields = ", ".join(f"{name} {value}" for name, value in given.items())
        identity: dict[str, str | int | float] = {"model": f"{family} ({fields})"}
        adapter, patterns = self.run.adapter, self.run.train.trainable
        if adapter is not None:
            kind = type(adapter).__module__.rpartition(".")[2]
            said = {name: x for name, x in tree(adapter).items() if name != "path"}
            identity["adapter"] = f"{kind} ({', '.join(f'{k} {v}' for k, v in said.items())})"
        trained = "*" if adapter is None else "the adapter"
        return identity | {"trainable": trained if patterns is None else " ".join(patterns)}


class Session:
    """A run with its data: what is needed to train it. To be used with its mesh set."""

    def __init__(self, built: Built, prepared: Prepared):
        run = built.run
        if prepared.tokeniser.size > run.model.vocab:
            raise UserError(
                f"model.vocab is {run.model.vocab}; the tokenizer has {prepared.tokeniser.size} "
                f"tokens, so it must be {prepared.tokeniser.size} or more"
            )
        self.built, self.run, self.prepared = built, run, prepared
        self.mesh, self.batches = built.mesh, built.described.batches
        trained, _ = built.parted(built.abstract)
        self.optimizer: optax.GradientTransformationExtraArgs
        self.length = Length.of(run.train, len(prepared.split("train")) // self.batches.rows)
        self.optimizer = run.optim.build(self.length.steps, trained)

    @property
    def identity(self) -> dict[str, str | int | float]:
        """What a checkpoint must agree on with the run that goes on from it."""
        tokeniser = self.prepared.tokeniser
        return self.built.identity | {
            "tokenizer": f"of {tokeniser.size} tokens ({tokeniser.fingerprint[:12]})",
            "data": f"{self.prepared.fingerprint[:12]} in rows of {self.run.data.length}",
            **{f"data.{name}": _shown(getattr(self.run.data, name)) for name in ROWS},
            "optim": type(self.run.optim).__module__.rpartition(".")[2],
            "batch": self.batches.rows,
            "ema": self.run.train.ema or "none",
            "loss scale": "of float16" if self.scales_loss else "none",
            "data.longer": self.run.data.lengthy,
            "seed": self.run.train.seed,
        }

    @property
    def scales_loss(self) -> bool:
        return self.built.described.compute == "float16"

    def init(self, taken: dict[str, Array] | None = None) -> tuple[State, Frozen]:
        """The state at step 0, made where it lives; arrays that are `taken`, by path, as given.

        Those that are of the right type already become the state's own, and are gone afterwards.
        """
        key, taken = jax.random.key(self.run.train.seed), taken or {}
        on_cpu = self.built.described.chosen.kind == "cpu"
        options = RUN_ONCE if on_cpu else {}
        start = Program(self._start, "start", donate_argnums=1, compiler_options=options)
        own = named(self.built.base) | named(self.built.abstract)
        given = {path: x for path, x in taken.items() if x.dtype == own[path].dtype}
        return start(key, given, {path: x for path, x in taken.items() if path not in given})

    def abstract_state(self) -> tuple[State, Frozen]:
        """The shapes and places of `init`, without making it."""

        def placed(x):
            spec = PartitionSpec() if x.sharding is None else x.sharding.spec
            sharding = NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(placed, jax.eval_shape(self._start, jax.random.key(0), {}, {}))

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (self.batches.rows, self.run.data.length)
        return {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=self.place(shape, name))
            for name, dtype in self.run.data.columns.items()
        }

    def place(self, shape: Sequence[int], name: str) -> NamedSharding:
        """Where a column of a batch lives. Called by the threads that read ahead, too."""
        spec = layout(("batch", *[""] * (len(shape) - 1)), shape, self.mesh)
        assert spec is not None
        return NamedSharding(self.mesh, spec)

    def step(self) -> Program:
        step = make_step(
            self.built.model,
            self.run.objective,
            self.optimizer,
            microbatches=self.batches.accumulation,
            skips=self.run.train.allowed,
            ema=self.run.train.ema,
        )
        options = self.built.described.compiler_options
        return Program(step, "step", donate_argnums=0, compiler_options=options)

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
        weights_key, run_key = jax.random.split(key)
        model = eqx.filter(self.built.init(weights_key, taken | lowered), eqx.is_array)
        model = jax.tree.map(
            lambda x, to: jax.sharding.reshard(x, to.sharding), model, self.built.abstract
        )
        weights, frozen = self.built.parted(model)
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


def open_session(described: Described, console: Console) -> Session:
    vocabulary = folders.vocabulary(described.folder, described.run.tokenizer)
    prepared = prepare(described.run.data, vocabulary, console=console)
    return Session(Built(described), reference.joined(prepared, described.folder))


class Evaluator:
    """The loss on some rows, compiled once. To be used with the mesh set."""

    def __init__(self, session: Session, split: str):
        self.session, self.rows = session, session.prepared.split(split)
        self.function = Program(
            make_evaluation(session.built.model, session.run.objective),
            "evaluation",
            compiler_options=session.built.described.compiler_options,
        )

    def __call__(self, weights: PyTree, frozen: Frozen) -> dict[str, float]:
        size = self.session.batches.per_device * self.session.batches.shards
        ahead = self.session.run.data.prefetch
        batches = evaluation_batches(self.rows, size, self.session.place, prefetch=ahead)
        return average(self.function(weights, frozen, batch) for batch in batches)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower()


def _filled(model: Any, taken: dict[str, Array], like: PyTree) -> Any:
    """The model with the arrays that are taken, by path, and of the types of another, if given."""
    arrays, static = eqx.partition(model, eqx.is_array)
    types = [x.dtype for x in jax.tree.leaves(arrays if like is None else like)]
    found = [taken.get(path, x) for path, x in named(arrays).items()]
    values = [jnp.asarray(x, dtype) for x, dtype in zip(found, types, strict=True)]
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), values), static)


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)
