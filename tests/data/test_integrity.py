"""A damaged cache of prepared data is found at the next start, named, put aside and made again."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.prepared import tokenized
from windlass.data import Data, Tokenized, integrity, rows_of_an_epoch
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.sources import jsonl

BPE = Tokenizer(kind="bpe", vocab=260)
# Without `asked`, which is for a note alone.
KINDS = (
    "corpora/*/rows/*/*",
    "corpora/*/*",
    "known/*",
    "vocabularies/*",
)


def flipped(file: Path) -> None:
    """One bit in the middle, and size and time as before."""
    about, content = file.stat(), bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """Text in a cache of its own, with a vocabulary that is learned and rows held out."""
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"say {n}", "completion": f"here is {n}"} for n in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Data(
        source=jsonl.Source(path=str(file), column="completion"),
        length=16,
        validation=0.2,
        cache=str(tmp_path / "cache"),
    )


def files_of(cache: Path) -> Iterator[Path]:
    for kind in KINDS:
        yield from sorted(path for path in cache.glob(kind) if path.is_file())


def everything(prepared: Tokenized) -> bytes:
    rows = prepared.split("train")
    return b"".join(x.tobytes() for x in rows.batch(range(len(rows))).values())


@pytest.mark.parametrize("damaged", [flipped, cut, Path.unlink])
def test_whatever_happens_to_a_file_of_a_cache_the_rows_are_the_same(
    data: Data, tmp_path: Path, console: Console, damaged: Callable[[Path], None]
):
    expected, cache = everything(tokenized(data, BPE)), tmp_path / "cache"
    names = [path.relative_to(cache) for path in files_of(cache)]
    assert {"tokens.bin", "offsets.npy", "begin.npy", "about.json", "files.json"} <= {
        name.name for name in names
    }
    for name in names:
        damaged(cache / name)
        assert everything(tokenized(data, BPE, console=console)) == expected, name
        said = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
        console.file.seek(0)
        console.file.truncate()
        is_absent = damaged is Path.unlink and name.parts[0] in ("known", "vocabularies")
        assert ("is damaged" in said) == (not is_absent), (name, said)
        assert is_absent or name.name in said
        assert not any(integrity.damage(cache).values())


def test_who_reads_a_damaged_cache_is_told_which_file_and_where_it_is_now(
    data: Data, tmp_path: Path, console: Console
):
    folder = tokenized(data, BPE).corpora[0].folder
    flipped(folder / "tokens.bin")
    assert integrity.damage(tmp_path / "cache")[f"corpora/{folder.name}"] == ["tokens.bin"]
    tokenized(data, BPE, console=console)
    assert console.file.getvalue() == (  # pyright: ignore[reportAttributeAccessIssue]
        f"prepared data in {folder} is damaged (tokens.bin); it is now {folder}.damaged, and is "
        "made again\n"
    )
    assert (tmp_path / "cache" / "corpora" / f"{folder.name}.damaged" / "tokens.bin").is_file()


def test_what_another_process_put_aside_first_is_no_error(tmp_path: Path, console: Console):
    integrity._put_aside(tmp_path / "gone", ["tokens.bin"], console)
    assert console.file.getvalue() == ""  # pyright: ignore[reportAttributeAccessIssue]


def test_an_id_above_the_vocabulary_is_never_trained_on(data: Data):
    prepared = tokenized(data, BPE)
    tokens = prepared.corpora[0].folder / "tokens.bin"
    ids = np.fromfile(tokens, np.uint16)
    ids[:] = 60_000
    tokens.write_bytes(ids.tobytes())  # while it is mapped
    with pytest.raises(UserError) as refused:
        prepared.split("train").batch([0])
    assert str(refused.value) == (
        f"prepared data in {tokens.parent} holds the token 60,000, and the tokenizer has 260; the "
        "next start checks all of it, and makes it again if it is damaged"
    )


def test_a_plan_counts_the_rows_of_a_cache_and_makes_no_damaged_one_again(
    data: Data,
):
    rows, cache = len(tokenized(data, BPE).split("train")), Path(str(data.cache))
    assert rows_of_an_epoch(data, BPE) == rows
    for pattern in ("corpora/*/about.json", "vocabularies/*.json"):
        (file,) = cache.glob(pattern)
        flipped(file)
        before = file.read_bytes()
        assert rows_of_an_epoch(data, BPE) is None
        assert file.read_bytes() == before
        tokenized(data, BPE)
