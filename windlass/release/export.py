"""Exporting: what is asked for, what that takes, writing it, comparing it, pushing it."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

import windlass
from windlass.config import read, section, tree
from windlass.data.progress import progress
from windlass.errors import UserError
from windlass.release import check as checking
from windlass.release import contents, folder, push
from windlass.release.card import Form, Subject
from windlass.release.check import Comparison
from windlass.release.contents import File
from windlass.release.source import Source
from windlass.run import Weights
from windlass.telemetry.console import size
from windlass.training import runs

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@section
class Options:
    """What is exported of a run, and how."""

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
        if _bytes(self.shard_size) is None:
            wrong.append(f"shard_size is {self.shard_size}; it must be a size such as 5GB or 500MB")
        if self.private and self.push is None:
            wrong.append("private is of what is pushed; push names that")
        if wrong:
            raise ValueError(*wrong)


@dataclass(frozen=True)
class Exported:
    """What was written, or in a dry run would be."""

    folder: Path
    form: Form
    step: int
    files: dict[str, int]  # sizes in bytes, by name
    comparison: Comparison | None = None
    address: str | None = None  # on the hub


def export(
    run: str | Path | None, to: str | Path, *, console: Console | None = None, **options: Any
) -> Exported:
    """Write what a run has learned as files that others load; `options` are those of `Options`."""
    asked = read(Options, options, origin="the call")
    return Export(run, Path(to).expanduser(), asked, console or _stderr())()


class Export:
    """One export, from what is asked for to what came of it."""

    def __init__(self, run: str | Path | None, to: Path, asked: Options, console: Console):
        self.to, self.asked, self.console = to, asked, console
        self.source = Source(runs.find(run), asked.weights, asked.step)
        self.form: Form = _form(asked.form, self.source)
        self.dtype = self.source.dtype if asked.dtype == "as-is" else asked.dtype

    def __call__(self) -> Exported:
        planned = list(self.files(self.source.abstract, self.source.step))
        self.refuse_early(planned)
        if self.asked.dry_run:
            return self.exported(planned, self.source.step)
        step, model = self.source.load(self.say)
        files = list(self.files(model, step))
        with folder.written(self.to) as place:
            self.write(files, place)
        comparison = self.compared(model) if self.asked.check else None
        address = None
        if self.asked.push is not None and (comparison is None or comparison.good):
            address = push.push(self.to, self.asked.push, self.asked.private)
        return self.exported(files, step, comparison, address)

    def refuse_early(self, planned: list[File]) -> None:
        """Whatever can be known to fail fails before anything is read or written."""
        folder.check_vacant(self.to, self.asked.force)
        if self.asked.push is not None and not self.asked.dry_run:
            push.check(self.asked.push)
        if self.asked.check:
            checking.check_possible(self.form, self.source.run.model)
        if not self.asked.dry_run:
            folder.check_room(self.to, _total(planned), self.smaller())

    def files(self, model: Any, step: int, dtype: str | None = None) -> Iterator[File]:
        """What the export is made of; an abstract model tells the same names and sizes."""
        largest = _bytes(self.asked.shard_size)
        assert largest is not None
        yield from contents.whole(self.source, model, dtype or self.dtype, largest)
        yield from contents.beside(self.source, self.subject(step))

    def subject(self, step: int) -> Subject:
        source, asked = self.source, self.asked
        return Subject(
            run=source.folder,
            recipe=tree(source.recipe),
            form=self.form,
            weights=asked.weights,
            step=step,
            title=(asked.push or self.to.name).rpartition("/")[2],
            address=asked.push or self.to.name,
            base=source.base,
            is_known_elsewhere=source.names is not None,
        )

    def write(self, files: list[File], into: Path) -> None:
        done = 0
        with progress(self.console, "writing", _total(files), of="bytes") as tell:
            for file in files:

                def wrote(count: int, name: str = file.name) -> None:
                    nonlocal done
                    done += count
                    tell(done, name)

                file.write(into, wrote)
        run = self.source.folder.name
        folder.mark(into, windlass=windlass.__version__, run=run, form=self.form)

    def compared(self, model: Any) -> Comparison:
        source = self.source
        tokens = checking.random_tokens(source.run.model.vocab)
        with source.built.described.scope():
            ours = checking.logits(checking.rounded(model, self.dtype), tokens)
        return checking.compare(self.to, None, tokens, ours, source.tokeniser)

    def smaller(self) -> str:
        """What would take less room, if anything would."""
        if self.dtype != "float32" or self.form == "adapter":
            return ""
        less = _total(self.files(self.source.abstract, self.source.step, "bfloat16"))
        return f"; --dtype bfloat16 takes {size(less)}"

    def exported(
        self,
        files: list[File],
        step: int,
        comparison: Comparison | None = None,
        address: str | None = None,
    ) -> Exported:
        sizes = {file.name: file.size for file in files}
        return Exported(self.to, self.form, step, sizes, comparison, address)

    def say(self, text: str) -> None:
        self.console.print(Text(text))


def _form(asked: Form | None, source: Source) -> Form:
    has_adapter = source.adapter is not None
    form = asked or ("adapter" if has_adapter else "model")
    if has_adapter and form == "model":
        raise UserError(
            f"{source.folder} trained an adapter; --as adapter exports it alone, --as merged the "
            "model with it"
        )
    if not has_adapter and form != "model":
        raise UserError(f"{source.folder} trained no adapter; --as model is what there is")
    return form


def _total(files: Iterable[File]) -> int:
    return sum(file.size for file in files)


def _bytes(text: str) -> int | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)", text, re.IGNORECASE)
    return int(float(found[1]) * UNITS[found[2].upper()]) if found else None


def _stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)
