"""Data sets of the Hugging Face hub, or a folder laid out like one, through `datasets`."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any

from windlass import seal
from windlass.config import listing, section
from windlass.config.reading import closest
from windlass.errors import UserError
from windlass.hub.download import RemoteFile
from windlass.hub.fetch import fetch
from windlass.hub.row_stream import RowStream
from windlass.sources import Records

PARTS = "a part of one is written train[:10%] or train[100:200]"
COMMIT = re.compile("[0-9a-f]{40}")
OF_STREAMS = ("stream", "part_tokens", "keep_parts")  # keys that change no document
PLACES = ("name", "version", "data_dir", "data_files", "description")  # of a builder's settings
ABOUT = "source.json"  # of a stream's folder: the files of the split, and how they are read


@section
class Source(Records):
    """Rows of one split, in the cache of the `datasets` library."""

    name: str  # OWNER/NAME, or a folder of Parquet, JSON Lines or CSV files
    configuration: str | None = None  # name of the data set's configuration; null: its only one
    split: str = "train"  # or a part of it, such as train[:10%]
    revision: str | None = None  # a branch, a tag or a commit; null: the newest
    # columns to keep, each under the name it is to have: {question: prompt}; null: all
    columns: dict[str, str] | None = None
    # streaming: train on one part of the documents while the next one arrives
    stream: bool = False
    part_tokens: int = 50_000_000  # with stream: tokens in a part, which is shuffled by itself
    # with stream: parts kept behind the one that is trained on; older ones are deleted, and
    # downloaded again where they are needed; null: all
    keep_parts: int | None = None

    def __post_init__(self):
        wrong = []
        if self.part_tokens < 1:
            wrong.append(f"part_tokens is {self.part_tokens}; a part has 1 token or more")
        if self.keep_parts is not None and self.keep_parts < 1:
            wrong.append(
                f"keep_parts is {self.keep_parts}; 1 or more parts are kept, for a run that is "
                "stopped goes back to its last checkpoint"
            )
        elif self.keep_parts is not None and not self.stream:
            wrong.append(f"keep_parts is {self.keep_parts}; it is for stream: true")
        if self.stream and re.search(r"[\[+]", self.split):
            wrong.append(
                f"split is {self.split}; a stream is of one whole split: limit has its first rows"
            )
        if wrong:
            raise ValueError(*wrong)

    @property
    def is_streamed(self) -> bool:
        return self.stream

    @property
    def total(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self.name} {self.split} row {index + 1:,}"

    def described(self) -> dict[str, Any]:
        place, every = self._folder, Records.described(self)
        plain = {name: value for name, value in every.items() if name not in OF_STREAMS}
        return plain | ({"name": str(place.resolve())} if place else {})

    def fingerprint(self) -> str:
        values: list[Any] = [self.described()]
        if self.stream and not self._folder:
            values = [self.described() | {"revision": self.commit}]
        # A commit never changes, so that the hub need not be contacted.
        elif self._folder or not COMMIT.fullmatch(self.revision or ""):
            builder = self._builder
            values += [builder.config_id, str(builder.config.version), builder.hash]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @cached_property
    def commit(self) -> str | None:
        """Commit of the repository; None of a folder."""
        if self._folder:
            return None
        if self.revision and COMMIT.fullmatch(self.revision):
            return self.revision
        return self._fetched.revision

    def at(self, commit: str) -> "Source":
        """The same rows at a commit."""
        return replace(self, revision=commit)

    def identity(self) -> str:
        """Identity of the rows: a commit, or the names and sizes of the files of a folder."""
        place, values = self._folder, self.described() | {"revision": self.commit}
        if place:
            files = [Path(name) for name in self._split_files(self._builder)]
            values["name"] = [[str(_below(place, one)), one.stat().st_size] for one in files]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def open(self, folder: Path, say: Callable[[str], None], stop: Event) -> RowStream:
        """The stream of rows; `folder` remembers the files of a commit, and has those that come."""
        about = folder / ABOUT
        try:
            known = seal.opened(about)
        except (FileNotFoundError, ValueError):
            builder = self._builder
            known = {
                "files": self._split_files(builder),
                "module": builder.name,
                "options": _options(builder.config),
            }
            seal.write_signed(about, known)
        place = self._folder
        files = [Path(name) if place else self._remote(name) for name in known["files"]]
        return RowStream(files, known["module"], known["options"], folder / "files", say, stop)

    def chosen(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row of the stream with the columns that are to be kept, under their names."""
        if self.columns is None:
            return row
        for name, column in self.columns.items():
            if column not in row:
                raise self._without_column(name, column, list(row))
        return {name: row[column] for name, column in self.columns.items()}

    def _remote(self, name: str) -> RemoteFile:
        """A file of the repository, by the URL that its builder has."""
        assert self.commit is not None
        return RemoteFile(self.name, self.commit, name.partition(f"@{self.commit}/")[2])

    def _split_files(self, builder: Any) -> list[str]:
        files = builder.config.data_files or {}
        names = [str(name) for name in files]
        if self.split not in names:
            meant = closest(self.split, names)
            hint = f"did you mean {meant}? " if meant else ""
            raise UserError(
                f"data.source.split is {self.split}; {hint}{self.name} has {listing(names, 'and')}"
            )
        return [str(one) for one in files[self.split]]

    @cached_property
    def _fetched(self) -> Any:
        return fetch(
            self.name, self.revision, ["README.md"], kind="dataset", key="data.source.name"
        )

    @property
    def _folder(self) -> Path | None:
        place = Path(self.name).expanduser()
        return place if place.is_dir() else None

    @cached_property
    def _builder(self) -> Any:
        """The `datasets` builder, which reads the files; no code of a data set is ever executed."""
        library = _library()
        if self._folder:
            return self._built(library, str(self._folder), {})
        fetched = self._fetched
        try:
            return self._built(library, self.name, {"revision": fetched.revision})
        except ConnectionError:
            # What was fetched by other means is in the hub's own cache, which is a folder too.
            try:
                return self._built(library, str(fetched.folder), {})
            except FileNotFoundError:
                raise UserError(
                    f"data.source.name is {self.name}; the hub cannot be reached from here, and "
                    f"its files are not in {fetched.folder}. Where there is a connection, "
                    f"`hf download {self.name} --repo-type dataset --local-dir FOLDER` makes a "
                    "folder that data.source.name can be"
                ) from None

    def _built(self, library: Any, place: str, at: dict[str, str]) -> Any:
        try:
            return library.load_dataset_builder(place, self.configuration, **at)
        except ValueError as wrong:
            has = library.get_dataset_config_names(place, **at)
            if self.configuration in has:
                raise UserError(f"data.source.name is {self.name}; {_first(wrong)}") from None
            configuration = f"data.source.configuration is {self.configuration or 'null'}"
            raise UserError(f"{configuration}; {self.name} has {listing(has, 'and')}") from None
        except FileNotFoundError as wrong:
            if self._folder is None:
                raise
            raise UserError(
                f"data.source.name is {self.name}, a folder that is no data set "
                f"({_first(wrong)}); one holds Parquet, JSON Lines or CSV files"
            ) from None

    @cached_property
    def _rows(self) -> Any:
        builder, library = self._builder, _library()
        try:
            builder.download_and_prepare()
        except (library.exceptions.DatasetGenerationError, ValueError, OSError) as wrong:
            why = _first(wrong.__cause__ or wrong)
            raise UserError(f"{self.name} cannot be read as a data set ({why})") from None
        splits = list(builder.info.splits)
        try:
            rows = builder.as_dataset(split=self.split)
        except ValueError as wrong:
            meant = closest(self.split, splits)
            hint = f"did you mean {meant}? " if meant and "[" not in self.split else ""
            raise UserError(
                f"data.source.split is {self.split} ({_first(wrong)}); {hint}"
                f"{self.name} has {listing(splits, 'and')}, and {PARTS}"
            ) from None
        return rows if self.columns is None else self._renamed(rows, self.columns)

    def _renamed(self, rows: Any, columns: dict[str, str]) -> Any:
        for name, column in columns.items():
            if column not in rows.column_names:
                raise self._without_column(name, column, rows.column_names)
        selected = rows.select_columns(list(columns.values()))
        return selected.rename_columns({column: name for name, column in columns.items()})

    def _without_column(self, name: str, column: str, has: list[str]) -> UserError:
        meant = closest(column, has)
        hint = f"did you mean {meant}? " if meant else ""
        listed = listing(has, "and")
        return UserError(f"data.source.columns.{name} is {column}; {hint}{self.name} has {listed}")


def _options(config: Any) -> dict[str, Any]:
    """Settings of a builder that are not the usual ones, such as the separator of columns."""
    plain = (str, int, float, bool, list)
    return {
        one.name: value
        for one in fields(config)
        if one.name not in PLACES and isinstance(value := getattr(config, one.name), plain)
        if value != (one.default if one.default_factory is MISSING else one.default_factory())
    }


def _below(place: Path, file: Path) -> Path:
    root = place.resolve()
    return file.relative_to(root) if file.is_relative_to(root) else file


def _first(wrong: BaseException) -> str:
    return (str(wrong).strip().partition("\n")[0] or type(wrong).__name__).rstrip(".")


def _library() -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(
            "data.source.kind is hub, which reads with the datasets library, and that is not here: "
            "pip install 'windlass-lm[hub]'"
        ) from None
    return datasets
