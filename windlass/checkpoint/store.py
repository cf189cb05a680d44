"""The checkpoints of a run: written in the background, kept by count, checked when read."""

import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError
from jaxtyping import PyTree

from windlass import seal
from windlass.checkpoint import archive, host_memory
from windlass.checkpoint.fingerprint import named
from windlass.errors import PeerLost, UserError
from windlass.files import DAMAGED, FULL, folder_lock, put_aside
from windlass.processes import hosts
from windlass.processes.failures import is_of_an_exchange

T = TypeVar("T")
Identity = dict[str, str | int | float]

FIRST, FROZEN = "0", "frozen"
REMOVING = ".removing"
ATTEMPTS = 20  # to read a checkpoint before a trainer on another host removes it

# What Orbax and the file system raise when bytes cannot be written.
FAILURES = (OSError, ValueError, RuntimeError)


class Restored(NamedTuple):
    """A restored state whose fingerprints agreed."""

    step: int
    state: PyTree
    metrics: dict[str, float]
    identity: Identity


class Store:
    """The folder `checkpoints` of a run, for those that train it.

    `save` returns when the state is off the device, so that it may be donated; writing, hashing
    and deleting old ones go on behind it. An error there is raised by the next `save` or `wait`.

    Of several processes all call the same in the same order. Each writes and reads its own shards;
    the first alone says what is there, and renames and removes.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        say: Callable[[str], None],
        keep: int = 3,
        best: str = "validation_loss",
    ):
        self.folder = folder_of(run_dir)
        self._say, self._keep, self._best = say, keep, best
        self._orbax = archive.writer(self._seal)
        self._writing = ""
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[str, Future] | None = None

    def save(
        self, step: int, state: PyTree, identity: Identity, metrics: dict[str, Any] | None = None
    ) -> bool:
        """Start saving; False when this step is there already, which changes nothing."""
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        return self._start(str(step), state, step=step, identity=identity, metrics=numbers)

    def save_frozen(self, arrays: PyTree, identity: Identity) -> bool:
        """Start saving what never changes in a run; False when it is there already."""
        return self._start(FROZEN, arrays, identity=identity)

    def wait(self) -> None:
        """Return when the last save is on disk and hashed, or raise what went wrong with it."""
        if self._pending is None:
            return
        (name, pending), self._pending = self._pending, None
        try:
            pending.result()
        except FAILURES as error:
            raise self._failure(name, error) from error

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._background.shutdown(cancel_futures=True)
            self._orbax.close()

    def steps(self) -> list[int]:
        """The steps on disk, oldest first, good or not."""
        return steps_in(self.folder)

    def restore(self, state: PyTree, identity: Identity) -> Restored | None:
        """The newest good checkpoint, in the shardings of an abstract state; None in a new run.

        A damaged one is renamed, so that its step can be saved again, and the one before it is
        taken. When there is none left that is an error: never a start at step 0 in disguise.
        """
        self.wait()
        if hosts.is_first():
            self._clear()
        for step in hosts.broadcast("steps", lambda: self.steps()[::-1]):
            folder = self.folder / str(step)
            try:
                restored, manifest = _read(folder, state, identity)
            except archive.Damaged as damaged:
                if hosts.is_first():
                    self._put_aside(step, damaged)
            else:
                if hosts.is_first():  # a kill right after the commit left this undone
                    seal.extend(folder, archive.LATE)
                return Restored(step, restored, manifest["metrics"], manifest["identity"])
        if hosts.is_first():
            _refuse_if_only_damaged(self.folder)
            # Those of a start that ended before it saved a step: what is made anew may differ.
            if (self.folder / FROZEN).is_dir():
                _remove(self.folder / FROZEN)  # whoever reads it: it is of no run
        return None

    def _put_aside(self, step: int, damaged: archive.Damaged) -> None:
        place = put_aside(self.folder / str(step))
        self._say(
            f"checkpoint at step {step} is damaged ({damaged}); "
            f"it is now {place}, and an older one is tried"
        )

    def restore_frozen(self, arrays: PyTree, identity: Identity) -> PyTree:
        """The frozen arrays that `save_frozen` stored, in the given shardings."""
        self.wait()
        return load_frozen(self.folder.parent, arrays, identity)

    def _start(self, name: str, tree: PyTree, **about: Any) -> bool:
        self.wait()
        if hosts.broadcast(f"has {name}", (self.folder / name).is_dir):
            return False
        manifest, arrays = archive.describe(tree, **about), named(tree)
        is_shared = name == FIRST and host_memory.is_used_by(arrays)
        kinds = [_kind(array) for array in arrays.values()]
        self._writing = name
        try:
            if is_shared:
                arrays = host_memory.share_zeros(arrays)
            archive.write(self._orbax, self.folder / name, arrays, manifest)
        except FAILURES as error:
            raise self._failure(name, error) from error
        self._pending = name, self._background.submit(self._finish, name)
        if is_shared:  # behind the first steps, for the next save
            self._background.submit(host_memory.reserve, kinds)
        return True

    def _seal(self) -> None:
        seal.seal(self.folder / (self._writing + archive.UNFINISHED), leave=archive.LATE)

    def _finish(self, name: str) -> None:
        self._orbax.wait_until_finished()
        if not hosts.is_first():
            return
        seal.extend(self.folder / name, archive.LATE)
        # Only now, with a newer one committed and every byte of it read back, may others go.
        for step in _superseded(self.folder, self._keep, self._best):
            _remove_unread(self.folder / str(step))

    def _failure(self, name: str, error: Exception) -> Exception:
        """The exception to raise: a UserError, unless another process failed."""
        of_jax = any(isinstance(one, JaxRuntimeError) for one in (error, error.__cause__))
        is_late = isinstance(error, TimeoutError)
        if hosts.count() > 1 and (of_jax or is_late or is_of_an_exchange(error)):
            return PeerLost(str(error))
        if hosts.count() == 1:  # others may still be writing there; the next start removes it
            shutil.rmtree(self.folder / (name + archive.UNFINISHED), ignore_errors=True)
        steps = self.steps()
        left = f"the newest checkpoint there is step {steps[-1]}" if steps else "there is none yet"
        number = _number(error)
        why = os.strerror(number) if number else str(error)
        more = "; make room there, and the same command goes on" if number in FULL else ""
        return UserError(f"saving {_title(name)} in {self.folder} failed: {why}; {left}{more}")

    def _clear(self) -> None:
        for path in sorted(self.folder.glob("*")):
            if archive.UNFINISHED in path.name or path.name.endswith(REMOVING):
                name = path.name.split(".")[0]
                operation = "deletion" if path.name.endswith(REMOVING) else "save"
                shutil.rmtree(path)
                self._say(f"removed {path.name}: a {operation} of {_title(name)} was cut short")


def load(
    run_dir: str | Path, state: PyTree, identity: Identity, *, step: int | None = None
) -> Restored:
    """The newest checkpoint of a run, or that of one step, without touching its folder.

    Only the arrays that the abstract state names are read, so that moments can be left out. One
    that is damaged is refused: an older one would be another model.
    """
    folder = folder_of(run_dir)

    def read(number: int) -> Restored:
        try:
            restored, manifest = _read(folder / str(number), state, identity, part=True)
        except archive.Damaged as damaged:
            raise UserError(_with_good_ones(folder, number, damaged)) from damaged
        return Restored(number, restored, manifest["metrics"], manifest["identity"])

    return reading(run_dir, lambda: chosen_step(run_dir, step), read)


def reading(run_dir: str | Path, choose: Callable[[], int], read: Callable[[int], T]) -> T:
    """The result of `read` for the step that `choose` returns; the run may be training meanwhile.

    Its folder is locked until then, so that a trainer leaves it there. A lock does not reach every
    other host: what is removed there meanwhile is given up, and chosen again.
    """
    folder = folder_of(run_dir)
    for _ in range(ATTEMPTS):
        step = hosts.broadcast("saved", choose)
        place = folder / str(step)
        try:
            with folder_lock(place, shared=True):
                return read(step)
        except Exception:
            if place.is_dir() or hosts.count() > 1:
                raise
    raise UserError(
        f"the checkpoints in {folder} are replaced faster than they can be read; a higher "
        "checkpoint.keep of the run that trains there keeps them longer"
    )


def chosen_step(run_dir: str | Path, step: int | None = None) -> int:
    """The newest step that a run has a checkpoint of, or the one requested, if it is there."""
    folder = folder_of(run_dir)
    steps = steps_in(folder)
    if not steps:
        raise UserError(f"no checkpoint in {folder}")
    if step is not None and step not in steps:
        raise UserError(f"no checkpoint at step {step} in {folder}; there are {_list(steps)}")
    return steps[-1] if step is None else step


def _with_good_ones(folder: Path, step: int, damaged: archive.Damaged) -> str:
    """The refusal of a damaged checkpoint, with those that could be used in its place."""
    what = f"{_title(str(step))} in {folder} is damaged ({damaged})"
    others = [other for other in steps_in(folder) if other != step]
    good = [other for other in others if not seal.broken(folder / str(other))]
    if not good:
        return f"{what}, and {'none of the others' if others else 'no other'} there is good"
    are = "step" if len(good) == 1 else "steps"
    return (
        f"{what}; good there: {are} {_list(good)}. Once {folder / str(step)} is moved away, step "
        f"{good[-1]} is used; a command that has --step takes --step {good[-1]}, too"
    )


def contents(run_dir: str | Path, name: str) -> dict[str, Any]:
    """The manifest of a checkpoint, or of the frozen arrays; arrays by name, shapes and dtypes."""
    folder = folder_of(run_dir)
    try:
        return archive.manifest(folder / name)
    except archive.Damaged as damaged:
        what = f"{_title(name)} in {folder} is damaged ({damaged})"
        if name != FROZEN:
            what = _with_good_ones(folder, int(name), damaged)
        raise UserError(what) from damaged


def load_frozen(
    run_dir: str | Path,
    arrays: PyTree,
    identity: Identity,
    *,
    part: bool = False,
    as_stored: bool = False,
) -> PyTree:
    """The frozen arrays of a run, or some of them, in the given shardings.

    It may have been stored in the precision of another device, and unless that is to be kept, is
    cast once it is checked.
    """
    folder = folder_of(run_dir) / FROZEN
    if not folder.exists():
        raise UserError(
            f"the frozen arrays in {folder} are gone; "
            "put back a copy of that folder, or start another run with run.dir"
        )
    try:
        stored = archive.agreed(folder)["arrays"]
        restored = _read(folder, _as_stored(arrays, stored), identity, part=part)[0]
        if as_stored:
            return restored
        return jax.tree.map(lambda x, to: x.astype(to.dtype), restored, arrays)
    except archive.Damaged as damaged:
        # No older copy exists, and made anew they could differ: nothing is renamed or replaced.
        raise UserError(
            f"the frozen arrays in {folder} are damaged ({damaged}); "
            "put back a copy of that folder, or start another run with run.dir"
        ) from damaged


def _kind(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _as_stored(arrays: PyTree, stored: dict[str, dict]) -> PyTree:
    """Abstract arrays, floating-point ones in the dtype that they were stored in."""

    def typed(path, x):
        dtype = jnp.dtype(stored.get(path, {}).get("dtype", x.dtype))
        is_float = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(x.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(x.shape, dtype if is_float else x.dtype, sharding=x.sharding)

    leaves = [typed(path, x) for path, x in named(arrays).items()]
    return jax.tree.unflatten(jax.tree.structure(arrays), leaves)


def folder_of(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"


def steps_in(folder: Path) -> list[int]:
    """The steps that have a folder here, oldest first."""
    folders = (path.name for path in folder.glob("*") if path.is_dir())
    return sorted(int(name) for name in folders if re.fullmatch(r"\d+", name))


def newest_step(run_dir: str | Path) -> int | None:
    """The newest step of a run that has a checkpoint."""
    return max(steps_in(folder_of(run_dir)), default=None)


def best_in(folder: Path, metric: str) -> int | None:
    """The step whose checkpoint was saved with the lowest value of a metric, if any has one."""
    values = {step: _metric(folder / str(step), metric) for step in steps_in(folder)}
    finite = [step for step in values if math.isfinite(values[step])]
    return min(finite, key=lambda step: (values[step], -step), default=None)


def best_step(run_dir: str | Path, metric: str) -> int | None:
    """The same, for those who use a run; a checkpoint that might be the best is not passed over."""
    folder = folder_of(run_dir)
    for step in steps_in(folder):
        try:
            archive.manifest(folder / str(step))
        except archive.Damaged as damaged:
            if (folder / str(step)).is_dir():  # and is not removed meanwhile
                raise UserError(_with_good_ones(folder, step, damaged)) from damaged
    return best_in(folder, metric)


def identity_in(run_dir: str | Path) -> Identity | None:
    """The identity in the newest readable checkpoint of a run, if there is any."""
    folder = folder_of(run_dir)
    for step in reversed(steps_in(folder)):
        try:
            return archive.manifest(folder / str(step))["identity"]
        except archive.Damaged:
            continue
    return None


def _read(
    folder: Path, target: PyTree, identity: Identity, *, part: bool = False
) -> tuple[PyTree, dict]:
    """The arrays and the manifest of a checkpoint, once its identity is known to be this run's."""
    manifest = archive.agreed(folder)
    title = _title(folder.name)
    _refuse_another_run(title, manifest["identity"], identity)
    _refuse_other_arrays(title, manifest["arrays"], named(target), part=part)
    return archive.read(folder, target, manifest["arrays"]), manifest


def _refuse_another_run(title: str, written: Identity, described: Identity) -> None:
    # Whoever reads only weights describes only what those depend on.
    keys = [key for key in described if written.get(key) != described[key]]
    if keys:
        there, here = (
            " and ".join(f"{key} {side.get(key, 'unknown')}" for key in keys)
            for side in (written, described)
        )
        raise UserError(
            f"{title} was written for {there}; this run describes {here}. "
            "Take the change back, or start another run with run.dir"
        )


def _refuse_other_arrays(title: str, written: dict, wanted: dict, *, part: bool) -> None:
    there = {name: f"{about['dtype']}{about['shape']}" for name, about in written.items()}
    here = {name: f"{array.dtype.name}{list(array.shape)}" for name, array in wanted.items()}
    differing = [
        f"  {name}  is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here"
        for name in {**there, **here}
        if there.get(name) != here.get(name) and not (part and name not in here)
    ]
    if differing:
        more = [f"  and {len(differing) - 8} more"] if len(differing) > 8 else []
        lines = [f"{title} holds other arrays than this run describes:", *differing[:8], *more]
        raise UserError("\n".join(lines))


def _refuse_if_only_damaged(folder: Path) -> None:
    if damaged := sorted(path.name for path in folder.glob(f"*{DAMAGED}*")):
        raise UserError(
            f"no good checkpoint is left in {folder}, only {_list(damaged)}; "
            "put back a copy of one, start another run with run.dir, or start again at step 0 once "
            f"`windlass runs --delete {folder.parent}` has deleted this one"
        )


def _superseded(folder: Path, keep: int, best: str) -> list[int]:
    """The steps that are neither among the newest nor the best."""
    steps = steps_in(folder)
    retained = {*steps[-keep:], best_in(folder, best)}
    return [step for step in steps if step not in retained]


def _metric(folder: Path, name: str) -> float:
    try:
        value = archive.manifest(folder)["metrics"].get(name, math.inf)
    except archive.Damaged:
        return math.inf
    return value if math.isfinite(value) else math.inf


def _remove_unread(folder: Path) -> None:
    """Remove a checkpoint, unless somebody reads it: then it goes after a later save."""
    with folder_lock(folder, shared=False) as is_free:
        if is_free:
            _remove(folder)


def _remove(folder: Path) -> None:
    # Renamed first: half a folder under a step's name would pass for a damaged checkpoint.
    going = folder.with_name(folder.name + REMOVING)
    os.rename(folder, going)
    shutil.rmtree(going)


def _title(name: str) -> str:
    return "the frozen arrays" if name == FROZEN else f"checkpoint at step {name}"


def _number(error: Exception) -> int | None:
    """The errno of a failure; TensorStore hides it in a paragraph."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return int(code[1]) if code else getattr(error, "errno", None)


def _list(items: Iterable[Any]) -> str:
    return ", ".join(str(item) for item in items)
