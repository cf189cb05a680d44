"""Data sets of the Hugging Face hub, or a folder laid out like one, through `datasets`."""

import hashlib
import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from windlass.config import listing, section
from windlass.config.reading import closest
from windlass.errors import UserError
from windlass.hub.fetch import fetch
from windlass.sources import Records

PARTS = "a part of one is written train[:10%] or train[100:200]"


@section
class Source(Records):
    """Rows of one split, in the cache of the `datasets` library."""

    name: str  # OWNER/NAME, or a folder of Parquet, JSON Lines or CSV files
    configuration: str | None = None  # name of the data set's configuration; null: its only one
    split: str = "train"  # or a part of it, such as train[:10%]
    revision: str | None = None  # a branch, a tag or a commit; null: the newest
    # columns to keep, each under the name it is to have: {question: prompt}; null: all
    columns: dict[str, str] | None = None

    @property
    def total(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self.name} {self.split} row {index + 1:,}"

    def described(self) -> dict[str, Any]:
        place = self._folder
        return Records.described(self) | ({"name": str(place.resolve())} if place else {})

    def fingerprint(self) -> str:
        values: list[Any] = [self.described()]
        # A commit never changes, so that the hub need not be contacted.
        if self._folder or not re.fullmatch("[0-9a-f]{40}", self.revision or ""):
            builder = self._builder
            values += [builder.config_id, str(builder.config.version), builder.hash]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

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
        fetched = fetch(
            self.name, self.revision, ["README.md"], kind="dataset", key="data.source.name"
        )
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
                meant = closest(column, rows.column_names)
                hint = f"did you mean {meant}? " if meant else ""
                has = listing(rows.column_names, "and")
                raise UserError(
                    f"data.source.columns.{name} is {column}; {hint}{self.name} has {has}"
                )
        selected = rows.select_columns(list(columns.values()))
        return selected.rename_columns({column: name for name, column in columns.items()})


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
