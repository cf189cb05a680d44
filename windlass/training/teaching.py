"""Teaching: a teacher reads all rows of a recipe, and its top logits are written to a cache."""

import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree

from windlass import files, teacher_cache
from windlass.chance import keys, subsets
from windlass.checkpoint import Checkpoint
from windlass.columns import length_of, sized
from windlass.config import AnyRecipe, Layers, tree
from windlass.config.start import Start
from windlass.data import Tokenized, beside, cache_of, prepare, taught
from windlass.data.load import numbered_batches
from windlass.data.pack import COLUMNS, Sequences
from windlass.data.progress import progress
from windlass.devices import selection
from windlass.errors import UserError
from windlass.evaluation.published_model import UNTRAINED
from windlass.layers.head import Candidates
from windlass.planning import cost, planner, prices
from windlass.planning.extent import Extent
from windlass.processes import hosts as processes
from windlass.processes import shared_folders
from windlass.processes.clusters import Hosts, find
from windlass.processes.peers import Peers, check_devices, together
from windlass.processes.signals import Signals
from windlass.program.built import Built
from windlass.program.described import Described, read_for
from windlass.program.programs import Programs
from windlass.run import Run
from windlass.starting import frozen_models, origin
from windlass.starting.describe import choose_devices
from windlass.teacher_cache import IDS, LOG_Z, LOGITS, CacheShard, TeacherCache
from windlass.telemetry.compiles import Program
from windlass.telemetry.console import ConsoleReport
from windlass.terminal import Terminal
from windlass.training.session import check_same
from windlass.units import duration, size
from windlass.version import __version__

RANKS = "ranks"  # the column of the negatives, by their ranks outside of the top k
KEY = frozen_models.key(frozen_models.CACHED)
HOUR = 3600


class Taught(NamedTuple):
    """A teacher's cache that is whole."""

    folder: Path
    rows: int
    tokens: int  # positions of these rows, padded or not
    size_bytes: int
    shards: int
    written: int  # shards that this call wrote

    @staticmethod
    def of(cache: TeacherCache, written: int) -> "Taught":
        length = length_of(cache.columns)
        sizes = (cache.rows * length, cache.rows * cache.row_bytes)
        return Taught(cache.folder, cache.rows, *sizes, len(cache.shards), written)


def teach(
    recipe: AnyRecipe,
    overrides: Sequence[str] = (),
    *,
    hosts: Hosts | None = None,
    signals: Signals | None = None,
    report: ConsoleReport | None = None,
) -> Taught:
    """Write the teacher's cache of a recipe, from wherever an earlier call of the same left it.

    On several hosts it is as for `training.train.train`: every process computes, and the first
    writes. A signal ends it at once: the shards that are written stay, and the one under way is
    made again.
    """
    hosts, signals = hosts or find(None, os.environ), signals or Signals()
    if report is None:
        is_first = hosts is None or hosts.process == 0
        with ConsoleReport(None if is_first else Terminal(quiet=True)) as report:
            return teach(recipe, overrides, hosts=hosts, signals=signals, report=report)
    with together(hosts, signals, lambda folder: None) as peers:
        with signals.phase("reading the recipe"):
            student, described = describe_teacher(recipe, overrides)
        return Teaching(student, described, signals, report).run(peers)


def describe_teacher(recipe: AnyRecipe, overrides: Sequence[str]) -> tuple[Run, Described]:
    """The recipe of a student, and its teacher laid out on the devices that are here."""
    layers = origin.load(recipe, overrides)
    chosen = choose_devices(layers)
    student = layers.read(Run, chosen.kind)
    run = _teacher_run(student, layers)
    alone = Layers(layers.name, layers.origin, run, {}, {})
    described = read_for(alone, chosen, selection.devices(chosen), is_trained=False)
    _check_fit(student, described.run)
    return student, described


def teacher_of(student: Run) -> Start:
    """The teacher that a recipe names, or a refusal."""
    teacher = student.data.teacher
    if teacher is not None and teacher.model is not None:
        return teacher.model
    missing = "data.teacher" if teacher is None else KEY
    raise UserError(
        f"{missing} is missing: data.teacher.path is the folder that the cache goes to, and {KEY} "
        "the teacher, as {hub: OWNER/NAME}, {path: FOLDER} or {run: RUN}"
    )


def _teacher_run(student: Run, layers: Layers) -> dict[str, Any]:
    """The teacher as a recipe: the data, devices and batches of the student's."""
    helper = frozen_models.resolve(frozen_models.CACHED, teacher_of(student), layers)
    names = ("batch", "batch_per_device", "accumulation", "seed")
    batches = {name: getattr(student.train, name) for name in names}
    kept = {name: tree(getattr(student, name)) for name in ("device", "mesh", "precision")}
    return {
        **{name: helper[name] for name in ("model", "residual") if name in helper},
        **kept,
        "helpers": {frozen_models.CACHED: helper},
        "tokenizer": tree(student.tokenizer),
        "data": tree(replace(student.data, teacher=None)),
        "optim": UNTRAINED["optim"],
        "train": {"steps": 1, **{name: x for name, x in batches.items() if x is not None}},
    }


def _check_fit(student: Run, teacher: Run) -> None:
    """Refuse a teacher whose logits are no targets for the student."""
    start = teacher.helpers[frozen_models.CACHED].start
    there = f"{KEY} is {start.hub or start.path or start.run}"
    if teacher.model.vocab != student.model.vocab:
        raise UserError(
            f"{there}, whose vocabulary has {teacher.model.vocab} tokens; model.vocab is "
            f"{student.model.vocab}: they must be the same"
        )
    if not teacher.model.causal:
        raise UserError(f"{there}, which attends in both directions: it has seen the next token")
    assert student.data.teacher is not None
    top_k, negatives = (student.data.teacher.settings[key] for key in ("top_k", "negatives"))
    if top_k + negatives > teacher.model.vocab:
        raise UserError(
            f"data.teacher.top_k is {top_k} and negatives is {negatives}; "
            f"together they are more than the {teacher.model.vocab} tokens of the vocabulary"
        )


class Teaching:
    """The writing of one cache, from where it stands to its end."""

    def __init__(self, student: Run, described: Described, signals: Signals, report: ConsoleReport):
        assert student.data.teacher is not None
        self.teacher, self.described = student.data.teacher, described
        self.signals, self.report = signals, report
        self.model, self.seed = described.run.model, described.run.train.seed
        settings = self.teacher.settings
        self.top_k, self.negatives = settings["top_k"], settings["negatives"]

    def run(self, peers: Peers | None) -> Taught:
        described, run = self.described, self.described.run
        if peers is not None:
            peers.compare(tree(run))
            check_devices(peers.hosts.processes, described.devices)
        for note in described.chosen.notes:
            self.report.note(note)
        with described.scope():
            with self.signals.phase("looking for the teacher"):
                frozen_models.check(run)
            with self.signals.phase("preparing the data"):
                prepared = self.prepared()
            frozen_models.check_vocabulary(run, prepared.vocabulary)
            cache = self.cache(prepared)
            with self.signals.phase("running the teacher"), self.locked(cache):
                missing = processes.broadcast("shards to write", lambda: cache.missing)
                shards = [CacheShard(*one) for one in missing]
                self.report.banner(self.facts(cache, shards))
                if shards:
                    self.check_room(cache, shards)
                    self.write(cache, shards, prepared)
                if processes.is_first():
                    cache.finish()
        self.report.note(f"{cache.folder} is complete; `windlass train` reads it as data.teacher")
        return Taught.of(cache, len(shards))

    def prepared(self) -> Tokenized:
        run, console = self.described.run, self.report.console
        prepared = shared_folders.once(
            "preparing the data",
            cache_of(run.data),
            lambda: prepare(run.data, run.tokenizer, console=console),
        )
        check_same(prepared)
        assert isinstance(prepared, Tokenized)  # a section `data` refuses blocks with a teacher
        return prepared

    def cache(self, prepared: Tokenized) -> TeacherCache:
        """The cache as it is to be; one that is there and is of something else is refused."""
        columns = sized(COLUMNS | self.teacher.columns, prepared.data.length)
        ours = {
            "format": teacher_cache.FORMAT,
            "teacher": frozen_models.identity(self.described.run)[KEY],
            "vocab": self.model.vocab,
            **self.teacher.settings,
            "seed": self.seed if self.negatives else None,
            **taught.described(prepared),
            "columns": teacher_cache.written(columns),
        }
        there = teacher_cache.find(self.teacher.folder)
        if there is not None:
            taught.check(there, ours)
        return there or TeacherCache(self.teacher.folder, {"windlass": __version__, **ours})

    @contextmanager
    def locked(self, cache: TeacherCache) -> Iterator[None]:
        """The cache in this block, for this process or its peers alone."""
        if not processes.is_first():
            yield
            return
        with files.writable(cache.folder):
            cache.folder.mkdir(parents=True, exist_ok=True)
        with files.folder_lock(cache.folder, shared=False) as is_ours:
            if not is_ours:
                raise UserError(f"another process is writing {cache.folder}; wait for its end")
            with files.writable(cache.folder):
                cache.begin()
            yield

    def facts(self, cache: TeacherCache, shards: list[CacheShard]) -> Iterator[tuple[str, str]]:
        """All that is known before the teacher runs: rows, bytes, time and cost."""
        length = self.described.run.data.length
        start = self.described.run.helpers[frozen_models.CACHED].start
        yield "teacher", f"{start.hub or start.path or start.run}, {cache.about['teacher']}"
        yield "cache", str(cache.folder)
        each = ", ".join(f"{name} {rows:,}" for name, rows in cache.parts.items())
        yield (
            "rows",
            f"{cache.rows:,} of {length:,} tokens ({each}): {cache.rows * length:,} tokens",
        )
        per_token = cache.row_bytes / length
        candidates = f"top {self.top_k}" + f" and {self.negatives} negatives" * bool(self.negatives)
        takes = f"{size(cache.rows * cache.row_bytes)}, {per_token:.0f} bytes a token"
        yield "size", f"{takes}: {candidates} in {cache.about['dtype']}"
        done = len(cache.shards) - len(shards)
        if done:
            yield "shards", f"{done:,} of {len(cache.shards):,} are written"
        if shards:
            yield "time", self.estimate(sum(one.stop - one.first for one in shards))

    def estimate(self, rows: int) -> str:
        """Time and cost of a number of rows, as far as a plan knows them."""
        estimated = planner.call_time(self.described, self.abstract_call)
        if estimated is None:
            return f"no speed estimate for {self.described.chosen.kind.upper()}s"
        time, target = estimated
        calls = -(-rows // self.at_once)
        extent = Extent(self.at_once * self.described.run.data.length, calls, None)
        bill = cost.cost(
            time, extent, target, prices.load(), every=Checkpoint().every, saved=0.0
        ).run
        assert bill is not None
        low, expected, high = (duration(hours * HOUR) for hours in bill.hours)
        usd = "" if bill.on_demand is None else f", ${bill.on_demand.expected:,.2f} on demand"
        return f"about {expected} ({low} to {high}) on {target.name}{usd}"

    def check_room(self, cache: TeacherCache, shards: list[CacheShard]) -> None:
        needs = cache.row_bytes * sum(one.stop - one.first for one in shards)
        if processes.is_first() and needs > (free := shutil.disk_usage(cache.folder).free):
            raise UserError(
                f"data.teacher.path is {cache.folder}, where {size(free)} are free, and the cache "
                f"takes {size(needs)} more; another folder, a smaller data.teacher.top_k or less "
                "data would do"
            )

    def write(self, cache: TeacherCache, shards: list[CacheShard], prepared: Tokenized) -> None:
        """Compute and write the shards that are missing, one after the other."""
        with self.report.doing("loading the teacher"):
            helpers, facts = frozen_models.take(self.built, prepared.vocabulary)
        self.report.banner(facts)
        parts, done = beside.parts(prepared), 0
        total = sum(one.stop - one.first for one in shards)
        with progress(self.report.console, "teaching", total) as advance:
            for shard in shards:
                columns = self.computed(parts[shard.part], shard, helpers, done, advance)
                if processes.is_first():
                    own = parts[shard.part].batch(np.arange(shard.first, shard.stop))
                    with files.writable(cache.folder, "; the same command goes on from here"):
                        cache.write(shard, own | columns)
                done += shard.stop - shard.first

    def computed(
        self, rows: Sequences, shard: CacheShard, helpers: PyTree, done: int, advance: Callable
    ) -> dict[str, np.ndarray]:
        """Columns that the teacher adds to the rows of a shard.

        Batches begin with the shard: what is in it does not depend on where an earlier call ended.
        """
        count = shard.stop - shard.first
        found = {name: x.padded(count) for name, x in self.teacher_columns.items()}

        def make(numbers: np.ndarray, *_: Any) -> dict[str, np.ndarray]:
            return rows.batch(numbers) | {RANKS: self.ranks(shard.part, numbers)}

        shapes = {name: x.shape for name, x in self.abstract_batch(self.programs).items()}
        batches = numbered_batches(
            np.arange(shard.first, shard.stop),
            shapes,
            make,
            self.programs.place,
            prefetch=self.described.run.data.prefetch,
        )
        outputs = (self.program(helpers, batch) for batch in batches)
        for first, output in enumerate(_one_ahead(outputs)):
            here = slice(first * self.at_once, min((first + 1) * self.at_once, count))
            for name, values in output.items():
                found[name][here] = np.asarray(values)[: here.stop - here.start]
            advance(done + here.stop, "rows")
        return found

    def ranks(self, part: str, numbers: np.ndarray) -> np.ndarray:
        """Ranks of the negatives, at every position of rows by number, on whatever mesh."""
        length, rest = self.described.run.data.length, self.model.vocab - self.top_k
        which = np.array([[zlib.crc32(part.encode())]])
        hashed = keys(self.seed, which, numbers[:, None], np.arange(length)[None])
        drawn = subsets(hashed.reshape(-1), self.negatives, rest)
        return drawn.reshape(len(numbers), length, self.negatives)

    @cached_property
    def built(self) -> Built:
        return Built(self.described)

    @cached_property
    def programs(self) -> Programs:
        return Programs(self.built, steps=1)

    @property
    def at_once(self) -> int:
        """Rows that the teacher reads at once."""
        return self.described.batches.per_device * self.described.batches.shards

    @property
    def teacher_columns(self):
        return sized(self.teacher.columns, self.described.run.data.length)

    @cached_property
    def program(self) -> Program:
        function = make_teaching(self.built, self.top_k, self.teacher.settings["dtype"])
        return Program(function, "teaching", compiler_options=self.described.compiler_options)

    def abstract_batch(self, programs: Programs) -> dict[str, jax.ShapeDtypeStruct]:
        length = self.described.run.data.length
        shapes = {
            name: (x.dtype, x.shape(self.at_once)) for name, x in sized(COLUMNS, length).items()
        }
        shapes[RANKS] = np.dtype(np.int32), (self.at_once, length, self.negatives)
        return {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=programs.place(shape, name))
            for name, (dtype, shape) in shapes.items()
        }

    def abstract_call(self, programs: Programs) -> tuple[Callable, Sequence[Any]]:
        """The program and its arguments as shapes, of a model that may be laid out elsewhere."""
        built = programs.built
        helpers = {name: helper.arrays for name, helper in built.helpers.items()}
        function = make_teaching(built, self.top_k, self.teacher.settings["dtype"])
        return function, (helpers, self.abstract_batch(programs))


def make_teaching(built: Built, top_k: int, dtype: str) -> Callable[..., dict[str, Array]]:
    """The columns that the teacher adds to a batch, to be compiled."""

    def teaching(helpers: PyTree, batch: dict[str, Array]) -> dict[str, Array]:
        teacher = built.joined(helpers)[frozen_models.CACHED]
        hidden, _, _ = teacher({name: batch[name] for name in COLUMNS})
        found = teacher.head.candidates(hidden, top_k, batch[RANKS])
        rounded = found.logits.astype(dtype)
        columns = {IDS: found.ids, LOGITS: rounded, LOG_Z: stored_log_z(found, rounded)}
        # Whole on every device, so that any process can write it.
        return jax.tree.map(lambda x: jax.sharding.reshard(x, PartitionSpec()), columns)

    return teaching


def stored_log_z(found: Candidates, rounded: Float[Array, "*tokens k"]) -> Float[Array, "*tokens"]:
    """log Σ exp z of candidates as they are stored, and of all other tokens as they are.

    In float16 a logit of 20 is off by up to 0.008, and a candidate's probability by as much. The
    mass outside the candidates, 1 − Σ exp(z − log_z), stays what it is.
    """
    both = found.logits, rounded.astype(jnp.float32)
    known, stored = (jax.nn.logsumexp(x, axis=-1) for x in both)
    share = -jnp.expm1(jnp.minimum(known - found.log_z, 0.0))
    outside = jnp.where(share > 0, found.log_z + jnp.log(share), -jnp.inf)
    return jnp.logaddexp(stored, outside)


def _one_ahead(outputs: Iterator[dict[str, Array]]) -> Iterator[dict[str, Array]]:
    """The same, each once the next is dispatched: the device computes while the host copies."""
    waiting = None
    for output in outputs:
        if waiting is not None:
            yield waiting
        waiting = output
    if waiting is not None:
        yield waiting
