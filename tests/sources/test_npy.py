from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.prepared import tokenized
from windlass.data import Data, prepare
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.sources import npy, stories
from windlass.sources.npy import Source

BYTE = Tokenizer(kind="byte")


def save(path: Path, ids: Any, dtype: Any = np.uint16) -> str:
    np.save(path, np.array(ids, dtype))
    return str(path)


def documents(source: Source) -> list[list[int]]:
    return [source[number]["tokens"].tolist() for number in range(len(source))]


def refusal(**fields: Any) -> str:
    with pytest.raises(UserError) as refused:
        documents(Source(**fields))
    return str(refused.value)


def test_one_long_array_is_cut_behind_each_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = save(tmp_path / "a.npy", [5, 6, 9, 9, 7, 9, 8])
    for chunk in (2**22, 2):
        monkeypatch.setattr(npy, "IDS_AT_ONCE", chunk)
        assert documents(Source(path=file, eos=9)) == [[5, 6, 9], [9], [7, 9], [8]]


@pytest.mark.parametrize("offsets", [[0, 3, 3, 5], [0, 3, 5, 7]])
def test_one_long_array_is_cut_at_offsets(tmp_path: Path, offsets: list[int]):
    file = save(tmp_path / "a.npy", [5, 6, 9, 9, 7, 9, 8])
    where = save(tmp_path / "b.npy", offsets, np.int64)
    assert documents(Source(path=file, offsets=where)) == [[5, 6, 9], [9, 7], [9, 8]]


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint64, ">i4"])
def test_a_row_of_an_array_of_rows_is_a_document(tmp_path: Path, dtype: Any):
    file = save(tmp_path / "a.npy", [[1, 2, 3], [4, 5, 6]], dtype)
    assert documents(Source(path=file)) == [[1, 2, 3], [4, 5, 6]]


def test_other_offsets_change_the_fingerprint(tmp_path: Path):
    file, where = save(tmp_path / "a.npy", [1, 2, 3]), tmp_path / "b.npy"
    source = Source(path=file, offsets=save(where, [0, 1]))
    before = source.fingerprint()
    save(where, [0, 2])
    assert source.fingerprint() != before


def test_ids_are_prepared_as_the_text_that_they_were_made_of(tmp_path: Path):
    told = stories.Source(count=5)
    ids = [[256, *told[number]["text"].encode(), 256] for number in range(5)]
    offsets = np.cumsum([0, *map(len, ids)])
    tokens = Source(
        path=save(tmp_path / "a.npy", sum(ids, [])), offsets=save(tmp_path / "b.npy", offsets)
    )
    how = {"length": 64, "cache": str(tmp_path / "cache")}
    made, read = (tokenized(Data(source=source, **how), BYTE) for source in (tokens, told))
    assert (made.corpora[0].tokens == read.corpora[0].tokens).all()
    assert (made.corpora[0].offsets == read.corpora[0].offsets).all()
    assert (made.parts("train")[0].counts == read.parts("train")[0].counts).all()
    numbers = range(len(read.split("train")))
    left, right = (one.split("train").batch(numbers) for one in (made, read))
    assert all((left[name] == right[name]).all() for name in right)


@pytest.mark.parametrize("strange", [257, -1, 2**40])
def test_an_id_beyond_the_vocabulary_is_refused(tmp_path: Path, console: Console, strange: int):
    file = save(tmp_path / "a.npy", [[1, 2], [3, 4], [256, strange]], np.int64)
    data = Data(source=Source(path=file), cache=str(tmp_path / "cache"))
    with pytest.raises(UserError) as refused:
        prepare(data, BYTE, console=console)
    assert str(refused.value) == (
        f"document 2 of data.source holds the id {strange}, and the tokenizer has 257, from 0 to "
        "256; tokenizer.kind=file with tokenizer.path names the tokenizer that made the ids"
    )


def test_a_vocabulary_is_not_learned_from_ids(tmp_path: Path, console: Console):
    file = save(tmp_path / "a.npy", [[1, 2], [3, 4]])
    data = Data(mixture=(stories.Source(count=3), Source(path=file)), cache=str(tmp_path))
    with pytest.raises(UserError) as refused:
        prepare(data, Tokenizer(kind="bpe", vocab=300), console=console)
    assert str(refused.value) == (
        "tokenizer.kind is bpe, which is learned from text, and data.mixture.1 has token ids; "
        "tokenizer.kind=file with tokenizer.path names the tokenizer that made them"
    )


def test_an_array_that_says_nothing_of_documents_is_refused(tmp_path: Path):
    file = save(tmp_path / "a.npy", [1, 2, 3])
    asks = (
        f"{file} holds one long array of 3 ids; data.source.eos says which of them ends a "
        "document, or data.source.offsets names a .npy file of where each begins, and this recipe "
    )
    assert refusal(path=file) == asks + "has neither"
    assert refusal(path=file, eos=3, offsets=file) == asks + "has both of them"
    rows = save(tmp_path / "b.npy", [[1, 2, 3]])
    assert refusal(path=rows, eos=3) == (
        f"{rows} holds 1 rows of 3 ids, each a document; data.source.eos is for one long array: "
        "leave it out"
    )


@pytest.mark.parametrize("offsets", [[1, 2], [0, 2, 1], [0, 4], [], [[0, 1]]])
def test_offsets_that_say_nothing_of_the_array_are_refused(tmp_path: Path, offsets: list):
    file, where = save(tmp_path / "a.npy", [1, 2, 3]), save(tmp_path / "b.npy", offsets)
    assert refusal(path=file, offsets=where) == (
        f"{where} does not say where documents begin in {file}: the first of its numbers is 0, "
        "none is below the one before it or above 3"
    )


def test_offsets_of_several_files_are_refused(tmp_path: Path):
    for name in "ab":
        save(tmp_path / f"{name}.npy", [1, 2, 3])
    assert refusal(path=str(tmp_path), offsets=str(tmp_path / "a.npy")) == (
        f"data.source.offsets is {tmp_path}/a.npy and data.source.path is {tmp_path}; each names "
        "one file, and these are 1 and 2"
    )
    assert refusal(path=str(tmp_path / "a.npy"), offsets=str(tmp_path / "c.npy")) == (
        f"data.source.offsets is {tmp_path}/c.npy, which does not exist; "
        f"it is looked for from {Path.cwd()}"
    )


def test_a_file_that_holds_no_ids_is_refused(tmp_path: Path):
    file = tmp_path / "a.npy"
    file.write_bytes(b"no array")
    assert refusal(path=str(file)) == (
        f"{file} is not a .npy file, the kind that numpy.save writes"
    )
    save(file, [0.5], float)
    assert refusal(path=str(file)) == f"{file} holds float64; token ids are whole numbers"
    save(file, np.zeros((2, 2, 2)))
    assert refusal(path=str(file)) == (
        f"{file} holds an array of shape (2, 2, 2); token ids are one long array, or rows of one "
        "length"
    )
    np.save(file, np.asfortranarray([[1, 2, 3], [4, 5, 6]]))
    assert refusal(path=str(file)) == (
        f"{file} holds its columns one after the other; "
        "numpy.ascontiguousarray puts rows in their place"
    )
    save(file, range(100))
    file.write_bytes(file.read_bytes()[:-20])
    assert refusal(path=str(file), eos=1) == (f"{file} is cut short: it says that it holds 100 ids")
