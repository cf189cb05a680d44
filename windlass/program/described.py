"""A recipe read for given devices: all that is known of a run before any data is."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax

from windlass.checkpoint.store import identity_in
from windlass.config import Layers, Problem
from windlass.config.sections import flat
from windlass.devices import absent, alignment, chips, mesh, precision
from windlass.devices.absent import Absent
from windlass.devices.mesh_choice import MeshChoice
from windlass.devices.selection import DeviceChoice
from windlass.layers.kernels import Kernel
from windlass.processes import hosts
from windlass.program.footprint import footprint
from windlass.run import Run, batches, checks, identity
from windlass.run.batches import Batches
from windlass.run_folder import folder as folders
from windlass.run_folder.relocation import relocation
from windlass.telemetry import about
from windlass.telemetry.compile_cache import Kept, keep
from windlass.units import gib


class Divided(NamedTuple):
    """Microbatches per step that `train.microbatch: auto` chose, and the reason."""

    microbatches: int
    why: str


@dataclass(frozen=True)
class Described:
    """A recipe read for the devices that are here: everything that is known before any data is."""

    layers: Layers
    run: Run
    chosen: DeviceChoice
    devices: list  # of JAX's
    layout: MeshChoice  # of them on the mesh
    warnings: list[str]
    compile_cache: Kept
    began: int | None = None  # global batch size of the run that is there already
    divided: Divided | None = None  # what train.microbatch: auto chose

    @property
    def name(self) -> str:
        return self.layers.name

    @cached_property
    def mesh(self) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
        if isinstance(self.devices[0], Absent):
            return absent.mesh(self.layout.split, self.devices[0])
        return mesh.build(self.layout.split, self.devices)

    @cached_property
    def chip(self) -> chips.Chip | None:
        return chips.find(self.devices[0].device_kind)

    @cached_property
    def compute(self) -> str:
        return precision.resolve(self.run.precision, self.chosen.kind, self.chip)

    @property
    def attention(self) -> Kernel | None:
        return checks.attention(self.run, self.chosen.kind, self.devices[0].device_kind)

    @property
    def layers_per_loop(self) -> int:
        """Layers in an iteration of the scan: as the recipe says, or all on a GPU alone.

        Several GPUs gather the weights of a layer in its iteration. If all were in one, the
        compiler might hold those of many layers.
        """
        is_alone = self.chosen.kind == "gpu" and len(self.devices) == 1
        default = getattr(self.run.model, "layers", 1) if is_alone else 1
        return self.run.train.layers_per_loop or default

    @property
    def compiler_options(self) -> dict[str, bool]:
        """XLA options of the programs that train and evaluate."""
        exact = self.run.train.deterministic and self.chosen.kind == "gpu"
        return {"xla_gpu_deterministic_ops": True} if exact else {}

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Context for tracing programs: this mesh, and matmuls as precise as the compute dtype."""
        exactly = precision.matmul_precision(self.compute, self.chosen.kind)
        grid = self.mesh
        with ExitStack() as on:
            if isinstance(grid, jax.sharding.Mesh):
                on.enter_context(jax.set_mesh(grid))
            else:
                # A run may be under way, and what is planned may be larger: JAX takes a mesh of
                # another size only where there is none.
                on.enter_context(jax.sharding.use_abstract_mesh(absent.NO_MESH))
                on.enter_context(jax.sharding.use_abstract_mesh(grid))
            on.enter_context(jax.default_matmul_precision(exactly))
            yield

    @cached_property
    def batches(self) -> Batches:
        shape = self.mesh.shape
        chosen = self.divided and self.divided.microbatches
        return batches.batches(self.run.train, mesh.row_groups(shape), self.began, chosen)

    @property
    def facts(self) -> dict[str, Any]:
        """Requests of the command line, and the choices made where it left them open."""
        kind = self.devices[0].device_kind
        device = {"asked": self.chosen.requested, "kind": kind, "count": len(self.devices)}
        device |= {"cores": about.cores()} if self.chosen.kind == "cpu" else {}
        chose = {"device": device, "mesh": dict(self.mesh.shape)}
        chose |= {"batch": self.batches._asdict(), "compute": self.compute}
        chose |= {"processes": hosts.count()}
        chose |= {} if self.divided is None else {"microbatch": self.divided._asdict()}
        requested = {"recipe": self.name, "command_line": flat(self.layers.command_line)}
        return {**requested, "chose": chose}

    @property
    def folder(self) -> Path:
        return _folder(self.name, self.run)


def read_for(
    layers: Layers, chosen: DeviceChoice, devices: list, *, is_trained: bool = True
) -> Described:
    """A recipe read for given devices, which need not be here."""
    kinds = [each.device_kind for each in devices]
    chip, slices = chips.find(kinds[0]), mesh.slices(devices)
    layouts: list[tuple[MeshChoice, int | None]] = []

    def problems(run: Run) -> list[Problem]:
        began = _began(_folder(layers.name, run)) if is_trained else None
        run = run if is_trained else batches.without_batch(run)
        layout = _laid_out(run, chosen, chip, slices, began)
        layouts[:] = [(layout, began)]
        found = checks.problems(run, chosen.kind, kinds, layout.split, slices, began)
        return [*found, *([*checks.too_long(run), *checks.unfrozen(run)] if is_trained else [])]

    run, ((layout, began),) = layers.read(Run, chosen.kind, checks=[problems]), layouts
    cache = keep(chosen.kind, len(devices))
    warnings = chosen.warnings + precision.warnings(run.precision, chosen.kind, chip)
    warnings += alignment.warnings(checks.widths(run), chosen.kind, chip)
    warnings += [cache.warning] if cache.warning else []
    warnings += [] if layout.lacks is None or chip is None else [_too_large(layout.lacks, chip)]
    described = Described(layers, run, chosen, devices, layout, warnings, cache, began)
    return replace(described, divided=_divided(described)) if run.train.microbatch else described


def _folder(name: str, run: Run) -> Path:
    default = Path("runs") / f"{name}-{identity.digest(run)}"
    return Path(run.run.dir).expanduser() if run.run.dir else default


def _began(folder: Path) -> int | None:
    """Global batch size of a run that has been trained before; None of a new one."""
    stored = hosts.broadcast("what the run is", lambda: identity_in(folder))
    return None if stored is None else stored.get("batch")


def _divided(described: Described) -> Divided | None:
    """Microbatches chosen at the last start of a run, where that was on the same devices."""
    path = described.folder / folders.ABOUT
    starts = hosts.broadcast("what the run chose", lambda: about.read(path))
    before, now = starts[-1]["chose"] if starts else {}, described.facts["chose"]
    if "microbatch" not in before or relocation(before, now | {"batch": before["batch"]}):
        return None
    return Divided(**before["microbatch"])


def _laid_out(
    run: Run, chosen: DeviceChoice, chip: chips.Chip | None, slices: int, began: int | None
) -> MeshChoice:
    """The mesh of a run; how large its model is counts where a size is to be chosen."""
    is_chosen = mesh.is_open(run.mesh) and chosen.count > 1
    if chip is None or not is_chosen or precision.problems(run.precision, chosen.kind):
        return batches.choice(run, chosen.count, slices=slices, began=began)
    compute = precision.resolve(run.precision, chosen.kind, chip)
    return batches.choice(run, chosen.count, footprint(run, chip, compute), slices, began)


def _too_large(needs: float, chip: chips.Chip) -> str:
    return (
        f"this run needs about {gib(needs)} GiB a device, and of a {chip.name} a program "
        f"may use {gib(chips.usable(chip))}: an adapter, train.remat=full, more "
        "train.accumulation or more devices make it less"
    )
