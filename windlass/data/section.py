"""The data section of a recipe: sources, and the sequences that are made of them."""

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any

from windlass.columns import Column, length_of, listed, sized
from windlass.config import Open, listing, section, tree
from windlass.config.sections import default, fields
from windlass.data.checks import Checks
from windlass.data.corpus import Part, under
from windlass.data.mix import CYCLE
from windlass.data.pack import COLUMNS, Packing
from windlass.data.teacher import Teacher
from windlass.errors import UserError
from windlass.formats import Longer

SOURCES = Open("windlass.sources", tag="kind", attribute="Source")
FORMATS = Open("windlass.formats", tag="kind", attribute="Format", usual="text")
USUAL_LENGTH = 1024
# Keys that blocks leave alone.
OF_DOCUMENTS = ("format", "longer", "checks", "stride", "packing", "teacher")


@section
class Data:
    """Training data: sources, packing into sequences, and held-out splits."""

    source: Annotated[Any, SOURCES] | None = None  # where the data comes from, if from one place
    # in place of source, several: each is drawn in proportion to its weight, beginning again where
    # it ends; an epoch is as many sequences as they have together
    mixture: tuple[Annotated[Any, SOURCES], ...] | None = None
    # how an example becomes text, and what of it is trained on
    format: Annotated[Any, FORMATS] = field(default_factory=FORMATS.load("text"))
    length: int = 0  # tokens in a sequence; 0: 1024, or those that the rows of blocks have
    # documents longer than a sequence: split over several, cut, or dropped; null: split as
    # text, and dropped where a part of a document is no use
    longer: Longer | None = None
    # checks of every example; null: none of text, and otherwise empty examples are dropped and
    # duplicates are reported
    checks: Checks | None = None
    # long documents: tokens from the start of a sequence to that of the next; null: length. Where
    # they overlap, training counts a token in each of them, and evaluation in the first alone
    stride: int | None = None
    packing: Packing = "documents"  # none: one document, or a piece of one, in each sequence
    shuffle: bool = True  # anew in every epoch
    # the share of documents held out, of every source; of a single document its end
    validation: float = 0.0
    test: float = 0.0  # a second share, for `windlass evaluate --split test`
    split_seed: int = 0  # seed of the draw of these documents
    # the cache of a teacher to learn from, beside the sequences; null: none
    teacher: Teacher | None = None
    workers: int = 0  # processes that make batches; 0: a thread of this one does
    # batches made ahead of their use, at least one by each worker; 0: each when it is needed
    prefetch: int = 4
    cache: str | None = None  # null: $WINDLASS_CACHE, or ~/.cache/windlass

    def __post_init__(self):
        wrong = [*self._wrong_sources()]
        if not self.length:
            is_known = not wrong and self.has_blocks
            length = length_of(self.parts[0].source.columns) if is_known else USUAL_LENGTH
            object.__setattr__(self, "length", length)
        wrong += [*self._wrong_numbers()]
        if wrong:
            raise ValueError(*wrong)

    @property
    def has_blocks(self) -> bool:
        """Presence of blocks: rows are trained on as sources have them, not made of documents."""
        return any(part.source.yields == "blocks" for part in self.parts)

    @property
    def is_streamed(self) -> bool:
        """Streaming: documents arrive in parts while a run trains."""
        return any(part.source.is_streamed for part in self.parts)

    @property
    def columns(self) -> dict[str, Column]:
        """The columns of a batch, by name; of blocks known without reading a row."""
        if not self.has_blocks:
            taught = {} if self.teacher is None else self.teacher.columns
            return sized(COLUMNS | dict(self.format.columns) | taught, self.length)
        first, *others = self.parts
        with under(first.key):
            columns = first.source.columns
        for part in others:
            with under(part.key):
                if (own := part.source.columns) != columns:
                    raise UserError(
                        f"{part.key} has rows of {listed(own)}, and {first.key} of "
                        f"{listed(columns)}; the parts of a mixture have equal columns"
                    )
        if self.length != (has := length_of(columns)):
            raise UserError(
                f"data.length is {self.length}, and the rows of {first.key} are {has} long; "
                f"data.length={has} would do, or leave it out"
            )
        return columns

    def holds_out(self, split: str) -> bool:
        """Presence of a split beside training: a share of all rows, or a source's own rows."""
        own = self.has_blocks and any(split in part.source.held_out for part in self.parts)
        return own or bool(getattr(self, split))

    @property
    def hashed(self) -> tuple[str, ...]:
        """The columns that the token hash of a run is over."""
        return self.parts[0].source.hashed if self.has_blocks else ("tokens",)

    @property
    def parts(self) -> list[Part]:
        """Each source with its key and its weight."""
        if self.mixture is None:
            assert self.source is not None
            return [Part("data.source", self.source, 1.0, 1.0)]
        weights = [1.0 if source.weight is None else source.weight for source in self.mixture]
        return [
            Part(f"data.mixture.{number}", source, weight, weight / (sum(weights) or 1.0))
            for number, (source, weight) in enumerate(zip(self.mixture, weights, strict=True))
        ]

    @property
    def lengthy(self) -> Longer:
        """Treatment of documents that are longer than a row."""
        return self.longer or self.format.longer

    def _wrong_sources(self) -> Iterator[str]:
        if self.mixture is None and self.source is None:
            kinds = listing(SOURCES.names())
            yield f"source is required: a section with kind: {kinds}; or mixture, a list of these"
            return
        if self.mixture is not None and self.source is not None:
            yield "mixture is given, and source too; data.source=null leaves one of them out"
            return
        if self.mixture == ():
            yield "mixture is empty; it is a list of sources, each with a weight"
            return
        wrong = []
        for part in self.parts:
            name, source = part.key.removeprefix("data."), part.source
            if source.limit is not None and source.limit < 1:
                wrong.append(f"{name}.limit is {source.limit}; it must be 1 or more")
            if source.weight is not None and self.mixture is None:
                wrong.append(f"{name}.weight is {source.weight:g}; it is for parts of a mixture")
            elif source.weight is not None and source.weight <= 0:
                wrong.append(f"{name}.weight is {source.weight:g}; it must be above 0")
        wrong += [*self._wrong_blocks(), *self._wrong_stream()]
        yield from wrong
        for number, part in enumerate(self.parts):
            if not wrong and part.share * CYCLE < 1:
                yield (
                    f"mixture.{number}.weight is {part.weight:g}, {part.share:.1g} of all weights; "
                    f"a part has one row in {CYCLE:,} or more"
                )

    def _wrong_blocks(self) -> Iterator[str]:
        """Conflicts with rows that are trained on as they are."""
        if not self.has_blocks:
            return
        for part in self.parts:
            if part.source.yields != "blocks":
                name = part.key.removeprefix("data.")
                what = f"{name} has {part.source.yields}, and another part has blocks"
                yield f"{what}; a mixture is of one or the other"
            elif both := [name for name in part.source.held_out if getattr(self, name)]:
                what = f"is {getattr(self, both[0])}, and {part.key} has {both[0]} rows of its own"
                yield f"{both[0]} {what}; leave one of them out"
        for name, (one, _) in fields(Data).items():
            if name in OF_DOCUMENTS and getattr(self, name) != default(one):
                value = tree(getattr(self, name))
                yield f"{name} is {value}; it is for documents, and rows of blocks stay as they are"

    def _wrong_stream(self) -> Iterator[str]:
        """Conflicts with documents of which most are not there when a run begins."""
        if not self.is_streamed:
            return
        if self.mixture is not None:
            number = next(i for i, part in enumerate(self.parts) if part.source.is_streamed)
            what = f"mixture.{number}.stream is true; a stream is data.source, and not a part of a"
            yield f"{what} mixture: without stream it is downloaded before the run"
        if self.teacher is not None:
            yield (
                "teacher is given, and source.stream is true; a teacher's cache is of rows that "
                "are all there: source.stream=false downloads them before the run"
            )
        elif self.format.columns:
            yield (
                f"format has the column {listing(self.format.columns, 'and')}, which is computed "
                "of all rows before training, and source.stream is true; source.stream=false "
                "downloads them before the run"
            )

    def _wrong_numbers(self) -> Iterator[str]:
        if self.cache is not None and "://" in self.cache:
            yield f"cache is {self.cache}; it is a folder: that of a mounted bucket would do"
        if self.length < 1:
            yield f"length is {self.length}; a row holds at least 1 token"
        elif self.stride is not None and not 1 <= self.stride <= self.length:
            yield (
                f"stride is {self.stride}; it is 1 to length ({self.length}), beyond which tokens "
                "would be left out"
            )
        if self.format.together > 1 and self.lengthy != "drop":
            what = "documents that belong together stay whole: drop would do"
            yield f"longer is {self.longer}; {what}"
        if self.stride is not None and self.lengthy != "split":
            yield (
                f"stride is {self.stride}; it is for documents that are split over rows, and "
                f"longer ones are {'cut' if self.lengthy == 'cut' else 'dropped'}: "
                "data.longer=split splits them"
            )
        for name in ("workers", "prefetch", "split_seed"):
            if getattr(self, name) < 0:
                yield f"{name} is {getattr(self, name)}; it must be 0 or more"
        shares = {name: getattr(self, name) for name in ("validation", "test")}
        outside = [name for name, share in shares.items() if not 0 <= share < 1]
        for name in outside:
            yield f"{name} is {shares[name]}; it is a share, from 0 to below 1"
        if not outside and sum(shares.values()) >= 1:
            yield (
                f"validation is {self.validation} and test is {self.test}; "
                "together they leave nothing to train on"
            )
