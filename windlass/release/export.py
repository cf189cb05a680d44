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

from windlass import adapters, markup
from windlass.adapters.lora import Adapter as LoraSection
from windlass.checkpoint import store
from windlass.config import listing, read, section, tree
from windlass.config.start import Weights
from windlass.data.progress import progress
from windlass.errors import UserError
from windlass.evaluation.finished_run import FinishedRun, open_on_cpu
from windlass.hub import peft, weights
from windlass.layers.names import named
from windlass.release import check as checking
from windlass.release import (
    contents,
    folder,
    gguf_check,
    gguf_file,
    gguf_model,
    low_bit,
    merge,
    push,
    put_back,
)
from windlass.release.card import ADAPTERS_ALONE, Form, SavedAt, Subject
from windlass.release.check import LogitDifference
from windlass.release.contents import ExportFile
from windlass.release.gguf_file import GgufFile
from windlass.release.gguf_types import OF_DTYPE, Quantization
from windlass.terminal import Terminal
from windlass.units import size
from windlass.version import __version__

# Where no dtype is asked for, and it is not that of the start.
OWN_DTYPES = {
    "adapter": "float32",
    "gguf-adapter": "float32",
    "own": contents.AS_IS,
    "low-bit": contents.AS_IS,
}
SMALLEST_FLOAT = 16  # bits
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@section
class Options:
    """Options of an export."""

    weights: Weights = "last"
    step: int | None = None
    form: Form | None = None  # None: the adapter of a run that has one, else the model
    dtype: Literal["bfloat16", "float16", "float32", "as-is"] = "as-is"
    quantize: Quantization | None = None  # of a GGUF file; None: the type that dtype is
    shard_size: str = "5GB"
    license: str | None = None  # of the card; None: that of the model it started from
    push: str | None = None
    private: bool = False
    dry_run: bool = False
    check: bool = False
    force: bool = False

    def __post_init__(self):
        wrong = []
        if not _bytes(self.shard_size):
            wrong.append(f"shard_size is {self.shard_size}; it must be a size such as 5GB or 500MB")
        if self.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", self.license):
            wrong.append(
                f"license is {self.license}; it is an identifier of the hub, such as apache-2.0, "
                "mit, llama3.2 or other"
            )
        if self.private and self.push is None:
            wrong.append("private is of what is pushed; push names that")
        if self.quantize is not None and self.form != "gguf":
            wrong.append("quantize is of a GGUF file; --as gguf writes one")
        elif self.quantize is not None and self.dtype != contents.AS_IS:
            wrong.append(f"quantize is {self.quantize}, and dtype says {self.dtype}; leave one out")
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
    bits_per_weight: float | None = None  # of quantized linear maps

    def _repr_html_(self) -> str:
        """Table of its files, for a notebook."""
        files = [(name, size(count)) for name, count in self.files.items()]
        lines = [("export", f"{self.form} of step {self.step:,} in {self.folder}"), *files]
        if self.comparison is not None:
            lines.append(("check", str(self.comparison)))
        return markup.facts(lines)


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
        own = OWN_DTYPES.get(self.form, self.source.dtype)
        self.dtype = own if options.dtype == contents.AS_IS else options.dtype

    def __call__(self) -> Exported:
        source, options = self.source, self.options
        at, planned = source.reading(self.planned)
        self.refuse_early(planned, at)
        if options.dry_run:
            return self.exported(planned, at.step)
        with source.scope():
            whole = self.form not in ADAPTERS_ALONE or options.check
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
        subject = self.subject(at)
        if subject.is_gguf:
            yield from contents.gguf(source, self.gguf(model, dtype), subject)
            return
        if self.form == "adapter":
            whole = _beside_the_adapter(source)
            yield from contents.adapter(source, model, self.base, dtype, whole)
        else:
            own = {"own": weights.tensors, "low-bit": low_bit.tensors}
            tensors = own.get(self.form, merge.tensors)(model, source.names)
            is_known = self.form in ("model", "merged") and source.has_hugging_face_form
            yield from contents.whole(
                source,
                put_back.put_back(source, tensors) if is_known else tensors,
                dtype,
                _bytes(self.options.shard_size),
                has_adapters=self.form in ("own", "low-bit"),
            )
        yield from contents.beside(source, subject)

    def gguf(self, model: Any, dtype: str | None = None) -> GgufFile:
        """The GGUF file of the model, or of its adapter."""
        source, dtype = self.source, dtype or self.dtype
        if self.form == "gguf-adapter":
            return gguf_model.adapter(source, model, self.title, dtype)
        quantization = self.options.quantize or OF_DTYPE[dtype]
        length = contents.config_json(source, dtype)["max_position_embeddings"]
        return gguf_model.whole(source, model, self.title, quantization, length)

    @property
    def title(self) -> str:
        return (self.options.push or self.to.name).rpartition("/")[2]

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
            title=self.title,
            address=options.push or self.to.name,
            base=source.start.get("hub"),
            based_on=source.start.get("hub") or Path(source.start.get("path") or "BASE").name,
            is_known_elsewhere=self.form not in ("own", "low-bit") and source.has_hugging_face_form,
            license=options.license,
            has_scores=bool(source.run.objective.scores),
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
        if self.form == "gguf":
            about = contents.config_json(source, "float32")
            return gguf_check.compare(self.to, self.gguf(model), source, about)
        tokens = checking.random_tokens(source.run.model.vocab)
        if self.form == "adapter":
            own = checking.rounded(peft.own(model, _beside_the_adapter(source)), self.dtype)
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
        plain = merge.tensors(adapters.plain(model), self.source.names)
        with TemporaryDirectory(prefix=f".{self.to.name}.base-", dir=self.to.parent) as place:
            for file in contents.whole(self.source, plain, "float32", 10**12):
                file.write(Path(place), lambda count: None)
            yield Path(place)

    def smaller(self, at: SavedAt) -> str:
        """Advice on what takes less room, if anything does."""
        less = []
        if self.form == "adapter":
            less += ["without --check"] if self.options.check else []
        elif self.form == "gguf":
            less += [] if self.options.quantize else ["--quantize q8_0 takes about half of f16"]
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
        return Exported(self.to, self.form, step, sizes, comparison, address, self.bits(files))

    def bits(self, files: list[ExportFile]) -> float | None:
        """Bits a weight of the linear maps, where they are quantized."""
        found = next((file.bits for file in files if file.bits is not None), None)
        if self.form == "low-bit":
            found = low_bit.bits(self.source.abstract, self.source.names)
        return found.per_weight if found and found.per_weight < SMALLEST_FLOAT else None


def _form(requested: Form | None, source: FinishedRun) -> Form:
    if requested in ("gguf", "gguf-adapter"):
        gguf_file.check_installed()
        gguf_model.architecture(source)
    chosen = source.run.adapter
    if not chosen:
        if requested not in (None, "model", "gguf"):
            raise UserError(
                f"{source.folder} trained no adapter; --as model and --as gguf are what there is"
            )
        return requested or "model"
    why, has_codes = _not_alone(source), low_bit.has_codes(source.abstract, source.names)
    form = requested or _usual(source, has_codes=has_codes, is_whole=why is not None)
    if form == "model":
        raise UserError(
            f"{source.folder} trained an adapter; --as adapter exports it alone, --as merged the "
            "model with it, --as own both as they are, for Windlass alone"
        )
    if form == "own" and source.run.base is not None:
        raise UserError(
            f"{source.folder} has a base in {source.run.base.kind}, stored in a run alone; "
            "--as merged writes the model as matrices, --as adapter what was trained"
        )
    if form == "adapter" and why:
        raise UserError(f"{why}; --as merged has it all")
    if form == "gguf-adapter" and (why := _not_alone(source, "llama.cpp") or _no_lora(source)):
        raise UserError(f"{why}; --as gguf has it all")
    if form == "low-bit" and not has_codes:
        trained = listing([_kind(one) for one in chosen], "and")
        raise UserError(
            f"{source.folder} trained {trained}, without codes of a few bits to pack; --as own "
            "writes all arrays as they are"
        )
    return form


def _usual(source: FinishedRun, *, has_codes: bool, is_whole: bool) -> Form:
    """The form of a run with adapters where none is requested."""
    if has_codes:
        return "low-bit"
    if any(one.exports == "own" for one in source.run.adapter):
        return "own"
    return "merged" if is_whole else "adapter"


def _no_lora(source: FinishedRun) -> str | None:
    """Reason that llama.cpp has no such adapter, though PEFT has."""
    (adapter,) = source.run.adapter
    if not isinstance(adapter, LoraSection):
        return f"llama.cpp has no adapters like {_kind(adapter)}"
    if adapter.dora:
        return "llama.cpp has no DoRA (adapter.dora)"
    if adapter.tokens or adapter.head_tokens:
        return "llama.cpp has no trained rows of tokens (adapter.tokens and head_tokens)"
    several = "llama.cpp has one rank and alpha for all (adapter.groups, layers and exclude)"
    return None if adapter.is_even else several


def _not_alone(source: FinishedRun, who: str = "PEFT") -> str | None:
    """Reason that a run's adapter cannot be a file beside the model it started from."""
    family, *others = (_kind(one) for one in (source.run.model, *source.run.adapter))
    if len(others) > 1:
        trained = listing(others, "and")
        return f"{source.folder} trained {trained}, and {who} has one adapter a folder"
    if source.run.adapter[0].exports != "peft":
        return f"{who} has no adapters like {others[0]}"
    if not source.has_hugging_face_form:
        return f"{who} has no adapters for models like {family}"
    more = _beside_the_adapter(source)
    if who == "PEFT":
        more = [x for x in more if not peft.is_saved(source.abstract, x, source.names)]
    if more:
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
