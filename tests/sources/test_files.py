"""Files behind URLs: the same documents as from this machine, through fsspec's file systems."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from windlass.errors import UserError
from windlass.sources import Reader, SourceFile, files, jsonl, npy, parquet, text

TEXTS = ["one", "two\nlines", "", "vier und fünf"]
FAR = {"memory": "memory://corpus", "local": "file://{folder}"}


def write(folder: Path) -> None:
    """The same four documents in every kind of file, in two files each."""
    for number, half in enumerate((TEXTS[:3], TEXTS[3:])):
        lines = [json.dumps({"text": one}) for one in half]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
        table = pyarrow.table({"text": half})
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet")
        ids = [[*one.encode(), 256] for one in half]
        np.save(folder / f"{number}.npy", np.array(sum(ids, []), np.uint16))
        for document, one in enumerate(half):
            (folder / f"{number}{document}.txt").write_text(one)


MAKE: dict[str, Callable[[str], Any]] = {
    "jsonl": lambda path: jsonl.Source(path=path),
    "parquet": lambda path: parquet.Source(path=path),
    "text": lambda path: text.Source(path=path),
    "npy": lambda path: npy.Source(path=path, eos=256),
}


def read(source: Any, number: int) -> str:
    found = source[number][source.yields]
    return found if source.yields == "text" else bytes(found[:-1].astype(np.uint8)).decode()


def documents(source: Any) -> list[str]:
    return [read(source, number) for number in range(len(source))]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "corpus").mkdir()
    write(tmp_path / "corpus")
    return tmp_path / "corpus"


@pytest.fixture(params=FAR)
def far(request: pytest.FixtureRequest, here: Path) -> Iterator[str]:
    """A URL of the folder, in the memory of this process or on this machine."""
    memory = fsspec.filesystem("memory")
    for file in here.iterdir():
        memory.pipe(f"/corpus/{file.name}", file.read_bytes())
    yield FAR[request.param].format(folder=here)
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("kind", MAKE)
def test_a_url_gives_the_same_documents_as_the_folder(kind: str, here: Path, far: str):
    near = MAKE[kind](str(here))
    assert documents(near) == TEXTS
    suffix = "txt" if kind == "text" else kind
    for path in (far, f"{far}/", f"{far}/*.{suffix}"):
        assert documents(MAKE[kind](path)) == TEXTS
    assert documents(MAKE[kind](f"{far}/1*.{suffix}")) == TEXTS[3:]
    # Backwards and forwards, whatever was read last.
    source = MAKE[kind](far)
    for number in (3, 0, 2, 1, 3):
        assert read(source, number) == TEXTS[number]


@pytest.mark.parametrize("kind", MAKE)
def test_a_file_that_changes_changes_the_fingerprint(kind: str, far: str):
    before = MAKE[kind](far).fingerprint()
    assert MAKE[kind](far).fingerprint() == before
    system, place = fsspec.url_to_fs(far)
    name = next(name for name in system.find(place) if name.endswith(MAKE[kind](far).suffix))
    with system.open(name, "ab") as file:
        file.write(b" ")
    assert MAKE[kind](far).fingerprint() != before


@pytest.mark.parametrize("kind", MAKE)
def test_a_limit_takes_the_first_documents_and_changes_the_fingerprint(kind: str, here: Path):
    whole = MAKE[kind](str(here))
    for limit in (1, 2, 3, 4, 9):
        some = dataclasses.replace(whole, limit=limit)
        assert documents(some) == TEXTS[:limit]
        assert some.fingerprint() != whole.fingerprint()


def test_a_weight_does_not_change_the_fingerprint(here: Path):
    one, other = (jsonl.Source(path=str(here), weight=weight) for weight in (1.0, 2.0))
    assert one.fingerprint() == other.fingerprint()


def test_a_reader_keeps_one_file_open(here: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    plain = SourceFile.open

    def watched(self: SourceFile):
        opened.append(Path(self.name).name)
        return plain(self)

    monkeypatch.setattr(SourceFile, "open", watched)
    first, second = files(str(here), ".jsonl")
    reader = Reader()
    for file, begin in ((first, 0), (first, 9), (first, 2), (second, 0), (second, 1)):
        assert reader.read(file, begin, begin + 3) == Path(file.name).read_bytes()[begin:][:3]
    assert opened == ["0.jsonl", "1.jsonl"]


def test_google_storage_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError) as refused:
        len(jsonl.Source(path="gs://bucket/a.jsonl"))
    assert str(refused.value) == (
        "data.source.path is gs://bucket/a.jsonl; gs:// needs a package that is not here: "
        "pip install 'windlass-lm[cloud]'"
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "nowhere://a.jsonl",
            "; no kind of file system is named nowhere: gs, s3, https and file are some",
        ),
        ("http://[::1", ", which cannot be looked at (ValueError: Invalid IPv6 URL)"),
        ("memory://gone.jsonl", ", which does not exist"),
        ("memory://gone/*.jsonl", ", which matches no file"),
        (
            "memory://corpus/texts",
            ", a folder without a file that ends in .jsonl, .jsonl.gz or .jsonl.zst; a pattern "
            "such as *.md names files with another ending",
        ),
    ],
)
def test_a_url_that_names_no_file_is_refused(path: str, message: str):
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/texts/a.txt", b"a")
    with pytest.raises(UserError) as refused:
        len(jsonl.Source(path=path))
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    assert str(refused.value) == f"data.source.path is {path}{message}"


def test_reading_a_recipe_and_files_of_this_machine_imports_no_file_systems(here: Path):
    script = (
        "import sys, windlass.cli.commands\n"
        "from windlass.config import read\n"
        "from windlass.data import Data\n"
        f"kinds = [dict(kind=kind, path={str(here)!r}) for kind in ('parquet', 'npy', 'jsonl')]\n"
        "data = read(Data, {'mixture': kinds})\n"
        "data.mixture[2][0]\n"
        "print(*{'fsspec', 'pyarrow', 'jax', 'gcsfs'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("", "")


@pytest.mark.parametrize("url", ["github://x", "reference://x", "zip://x", "http://[::1/x"])
def test_a_file_system_that_cannot_be_made_of_a_url_is_refused(url):
    with pytest.raises(UserError) as refused:
        files(url, ".jsonl")
    assert str(refused.value).startswith(f"data.source.path is {url}")


def test_a_name_that_the_file_system_cannot_have_is_refused():
    with pytest.raises(UserError) as refused:
        files("half\ud800.jsonl", ".jsonl")
    assert str(refused.value) == (
        "data.source.path is half\ud800.jsonl, which no file can be named here, where names are in "
        "utf-8; PYTHONUTF8=1 in front of the command makes that UTF-8"
    )
