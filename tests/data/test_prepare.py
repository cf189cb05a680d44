from collections.abc import Callable
from pathlib import Path

import pytest

from tests import rights
from windlass.config import read, tree
from windlass.data import Data, Tokenized
from windlass.errors import UserError
from windlass.sources import stories, text

Documents = Callable[..., Tokenized]


def test_splits_share_no_document_and_lose_none(documents: Documents):
    prepared = documents([f"document {number}" for number in range(200)], validation=0.2, test=0.1)
    splits = {name: prepared.split(name) for name in prepared.splits}
    held = {
        name: {piece.document for number in range(len(rows)) for piece in rows.pieces(number)}
        for name, rows in splits.items()
    }
    assert list(held) == ["train", "validation", "test"]
    assert sum(map(len, held.values())) == 200
    assert set.union(*held.values()) == set(range(200))


def test_a_recipe_says_where_documents_come_from():
    written = {"source": {"kind": "stories", "count": 7}, "length": 64, "packing": "none"}
    data = read(Data, written, origin="a recipe")
    assert data == Data(source=stories.Source(count=7), length=64, packing="none")
    assert read(Data, tree(data), origin="a recipe") == data
    assert read(Data, {"source": "stories"}).length == 1024
    parts = [{"kind": "stories", "weight": 2, "limit": 5}, {"kind": "text", "path": "a"}]
    data = read(Data, {"mixture": parts})
    assert data.mixture == (stories.Source(weight=2.0, limit=5), text.Source(path="a"))
    assert [part.share for part in data.parts] == [2 / 3, 1 / 3]
    assert read(Data, tree(data)) == data


def test_a_split_that_was_not_asked_for_is_refused(documents: Documents):
    with pytest.raises(UserError) as refused:
        documents(["one"]).split("validation")
    assert str(refused.value) == (
        "there are no validation documents; data.validation=0.05 holds out one in twenty"
    )


def test_a_share_that_no_document_falls_into_is_refused(documents: Documents):
    with pytest.raises(UserError) as refused:
        documents(["one", "", "two"], validation=0.01)
    assert str(refused.value) == (
        "data.validation is 0.01, and none of the 2 documents of data.source with text fell into "
        "that share; take a larger one, or make shorter documents of the same text"
    )


def test_a_cache_that_cannot_be_written_is_refused(documents: Documents, tmp_path: Path):
    cache = tmp_path / "cache"
    cache.mkdir()
    with pytest.raises(UserError) as refused, rights.read_only(cache):
        documents(["one"], cache=str(cache))
    assert str(refused.value) == (
        f"prepared data goes to {cache}, which cannot be written (Permission denied); "
        "data.cache or WINDLASS_CACHE names another folder"
    )
    assert len(documents(["one"], cache=str(cache)).split("train")) == 1


def test_a_cache_that_cannot_be_made_is_refused(documents: Documents, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as refused:
        documents(["one"], cache=str(tmp_path / "file" / "cache"))
    assert str(refused.value) == (
        f"prepared data goes to {tmp_path}/file/cache, which cannot be made (Not a directory); "
        "data.cache or WINDLASS_CACHE names another folder"
    )


def test_shares_that_leave_nothing_to_train_on_are_refused(documents: Documents):
    with pytest.raises(UserError) as refused:
        documents(["one"], validation=0.5, test=0.49)
    assert str(refused.value) == (
        "data.validation and data.test hold out 0.99 of 1 documents of data.source, which leaves "
        "none to train on; hold out less, or make shorter documents of the same text"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": -1}, "length is -1; a row holds at least 1 token"),
        (
            {"stride": 9},
            "stride is 9; it is 1 to length (8), beyond which tokens would be left out",
        ),
        (
            {"stride": 0},
            "stride is 0; it is 1 to length (8), beyond which tokens would be left out",
        ),
        ({"workers": -1}, "workers is -1; it must be 0 or more"),
        ({"prefetch": -1}, "prefetch is -1; it must be 0 or more"),
        ({"validation": 1.0}, "validation is 1.0; it is a share, from 0 to below 1"),
        ({"test": -0.1}, "test is -0.1; it is a share, from 0 to below 1"),
        (
            {"validation": 0.5, "test": 0.5},
            "validation is 0.5 and test is 0.5; together they leave nothing to train on",
        ),
    ],
)
def test_refusals(fields: dict, message: str):
    with pytest.raises(ValueError) as refused:
        Data(**{"source": stories.Source(), "length": 8, **fields})
    assert str(refused.value) == message
