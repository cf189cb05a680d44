import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.prepared import tokenized
from tests.test_files import files_of_at_most
from windlass.data import Data, Tokenized, prepare
from windlass.data import corpus as cache
from windlass.data import documents as documents_of
from windlass.data.corpus import corpus_of
from windlass.data.tokenizer import Tokenizer
from windlass.data.vocabulary import byte
from windlass.errors import UserError
from windlass.sources import jsonl, stories

Documents = Callable[..., Tokenized]
BYTE = Tokenizer(kind="byte")


def corpora(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "corpora").iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.fixture
def refuse_to_tokenize(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_):
        raise AssertionError("tokenised again")

    return lambda: monkeypatch.setattr(cache, "write_corpus", refuse)


def test_a_document_is_its_beginning_its_text_and_its_end(documents: Documents):
    prepared = documents(["ab", "", "c", " \n"])
    assert prepared.corpora[0].tokens.tolist() == [256, 97, 98, 256, 256, 99, 256]
    assert prepared.corpora[0].offsets.tolist() == [0, 4, 4, 7, 7]
    assert (prepared.corpora[0].documents, prepared.corpora[0].empty) == (4, 2)
    assert prepared.corpora[0].tokens.dtype == np.uint16


def test_counts_are_of_what_is_predicted(documents: Documents):
    prepared = documents(["aab", "", "a"])
    counts = prepared.parts("train")[0].counts
    assert {97: 3, 98: 1, 256: 2} == {
        token: count for token, count in enumerate(counts.tolist()) if count
    }
    share = np.array([3, 1, 2]) / 6
    assert prepared.unigram_entropy == pytest.approx(-(share * np.log(share)).sum())
    assert counts.sum() == prepared.split("train").tokens


def test_a_second_start_reads_the_cache(documents: Documents, refuse_to_tokenize: Callable):
    first = documents(["one", "two"])
    assert first.data.source is not None
    times = os.stat(first.data.source.path)
    refuse_to_tokenize()
    again = tokenized(first.data, BYTE)
    assert again.fingerprint == first.fingerprint
    assert again.corpora[0].folder == first.corpora[0].folder
    assert os.stat(first.data.source.path) == times


def test_other_rows_of_the_same_documents_do_not_tokenise_again(
    documents: Documents, refuse_to_tokenize: Callable
):
    first = documents(["one and more", "two", "three"], length=4)
    how = {"source": first.data.source, "cache": first.data.cache}
    refuse_to_tokenize()
    assert prepare(Data(length=8, **how), BYTE).split("train").length == 8
    assert prepare(Data(length=4, packing="none", **how), BYTE).split("train").length == 4


def test_changed_documents_are_tokenised_again_and_have_another_fingerprint(
    documents: Documents, tmp_path: Path
):
    first = documents(["one", "two"])
    second = documents(["one", "TWO and more"])
    assert second.fingerprint != first.fingerprint
    assert second.vocabulary.decode(second.corpora[0].tokens[5:]) == "TWO and more"
    assert len(corpora(tmp_path)) == 2


def test_who_changed_documents_under_a_cache_is_told_that_they_are_tokenised_again(
    documents: Documents, tmp_path: Path, console: Console
):
    first = documents(["one", "two"])
    prepare(first.data, Tokenizer(kind="bpe", vocab=260), console=console)
    assert console.file.getvalue() == ""  # pyright: ignore[reportAttributeAccessIssue]
    second = documents(["one", "TWO"])
    assert second.fingerprint != first.fingerprint
    assert console.file.getvalue() == (  # pyright: ignore[reportAttributeAccessIssue]
        "the documents changed since they were tokenised, which is done again: kind jsonl, "
        f"column text, path {tmp_path}/rows.jsonl\n"
    )


def left_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.rglob("*") if file.is_file())


def test_a_full_disk_is_told_with_what_is_needed_and_leaves_nothing_half_written(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(documents_of, "BATCH_DOCUMENTS", 100)
    source = stories.Source(count=400)
    data = Data(source=source, length=1, packing="none", cache=str(tmp_path))
    read = sum(2 + len(source[number]["text"].encode()) for number in range(100))
    tokens = sum(2 + len(source[number]["text"].encode()) for number in range(400))

    def refusal(size: int) -> str:
        with files_of_at_most(size), pytest.raises(UserError) as refused:
            prepare(data, BYTE, console=console)
        return str(refused.value)

    def full(place: Path, needed: float) -> str:
        return (
            f"prepared data does not fit into {place} (File too large): about "
            f"{needed / 2**20:,.1f} MiB more are needed; make room there, or name another folder "
            "with data.cache or WINDLASS_CACHE"
        )

    # By the hundred documents that were read, four times their tokens of two bytes each.
    assert refusal(2**16) == full(tmp_path, read * 4 * 2)
    assert all(name.endswith(".lock") for name in left_in(tmp_path))

    # Rows of one token have an index larger than the tokens, three numbers of 8 bytes and one of 4.
    message = refusal(3 * tokens)
    (corpus,) = (tmp_path / "corpora").iterdir()
    assert message == full(corpus, 28 * (tokens - 400) + 8)
    assert not list((corpus / "rows").glob("*"))
    assert len(prepare(data, BYTE, console=console).split("train")) == tokens - 400


def test_a_full_disk_leaves_no_half_of_a_vocabulary(tmp_path: Path, console: Console):
    data = Data(source=stories.Source(count=20), cache=str(tmp_path))
    with files_of_at_most(1000), pytest.raises(UserError) as refused:
        prepare(data, Tokenizer(kind="bpe", vocab=300), console=console)
    assert str(refused.value) == (
        f"prepared data does not fit into {tmp_path} (File too large): about 0.1 MiB more are "
        "needed; make room there, or name another folder with data.cache or WINDLASS_CACHE"
    )
    assert all(name.endswith(".lock") for name in left_in(tmp_path))


def test_documents_cut_elsewhere_have_another_fingerprint(documents: Documents):
    assert documents(["one", "two"]).fingerprint != documents(["onet", "wo"]).fingerprint


def test_the_same_text_in_another_file_is_the_same_corpus(documents: Documents, tmp_path: Path):
    first = documents(["one", "two"])
    moved = tmp_path / "moved.jsonl"
    moved.write_text('{"n": 1, "text": "one"}\n\n{"n": 2, "text": "two"}\n')
    data = Data(source=jsonl.Source(path=str(moved)), length=16, cache=first.data.cache)
    second = tokenized(data, BYTE)
    assert second.fingerprint == first.fingerprint
    assert corpora(tmp_path) == [second.corpora[0].folder]


def test_another_vocabulary_makes_another_corpus(documents: Documents, tmp_path: Path):
    texts = ["the cat and the hat", "the dog and the cat"]
    first = documents(texts)
    second = documents(texts, Tokenizer(kind="bpe", vocab=260))
    third = documents(texts, Tokenizer(kind="bpe", vocab=261))
    assert first.fingerprint == second.fingerprint == third.fingerprint
    assert len({one.vocabulary.fingerprint for one in (first, second, third)}) == 3
    assert len(corpora(tmp_path)) == 3


def test_a_changed_tokenizer_file_is_seen(documents: Documents, tmp_path: Path):
    file = tmp_path / "tokenizer.json"
    learned = documents(["the cat and the hat"], Tokenizer(kind="bpe", vocab=260))
    learned.vocabulary.save(file)
    asked = Tokenizer(kind="file", path=str(file))
    assert documents(["the hat"], asked).vocabulary.size == 260
    cache.vocabularies.byte().save(file)
    assert documents(["the hat"], asked).vocabulary.size == 257


def test_a_damaged_cache_is_written_again(documents: Documents):
    first = documents(["one", "two"])
    whole = contents(first.corpora[0].folder)
    tokens = first.corpora[0].folder / "tokens.bin"
    for damage in (lambda: os.truncate(tokens, 3), tokens.unlink):
        damage()
        again = tokenized(first.data, BYTE)
        assert contents(again.corpora[0].folder) == whole


def test_documents_that_change_while_they_are_read_are_refused(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
):
    source = stories.Source(count=3)
    stamps = iter(["before", "after"])
    monkeypatch.setattr(stories.Source, "fingerprint", lambda self: next(stamps))
    with pytest.raises(UserError) as refused:
        corpus_of(source, byte(), tmp_path, console)
    assert str(refused.value) == (
        "the documents of data.source changed while they were read; run it again"
    )
    assert not (tmp_path / "corpora").exists()


PROGRAM = """
import sys, time
from windlass.data import Data, documents, prepare
from windlass.data.tokenizer import Tokenizer
from windlass.sources import stories

pause, framed = float(sys.argv[2]), documents._framed
documents.BATCH_DOCUMENTS = 20
documents._framed = lambda *given: (time.sleep(pause), framed(*given))[1]
data = Data(source=stories.Source(count=200), length=64, cache=sys.argv[1])
print(prepare(data, Tokenizer(kind="bpe", vocab=300)).corpora[0].folder)
"""


def start(folder: Path, pause: float = 0.0) -> subprocess.Popen:
    program = [sys.executable, "-c", PROGRAM, str(folder), str(pause)]
    return subprocess.Popen(program, stdout=subprocess.PIPE)


def result(process: subprocess.Popen) -> Path:
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return Path(printed.decode().strip())


@pytest.mark.long
def test_a_build_killed_while_writing_leaves_nothing_behind_that_the_next_one_uses(tmp_path: Path):
    undisturbed = result(start(tmp_path / "undisturbed"))

    folder = tmp_path / "killed"
    killed = start(folder, pause=1.0)
    while not any(file.stat().st_size for file in folder.glob("building/*/tokens.bin")):
        assert killed.poll() is None
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert list(folder.glob("building/*/tokens.bin"))
    assert not list(folder.glob("corpora/*"))

    again = result(start(folder))
    assert again.name == undisturbed.name
    assert contents(again) == contents(undisturbed)
    assert {file.suffix for file in (folder / "building").iterdir()} == {".lock"}


def test_two_processes_that_build_at_once_build_the_same_and_only_once(tmp_path: Path):
    first, second = start(tmp_path, pause=0.05), start(tmp_path, pause=0.05)
    assert result(first) == result(second)
    assert len(list((tmp_path / "corpora").iterdir())) == 1


def test_who_waits_for_another_process_is_told(tmp_path: Path, console: Console):
    held = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys, time; lock = open(sys.argv[1], 'w');"
            "fcntl.flock(lock, fcntl.LOCK_EX); print('held', flush=True); time.sleep(0.3)",
            str(tmp_path / "place.lock"),
        ],
        stdout=subprocess.PIPE,
    )
    assert held.stdout and held.stdout.readline()
    with cache.claimed(tmp_path / "place", console):
        assert held.wait(10) == 0
    held.communicate()
    assert console.file.getvalue() == (  # pyright: ignore[reportAttributeAccessIssue]
        "another process is preparing the same data; waiting for it\n"
    )


def test_no_more_than_a_batch_of_documents_is_in_memory(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
):
    largest = 0
    framed = documents_of._framed

    def watched(texts, vocabulary):
        nonlocal largest
        largest = max(largest, len(texts), sum(map(len, texts)) // 1000)
        return framed(texts, vocabulary)

    monkeypatch.setattr(documents_of, "_framed", watched)
    monkeypatch.setattr(documents_of, "BATCH_DOCUMENTS", 7)
    monkeypatch.setattr(documents_of, "BATCH_CHARACTERS", 2000)
    small = corpus_of(stories.Source(count=50), byte(), tmp_path / "small", console)
    assert largest <= 7
    monkeypatch.undo()
    whole = corpus_of(stories.Source(count=50), byte(), tmp_path / "whole", console)
    assert contents(small.folder) == contents(whole.folder)


def test_no_documents_and_no_text_are_refused(documents: Documents, tmp_path: Path):
    none = f"data.source.path is {tmp_path}/rows.jsonl, which has no documents"
    with pytest.raises(UserError) as refused:
        documents([])
    assert str(refused.value) == none
    with pytest.raises(UserError) as refused:
        documents(["", "\n"])
    assert str(refused.value) == "data.source has no text: 2 documents, all of them empty"
    with pytest.raises(UserError) as refused:
        documents([], Tokenizer(kind="bpe", vocab=300))
    assert str(refused.value) == none


def test_progress_is_told_in_lines_where_there_is_no_terminal(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("windlass.data.progress.SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setattr(documents_of, "BATCH_DOCUMENTS", 2)
    corpus_of(stories.Source(count=3), byte(), tmp_path, console)
    lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    assert lines == [
        "tokenising: 2 of 3, 0.0M tokens",
        "tokenising: 3 of 3, 0.0M tokens",
    ]


def test_the_description_of_a_corpus_names_what_it_was_made_of(documents: Documents):
    prepared = documents(["one"])
    about = json.loads((prepared.corpora[0].folder / "about.json").read_text())
    assert about["content"] == prepared.fingerprint
    told = about["tokenizer"]
    assert (told["eos"], told["bos"], about["dtype"]) == (256, 256, "uint16")
