import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.prepared import tokenized
from windlass.config import listing, read
from windlass.data import SOURCES, Data, Tokenized, prepare
from windlass.data.load import Loader, evaluation_batches
from windlass.data.mix import Mixture
from windlass.data.tokenizer import Tokenizer
from windlass.data.vocabulary import byte
from windlass.errors import UserError
from windlass.sources import jsonl, stories

from .test_load import same, whole

BYTE = Tokenizer(kind="byte")


def part(folder: Path, letter: str, documents: int, **how: Any) -> jsonl.Source:
    """Documents of one letter and a few of its own, so that each can be told from all others."""
    file = folder / f"{letter}.jsonl"
    texts = [letter * 6 + f"{number:06}" for number in range(documents)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return jsonl.Source(path=str(file), **how)


def mixed(folder: Path, *parts: jsonl.Source, **how: Any) -> Tokenized:
    how = {"length": 16, "packing": "none", "cache": str(folder / "cache"), **how}
    return tokenized(Data(mixture=parts, **how), BYTE)


@pytest.fixture
def prepared(tmp_path: Path) -> Tokenized:
    """300, 90 and 30 rows, in shares of 0.2, 0.5 and 0.3."""
    sizes = {"a": (300, 2.0), "b": (90, 5.0), "c": (30, 3.0)}
    parts = [part(tmp_path, name, size, weight=weight) for name, (size, weight) in sizes.items()]
    return mixed(tmp_path, *parts)


def letters(batch: dict[str, np.ndarray]) -> Counter:
    return Counter(map(chr, np.asarray(batch["tokens"])[:, 3].tolist()))


@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_are_right_to_one_percent_over_an_epoch(prepared: Tokenized, shuffle: bool):
    loader = Loader(prepared.split("train"), 7, seed=3, shuffle=shuffle)
    assert loader.batches_per_epoch == 420 // 7
    for epoch in range(2):
        steps = range(60 * epoch, 60 * epoch + 60)
        drawn = sum((letters(loader.batch(step)) for step in steps), Counter())
        shares = {letter: count / 420 for letter, count in drawn.items()}
        assert shares == pytest.approx({"a": 0.2, "b": 0.5, "c": 0.3}, abs=0.01)


def test_every_batch_has_about_its_share(prepared: Tokenized):
    loader = Loader(prepared.split("train"), 20, seed=0, shuffle=True)
    for step in range(50):
        assert letters(loader.batch(step)) == Counter(a=4, b=10, c=6)


def test_each_part_is_drawn_whole_before_any_of_it_comes_again_and_anew(prepared: Tokenized):
    rows = prepared.split("train")
    assert isinstance(rows, Mixture)
    drawn = rows.drawn(np.arange(3000), 5, True).numbers
    for begin, size in ((0, 300), (300, 90), (390, 30)):
        its = drawn[(drawn >= begin) & (drawn < begin + size)]
        epochs = [its[at : at + size].tolist() for at in range(0, len(its) - size, size)]
        assert len(epochs) >= 1
        assert all(sorted(epoch) == list(range(begin, begin + size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_without_shuffling_each_part_comes_in_its_order(prepared: Tokenized):
    rows = prepared.split("train")
    assert isinstance(rows, Mixture)
    drawn = rows.drawn(np.arange(200), 0, False).numbers
    its = drawn[drawn >= 390]
    assert its.tolist() == [390 + number % 30 for number in range(60)]


def test_what_is_drawn_follows_from_the_seed_and_the_place_alone(prepared: Tokenized):
    first, again = (Loader(prepared.split("train"), 8, seed=1, shuffle=True) for _ in range(2))
    other = Loader(prepared.split("train"), 8, seed=2, shuffle=True)
    for step in (10**9 + 7, 3, 0, 1250, 1249):  # 1250 steps of 8 rows are a cycle of turns
        assert first.row_numbers(step).tolist() == again.row_numbers(step).tolist()
    assert any((first.row_numbers(i) != other.row_numbers(i)).any() for i in range(5))
    for start in (0, 5):
        batches = first.iterate(start, whole)
        for step in range(start, start + 6):
            assert same(next(batches), first.batch(step))


def test_a_batch_of_a_mixture_is_the_rows_of_its_parts(prepared: Tokenized):
    rows = prepared.split("train")
    assert isinstance(rows, Mixture)
    numbers = [0, 299, 300, 389, 390, 419, -1, 5]
    batch = rows.batch(numbers)
    expected = [rows.parts[0][0], rows.parts[0][299], rows.parts[1][0], rows.parts[1][89]]
    expected += [rows.parts[2][0], rows.parts[2][29]]
    for place, row in enumerate(expected):
        assert all((batch[name][place] == row[name]).all() for name in row)
        assert rows.pieces(numbers[place])[0].document == numbers[place] - [0, 300, 390][place // 2]
    assert batch["weight"][6].sum() == 0 and same(rows[5], {k: v[7] for k, v in batch.items()})


def test_evaluation_counts_the_held_out_rows_of_every_part_once(tmp_path: Path):
    parts = [part(tmp_path, "a", 100, weight=3.0), part(tmp_path, "b", 50)]
    prepared = mixed(tmp_path, *parts, validation=0.2, test=0.1)
    assert list(prepared.splits) == ["train", "validation", "test"]
    for name in prepared.splits:
        rows = prepared.split(name)
        assert isinstance(rows, Mixture)
        batches = evaluation_batches(rows, 7, whole)
        places = sum(int((np.asarray(batch["document"]) >= 0).sum()) for batch in batches)
        assert places == rows.tokens == sum(part.tokens for part in rows.parts)
    assert sum(prepared.split(name).documents for name in prepared.splits) == 150


def test_the_entropy_is_that_of_the_mix(tmp_path: Path):
    parts = [part(tmp_path, "a", 40, weight=3.0), part(tmp_path, "b", 200)]
    prepared = mixed(tmp_path, *parts)
    rows = prepared.split("train")
    assert isinstance(rows, Mixture)
    # What is predicted in as many batches as make every part come to its end.
    drawn = rows.batch(*rows.drawn(np.arange(800), 0, True))
    counts = np.bincount(drawn["targets"][drawn["weight"] > 0])
    share = counts[counts > 0] / counts.sum()
    assert prepared.unigram_entropy == pytest.approx(-(share * np.log(share)).sum(), rel=1e-6)
    assert rows.tokens_per_row == pytest.approx(drawn["weight"].sum() / 800)
    assert rows.targets_per_row == rows.tokens_per_row


def test_a_vocabulary_is_learned_from_every_part_by_its_share(tmp_path: Path, console: Console):
    many, few = stories.Source(count=400), part(tmp_path, "ü", 400)
    learned = {}
    for weight in (1.0, 0.001):
        parts = (many, jsonl.Source(path=few.path, weight=weight))
        data = Data(mixture=parts, length=64, cache=str(tmp_path / "cache"))
        learned[weight] = tokenized(data, Tokenizer(kind="bpe", vocab=300), console=console)
    names = {weight: len(one.vocabulary.encode("ü" * 6)) for weight, one in learned.items()}
    assert names[1.0] < names[0.001]
    assert len({one.vocabulary.fingerprint for one in learned[1.0].corpora}) == 1


def test_another_weight_is_other_data_and_tokenises_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    one, other = part(tmp_path, "a", 9), part(tmp_path, "b", 9, limit=5)
    first = mixed(tmp_path, one, other)
    assert [one.documents for one in first.corpora] == [9, 5]
    monkeypatch.setattr("windlass.data.corpus.write_corpus", None)
    second = mixed(tmp_path, jsonl.Source(path=one.path, weight=2.0), other)
    assert second.fingerprint != first.fingerprint
    assert second.corpora[0].folder == first.corpora[0].folder


def refusal(**written: Any) -> str:
    with pytest.raises(UserError) as refused:
        read(Data, written)
    return str(refused.value)


def test_a_mixture_is_refused_with_all_that_is_wrong_with_it():
    assert refusal(mixture=[]) == (
        "1 problem in the recipe:\n  mixture  is empty; it is a list of sources, each with a weight"
    )
    assert refusal(length=8) == (
        "1 problem in the recipe:\n"
        f"  source  is required: a section with kind: {listing(SOURCES.names())}; "
        "or mixture, a list of these"
    )
    assert refusal(source="stories", mixture=["stories"]) == (
        "1 problem in the recipe:\n"
        "  mixture  is given, and source too; data.source=null leaves one of them out"
    )
    assert refusal(source={"kind": "stories", "weight": 2, "limit": 0}) == (
        "2 problems in the recipe:\n"
        "  source.limit   is 0; it must be 1 or more\n"
        "  source.weight  is 2; it is for parts of a mixture"
    )
    parts = [{"kind": "stories", "weight": weight} for weight in (0, 1, -2)]
    assert refusal(mixture=parts) == (
        "2 problems in the recipe:\n"
        "  mixture.0.weight  is 0; it must be above 0\n"
        "  mixture.2.weight  is -2; it must be above 0"
    )
    parts = [{"kind": "stories", "weight": weight} for weight in (1, 1e-6)]
    assert refusal(mixture=parts) == (
        "1 problem in the recipe:\n"
        "  mixture.1.weight  is 1e-06, 1e-06 of all weights; a part has one row in 10,000 or more"
    )


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_a_part_that_cannot_be_read_is_named(tmp_path: Path, console: Console, kind: str):
    asked = Tokenizer(kind="bpe", vocab=300) if kind == "bpe" else BYTE
    (tmp_path / "none.jsonl").touch()
    cases = {
        f"data.mixture.1.path is {tmp_path}/none.jsonl, which has no documents": jsonl.Source(
            path=str(tmp_path / "none.jsonl")
        ),
        f"data.mixture.1.path is {tmp_path}/gone.jsonl, which does not exist; "
        f"it is looked for from {Path.cwd()}": jsonl.Source(path=str(tmp_path / "gone.jsonl")),
        f"{tmp_path}/a.jsonl line 1 has no column txt; did you mean text? "
        "data.mixture.1.column can be one it has: text": part(tmp_path, "a", 3, column="txt"),
    }
    for message, wrong in cases.items():
        data = Data(mixture=(stories.Source(count=3), wrong), cache=str(tmp_path / "cache"))
        with pytest.raises(UserError) as refused:
            prepare(data, asked, console=console)
        assert str(refused.value) == message


def test_a_part_that_is_smaller_than_its_validation_share_is_named(tmp_path: Path):
    with pytest.raises(UserError) as refused:
        mixed(tmp_path, part(tmp_path, "a", 300), part(tmp_path, "b", 2), validation=0.05)
    assert str(refused.value) == (
        "data.validation is 0.05, and none of the 2 documents of data.mixture.1 with text fell "
        "into that share; take a larger one, or make shorter documents of the same text"
    )


def test_tokens_of_all_parts_are_of_one_vocabulary(prepared: Tokenized):
    assert {one.vocabulary.fingerprint for one in prepared.corpora} == {byte().fingerprint}
