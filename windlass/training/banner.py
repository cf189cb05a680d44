"""The banner of a run: devices, mesh, batch, precision and data, before it begins."""

import socket
from collections.abc import Iterator
from pathlib import Path

from jaxtyping import PyTree

from windlass import adapters
from windlass.config.sections import flat
from windlass.data.load import Loader
from windlass.data.show import facts, summary
from windlass.devices.axes import undivided
from windlass.networks.experts.layer import active_parameters
from windlass.processes import hosts
from windlass.program.programs import Programs
from windlass.program.trainable import TrainableMask
from windlass.training.session import Session
from windlass.units import gib


def banner(session: Session, loader: Loader, folder: Path) -> Iterator[tuple[str, str]]:
    """The lines of the banner, each with its title."""
    built, described = session.built, session.built.described
    batches, chosen = session.batches, built.trainable
    used = f"{len(described.devices)} × {described.devices[0].device_kind}"
    memory = described.chip and f" of {gib(described.chip.memory_bytes)} GiB"
    yield "device", f"{used}{memory or ''} (requested: {described.chosen.requested})"
    if (joined := hosts.joined()) is not None:
        here = sum(device.process_index == joined.process for device in described.devices)
        share = f"{joined.processes} processes × {here} device{'s' if here > 1 else ''}"
        yield "hosts", f"{share}, from {joined.source}; this is {socket.gethostname()}"
    kind = described.chosen.kind
    if special := flat(described.layers.by_device.get(kind, {})):
        keys = ", ".join(f"{key} {value}" for key, value in special.items())
        yield "by_device", f"on {kind}: {keys}"
    shape = " × ".join(f"{name} {size}" for name, size in described.mesh.shape.items())
    why = f" ({described.layout.why})" if described.layout.why else ""
    replicated = [*undivided(built.abstract, described.mesh)]
    yield "mesh", "; ".join([f"{shape}{why}", *replicated])
    solved = session.run.objective.solved(built.abstract)
    learned = f"{solved:,} solved for" if solved else f"{chosen.trained:,} trainable"
    share = _share(chosen, solved or chosen.trained)
    yield "parameters", f"{learned} of {chosen.total:,}{share}{_active(built.abstract)}"
    if maps := adapters.adapted_maps(built.abstract):
        each = ", ".join(f"{count:,} {name}" for name, count in maps.items())
        yield "adapter", f"{sum(maps.values()):,} linear maps adapted: {each}"
    optimizer = session.run.optim
    for line in [] if optimizer is None else optimizer.lines(built.parted(built.abstract)[0]):
        yield "optimiser", line
    yield (
        "batch",
        f"{batches.rows} = {batches.per_device} a device × {batches.accumulation} accumulation "
        f"× {batches.shards} shard{'s' * (batches.shards != 1)}, "
        f"of {session.run.data.length} {_positions(session)}",
    )
    if described.divided is not None:
        yield "microbatch", f"auto: {described.divided.why}"
    if session.length.epochs is not None:
        yield "length", str(session.length)
    if len(session.programs.stages) > 1:
        yield "stages", _stages(session.programs)
    moment = getattr(optimizer, "moment", "float32")
    stored = "float32 weights and optimiser" if optimizer else "float32 sums"
    if moment != "float32":
        stored = f"float32 weights, first moment in {moment}"
    yield "precision", f"{described.compute} compute, {stored}"
    if described.attention is not None:
        yield "attention", described.attention.why
    yield from data_facts(session, loader)
    yield "run", str(folder)


def data_facts(session: Session, loader: Loader) -> Iterator[tuple[str, str]]:
    """The lines on the data of a run."""
    some = "1 row" if loader.dropped == 1 else f"{loader.dropped} rows"
    dropped = f", {some} left out of each" if loader.dropped else ""
    if loader.batches_per_epoch is None:
        tokens = f"{session.run.data.parts[0].source.part_tokens:,} tokens"
        yield "data", f"a stream in parts of {tokens}; the first: {summary(loader.rows)}"
    else:
        per_epoch = f"{loader.batches_per_epoch} steps an epoch{dropped}"
        yield "data", f"{summary(loader.rows)}, {per_epoch}"
    yield from facts(session.prepared)
    if (entropy := session.prepared.unigram_entropy) is not None:
        yield "unigram", f"{entropy:.4f} nats a token"


def _stages(programs: Programs) -> str:
    """Steps of each stage."""
    ends = [*programs.first_steps[1:], programs.steps]
    parts = [
        f"{stage.name} in steps {first + 1} to {end}"
        for stage, first, end in zip(programs.stages, programs.first_steps, ends, strict=True)
    ]
    return f"{', '.join(parts)}; each compiles a step of its own"


def _positions(session: Session) -> str:
    return "tokens" if "tokens" in session.prepared.columns else "positions"


def _active(model: PyTree) -> str:
    """Parameters that a token is multiplied with, where it has a few of many experts."""
    active, total = active_parameters(model)
    return "" if active == total else f"; {active:,} active per token"


def _share(chosen: TrainableMask, learned: int) -> str:
    fixed = f", {chosen.fixed:,} fixed" if chosen.fixed else ""
    if learned == chosen.total:
        return ""
    return f" ({learned / chosen.total:.4%}){fixed}"
