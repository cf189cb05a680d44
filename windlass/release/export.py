"""Export of a run: options, sizes, writing, comparing, pushing."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import equinox as eqx
import jax
from rich.console import Console

from windlass import adapters
from windlass.checkpoint import store
from windlass.config import listing, read, section, tree
from windlass.config.start import Weights
from windlass.data.progress import progress
from windlass.errors import UserError
from windlass.evaluation.finished_run import FinishedRun, open_on_cpu
from windlass.hub import peft, weights
from windlass.layers.names import named
from windlass.release import check as checking
from windlass.release import contents, folder, merge, push
from windlass.release.card import Form, SavedAt, Subject
from windlass.release.check import LogitDifference
from windlass.release.contents import ExportFile
from windlass.terminal import Terminal
from windlass.units import size
from windlass.version import __version__

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@section
class Options:
    """Options of an export."""

    weights: Weights = "last"
    step: int | None = None
    form: Form | None = None  # None: the adapter of a run that has one, else the model
    dtype: Literal["bfloat16", "float32", "as-is"] = "as-is"
    shard_size: str = "5GB"
    push: str | None = None
    private: bool = False
    dry_run: bool = False
    check: bool = False
    force: bool = False

    def __post_init__(self):
        wrong = []
        if not _bytes(self.shard_size):
            wrong.append(f"shard_size is {self.shard_size}; it must be a size such as 5GB or 500MB")
        if self.private and self.push is None:
            wrong.append("private is of what is pushed; push names that")
        if wrong:
            raise ValueError(*wrong)


@dataclass(frozen=True)
class Exported:
    """Result of an export, or of a dry run."""

    folder: Path
    form: Form
    step: int
    files: dict[str, int]  # sizes in bytes, by name
    comparison: LogitDifference | None = None
    address: str | None = None  # on the hub


def export(
    run: str | Path | None, to: str | Path, *, console: Console | None = None, **options: Any
) -> Exported:
    """Export a run's model as files that others load; `options` are those of `Options`."""
    chosen = read(Options, options, origin="the call")
    return Export(run, Path(to).expanduser(), chosen, console or _stderr())()


class Export:
    """One export, from its options to its result."""

    def __init__(self, run: str | Path | None, to: Path, options: Options, console: Console):
        self.to, self.options, self.console = to, options, console
        self.source = open_on_cpu(run, weights=options.weights, step=options.step)
        self.form: Form = _form(options.form, self.source)
        own = {"adapter": "float32", "own": contents.AS_IS}.get(self.form, self.source.dtype)
        self.dtype = own if options.dtype == contents.AS_IS else options.dtype

    def __call__(self) -> Exported:
        source, options = self.source, self.options
        at, planned = source.reading(self.planned)
        self.refuse_early(planned, at)
        if options.dry_run:
            return self.exported(planned, at.step)
        with source.scope():
            whole = self.form != "adapter" or options.check
            loaded, model = source.stored_model(frozen=whole)
            at = SavedAt(loaded.step, loaded.identity)
            files = list(self.files(model, at))
            with folder.written(self.to) as place:
                self.write(files, place)
            comparison = self.compared(model) if options.check else None
        address = None
        if options.push is not None and (comparison is None or comparison.good):
            address = push.push(self.to, options.push, options.private)
        return self.exported(files, at.step, comparison, address)

    def planned(self, step: int) -> tuple[SavedAt, list[ExportFile]]:
        """Files of the export before any array is read."""
        at = SavedAt(step, store.contents(self.source.folder, str(step))["identity"])
        return at, list(self.files(self.source.abstract, at))

    def refuse_early(self, planned: list[ExportFile], at: SavedAt) -> None:
        """Refuse what is known to fail before anything is read or written."""
        folder.check_vacant(self.to, self.options.force)
        if self.options.push is not None and not self.options.dry_run:
            push.check(self.options.push)
        if self.options.check:
            checking.check_possible(self.form, self.source)
        if not self.options.dry_run:
            needed = _total(planned)
            if self.form == "adapter" and self.options.check:
                needed += sum(4 * x.size for x in jax.tree.leaves(self.source.built.stages[0]))
            folder.check_room(self.to, needed, self.smaller(at))

    def files(self, model: Any, at: SavedAt, dtype: str | None = None) -> Iterator[ExportFile]:
        """Files of the export; an abstract model has the same names and sizes."""
        source, dtype = self.source, dtype or self.dtype
        if self.form == "adapter":
            yield from contents.adapter(source, model, self.base, dtype)
        else:
            tensors = merge.tensors if self.form == "merged" else weights.tensors
            yield from contents.whole(
                source,
                tensors(model, source.names),
                dtype,
                _bytes(self.options.shard_size),
                has_adapters=self.form == "own",
            )
        yield from contents.beside(source, self.subject(at))

    @property
    def base(self) -> str | None:
        """The model that an adapter belongs to, as whoever loads it can find it."""
        start = self.source.start
        if start.get("path") is None:
            return start.get("hub")
        # A folder of this machine is of use on it, and nobody else's business.
        return start["path"] if self.options.push is None else Path(start["path"]).name

    def subject(self, at: SavedAt) -> Subject:
        source, options = self.source, self.options
        return Subject(
            run=source.folder,
            recipe=tree(source.recipe),
            adapters=source.run.adapter,
            form=self.form,
            weights=options.weights,
            saved=at,
            title=(options.push or self.to.name).rpartition("/")[2],
            address=options.push or self.to.name,
            base=source.start.get("hub"),
            based_on=source.start.get("hub") or Path(source.start.get("path") or "BASE").name,
            is_known_elsewhere=self.form != "own" and source.has_hugging_face_form,
        )

    def write(self, files: list[ExportFile], into: Path) -> None:
        done = 0
        with progress(self.console, "writing", _total(files), of="bytes") as tell:
            for file in files:

                def wrote(count: int, name: str = file.name) -> None:
                    nonlocal done
                    done += count
                    tell(done, name)

                file.write(into, wrote)
        run = self.source.folder.name
        folder.mark(into, windlass=__version__, run=run, form=self.form)

    def compared(self, model: Any) -> LogitDifference:
        """The export as others load it, beside the run's own model with numbers as written."""
        source = self.source
        tokens = checking.random_tokens(source.run.model.vocab)
        if self.form == "adapter":
            own = checking.rounded(peft.own(model), self.dtype)
            ours = checking.logits(eqx.combine(own, checking.rounded(model, "float32")), tokens)
            with self.base_beside(model) as base:
                return checking.compare(self.to, base, tokens, ours, source.vocabulary)
        if self.form == "merged" and self.dtype != "float32":
            model = adapters.merged(model)  # what is rounded is the sum
        ours = checking.logits(checking.rounded(model, self.dtype), tokens)
        return checking.compare(self.to, None, tokens, ours, source.vocabulary)

    @contextmanager
    def base_beside(self, model: Any) -> Iterator[Path]:
        """The model that the adapter belongs to, from the run: where it came from may be gone."""
        plain = weights.tensors(adapters.plain(model), self.source.names)
        with TemporaryDirectory(prefix=f".{self.to.name}.base-", dir=self.to.parent) as place:
            for file in contents.whole(self.source, plain, "float32", 10**12):
                file.write(Path(place), lambda count: None)
            yield Path(place)

    def smaller(self, at: SavedAt) -> str:
        """Advice on what takes less room, if anything does."""
        less = []
        if self.form == "adapter":
            less += ["without --check"] if self.options.check else []
        elif self.dtype == "float32":
            total = _total(self.files(self.source.abstract, at, "bfloat16"))
            less.append(f"--dtype bfloat16 takes {size(total)}")
        if self.form == "merged" and not _not_alone(self.source):
            less.append("--as adapter takes next to nothing")
        return "".join(f"; {one}" for one in less)

    def exported(
        self,
        files: list[ExportFile],
        step: int,
        comparison: LogitDifference | None = None,
        address: str | None = None,
    ) -> Exported:
        sizes = {file.name: file.size for file in files}
        return Exported(self.to, self.form, step, sizes, comparison, address)


def _form(requested: Form | None, source: FinishedRun) -> Form:
    chosen = source.run.adapter
    if not chosen:
        if requested not in (None, "model"):
            raise UserError(f"{source.folder} trained no adapter; --as model is what there is")
        return "model"
    why, is_own = _not_alone(source), any(one.exports == "own" for one in chosen)
    form = requested or ("own" if is_own else "merged" if why else "adapter")
    if form == "model":
        raise UserError(
            f"{source.folder} trained an adapter; --as adapter exports it alone, --as merged the "
            "model with it, --as own both as they are, for Windlass alone"
        )
    if form == "adapter" and why:
        raise UserError(f"{why}; --as merged has it all")
    return form


def _not_alone(source: FinishedRun) -> str | None:
    """Reason that a run's adapter cannot be a PEFT folder, beside the model it started from."""
    family, *others = (_kind(one) for one in (source.run.model, *source.run.adapter))
    if len(others) > 1:
        trained = listing(others, "and")
        return f"{source.folder} trained {trained}, and PEFT has one adapter a folder"
    if source.run.adapter[0].exports != "peft":
        return f"PEFT has no adapters like {others[0]}"
    if not source.has_hugging_face_form:
        return f"PEFT has no adapters for models like {family}"
    if more := _beside_the_adapter(source):
        return (
            f"{source.folder} trained more than its adapter, {more[0]} to begin with, which would "
            "be missing"
        )


def _beside_the_adapter(source: FinishedRun) -> list[str]:
    """The weights of the model itself that a run with an adapter trained."""
    mask, own = source.built.trainable.mask, adapters.own(source.built.abstract)
    both = zip(named(mask), jax.tree.leaves(own), strict=True)
    return [name for (name, is_trained), is_own in both if is_trained and not is_own]


def _kind(section: Any) -> str:
    return type(section).__module__.rpartition(".")[2]


def _total(files: Iterable[ExportFile]) -> int:
    return sum(file.size for file in files)


def _bytes(text: str) -> int:
    """Bytes of a size such as 5GB; 0 where it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)", text, re.IGNORECASE)
    return int(float(match[1]) * UNITS[match[2].upper()]) if match else 0


def _stderr() -> Console:
    return Terminal(stderr=True, soft_wrap=True)
