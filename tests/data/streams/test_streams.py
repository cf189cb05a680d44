"""A stream is trained on part by part: the same rows whoever makes them, when, and how often."""

import io
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.hub.dataset_server import (
    NAME,
    DatasetHub,
    corpus,
    hurry,
    keep_caches_below,
    online,
    write_corpus,
)
from windlass import seal
from windlass.data import Data, integrity, prepare
from windlass.data.load import Loader
from windlass.data.streams.arrivals import Arrivals
from windlass.data.streams.prepared import StreamedData
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.hub import download as downloads
from windlass.run_folder.verify import verify_cache
from windlass.sources.hub import Source
from windlass.training.documents import documents_in_rows

BATCH, STEPS = 4, 60
CONSOLE = Console(file=io.StringIO())


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keep_caches_below(tmp_path, monkeypatch)
    hurry(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of a data set."""
    return write_corpus(tmp_path / "made")


def streamed(name: Path | str, cache: Path, part_tokens: int = 2000, **how) -> StreamedData:
    keys = {"keep_parts": how.pop("keep_parts", None), "limit": how.pop("limit", None)}
    source = Source(name=str(name), stream=True, part_tokens=part_tokens, **keys)
    data = Data(source=source, length=32, cache=str(cache), **how)
    prepared = prepare(data, Tokenizer(), console=CONSOLE)
    assert isinstance(prepared, StreamedData)
    return prepared


def batches(prepared: StreamedData, first: int = 0, steps: int = STEPS) -> list[np.ndarray]:
    """The tokens of some steps, made ahead by a thread as a run does."""
    loader = Loader(prepared.rows, BATCH, seed=3, shuffle=True)
    with loader.arriving(steps):
        return [loader.batch(step)["tokens"] for step in range(first, steps)]


def same(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return len(some) == len(others) and all(map(np.array_equal, some, others))


def flip(file: Path) -> None:
    """Another byte in the middle of a file."""
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def parts(prepared: StreamedData) -> list[str]:
    return sorted(path.name for path in prepared.stream.folder.glob("part-*") if path.is_dir())


def test_attention_is_told_that_rows_to_come_may_have_several_documents(folder, tmp_path):
    rows = streamed(folder, tmp_path / "cache", packing="none").rows
    assert documents_in_rows(rows.first) == "one"
    assert documents_in_rows(rows) == "several"


def test_every_document_is_in_one_part_and_parts_end_where_they_are_full(folder, tmp_path):
    prepared = streamed(folder, tmp_path / "cache")
    assert parts(prepared) == ["part-00000"]  # a run begins with the first
    number, documents, text = 0, 0, b""
    while (part := prepared.stream.make(number)) is not None:
        known = prepared.stream.known(number)
        assert known is not None and known.tokens == len(part.tokens)
        is_last = prepared.stream.parts == number + 1
        assert is_last or 2000 <= known.tokens < 2000 + 2200  # and the rest of a batch
        assert known.begin.row == documents
        text += bytes(part.tokens[part.tokens < 256].astype(np.uint8))
        number, documents = number + 1, documents + part.documents
    assert documents == 120 and prepared.stream.parts == number > 4
    plain = prepare(
        Data(source=Source(name=str(folder)), length=32, cache=str(tmp_path / "plain")),
        Tokenizer(),
        console=CONSOLE,
    )
    tokens = plain.corpora[0].tokens  # pyright: ignore
    assert text == bytes(tokens[tokens < 256].astype(np.uint8))


def test_the_rows_of_a_step_follow_from_its_number_alone(folder, tmp_path):
    whole = batches(streamed(folder, tmp_path / "cache"))
    again = streamed(folder, tmp_path / "cache")
    assert same(batches(again, first=17), whole[17:])
    assert same(batches(streamed(folder, tmp_path / "other"), first=17), whole[17:])
    # Without a thread, as a worker and `windlass data` read them.
    loader = Loader(again.rows, BATCH, seed=3, shuffle=True)
    assert np.array_equal(loader.batch(29)["tokens"], whole[29])


def test_in_an_epoch_no_row_comes_twice_and_the_next_one_is_shuffled_anew(folder, tmp_path):
    prepared = streamed(folder, tmp_path / "cache")
    batches(prepared, steps=200)  # to the end of the stream, and once more
    rows, count = prepared.rows, prepared.rows.parts
    assert count is not None
    steps = sum(rows._count(number) // BATCH for number in range(count))  # pyright: ignore
    loader = Loader(rows, BATCH, seed=3, shuffle=True)
    first = np.concatenate([loader.row_numbers(step) for step in range(steps)])
    second = np.concatenate([loader.row_numbers(steps + step) for step in range(steps)])
    assert len(set(first.tolist())) == len(first) == len(set(second.tolist()))
    assert (first != second).mean() > 0.9
    assert [rows.place(step, BATCH).epoch for step in (0, steps - 1, steps)] == [0, 0, 1]
    order = [rows.place(step, BATCH).part for step in range(steps)]
    assert order == sorted(order) and set(order) == {*range(count)}


def test_a_hub_that_is_cut_off_five_times_gives_the_same_tokens(tmp_path, monkeypatch):
    hub = DatasetHub(corpus())
    with online(hub, tmp_path, monkeypatch):
        whole = batches(streamed(NAME, tmp_path / "cache"))
        assert {name for name, _ in hub.ranges} == {"README.md", *hub.files}
        hub.cuts = 5
        prepared = streamed(NAME, tmp_path / "cut")
        assert same(batches(prepared), whole) and hub.cuts == 0
        assert sum(begin > 0 for _, begin in hub.ranges) == 5
        # What was read to its end is not kept twice.
        assert len([*prepared.stream.folder.glob("files/*.jsonl")]) <= 1


def test_training_begins_with_the_first_part_and_a_stream_that_is_lost_later_says_so(
    tmp_path, monkeypatch
):
    hub = DatasetHub(corpus())
    monkeypatch.setattr(downloads, "PATIENCE", 0.01)
    with online(hub, tmp_path, monkeypatch):
        prepared = streamed(NAME, tmp_path / "cache")
        assert [name for name, _ in hub.ranges if "train" in name] == ["data/train-00000.jsonl"]
        hub.refuses = 503
        loader = Loader(prepared.rows, BATCH, seed=3, shuffle=True)
        with loader.arriving(STEPS), pytest.raises(UserError, match="the same command again goes"):
            [loader.batch(step) for step in range(STEPS)]
        hub.refuses = None
        whole = batches(streamed(NAME, tmp_path / "whole"))
        assert same(batches(streamed(NAME, tmp_path / "cache")), whole)


def test_only_what_a_run_needs_is_fetched(folder, tmp_path):
    prepared = streamed(folder, tmp_path / "cache")
    steps = len(prepared.rows) // BATCH
    batches(prepared, steps=steps)
    assert parts(prepared) == ["part-00000"]
    batches(streamed(folder, tmp_path / "cache"), steps=steps + 1)
    assert parts(prepared) == ["part-00000", "part-00001"]


def test_older_parts_are_deleted_and_made_again_where_they_are_needed(folder, tmp_path):
    whole = batches(streamed(folder, tmp_path / "whole"), steps=120)
    prepared = streamed(folder, tmp_path / "cache", keep_parts=1)
    assert same(batches(prepared, steps=120), whole)
    assert len(parts(prepared)) <= 4 < prepared.rows.parts  # pyright: ignore
    assert "part-00000" in parts(prepared)
    again = streamed(folder, tmp_path / "cache", keep_parts=1)
    assert same(batches(again, first=20, steps=60), whole[20:60])


def test_what_is_held_out_is_of_the_first_part_and_never_trained_on(folder, tmp_path):
    prepared = streamed(folder, tmp_path / "cache", validation=0.3)
    held_out, trained = prepared.split("validation"), prepared.rows.first
    documents = {*held_out.index.document.tolist()}  # pyright: ignore
    assert documents and not documents & {*trained.index.document.tolist()}
    assert len(documents | {*trained.index.document.tolist()}) == prepared.corpora[0].documents
    other = streamed(folder, tmp_path / "cache")
    second = [one.rows._sequences(1).fingerprint for one in (prepared, other)]
    assert second[0] == second[1]


def test_a_damaged_part_is_found_and_made_again(folder, tmp_path):
    cache = tmp_path / "cache"
    whole = batches(streamed(folder, cache))
    assert integrity.is_cache(cache) and verify_cache(cache).good
    stream = streamed(folder, cache).stream
    flip(stream.place(1) / "tokens.bin")
    bad = [finding.name for finding in verify_cache(cache).findings if finding.damage.files]
    assert bad == [f"streams/{stream.name}/part-00001"]
    assert same(batches(streamed(folder, cache)), whole) and verify_cache(cache).good
    flip(stream.place(2).with_suffix(".json"))
    assert not verify_cache(cache).good
    assert same(batches(streamed(folder, cache)), whole)


def test_a_part_that_was_being_written_is_written_anew(folder, tmp_path):
    cache = tmp_path / "cache"
    whole = batches(streamed(folder, cache))
    stream = streamed(folder, cache).stream
    stream.place(2).with_suffix(".json").unlink()  # killed after its folder was there
    shutil.rmtree(stream.place(3))
    left = cache / "building" / f"{stream.name}-3"
    left.mkdir(parents=True)
    (left / "tokens.bin").write_bytes(b"half")
    assert same(batches(streamed(folder, cache)), whole)


def test_documents_that_changed_under_a_known_part_are_refused(folder, tmp_path):
    cache = tmp_path / "cache"
    batches(prepared := streamed(folder, cache))
    shutil.rmtree(prepared.stream.place(1))
    about = prepared.stream.place(1).with_suffix(".json")
    seal.write_signed(about, {**seal.opened(about), "content": "of other documents"})
    with pytest.raises(UserError, match="part 1 of data.source was made again, and its documents"):
        batches(streamed(folder, cache))


def test_the_identity_is_of_the_content_wherever_it_is_kept(folder, tmp_path):
    one = streamed(folder, tmp_path / "cache")
    shutil.copytree(folder, tmp_path / "moved")
    assert streamed(tmp_path / "moved", tmp_path / "other").fingerprint == one.fingerprint
    assert streamed(folder, tmp_path / "cache", part_tokens=900).fingerprint != one.fingerprint
    assert streamed(folder, tmp_path / "cache", limit=100).fingerprint != one.fingerprint


def test_a_commit_is_the_same_stream_by_whatever_name_and_needs_no_hub_once_it_is_here(
    tmp_path, monkeypatch
):
    hub = DatasetHub(corpus())
    with online(hub, tmp_path, monkeypatch):
        prepared = streamed(NAME, tmp_path / "cache")
        whole = batches(prepared)
        assert prepared.commit == hub.commit
    assert prepared.data.source is not None
    held = prepared.data.source.at(hub.commit)
    again = prepare(replace(prepared.data, source=held), Tokenizer(), console=CONSOLE)
    assert isinstance(again, StreamedData) and again.fingerprint == prepared.fingerprint
    assert same(batches(again), whole)


def test_a_limit_and_a_single_part_end_a_stream(folder, tmp_path):
    prepared = streamed(folder, tmp_path / "cache", limit=25)
    made = 0
    while prepared.stream.make(made) is not None:
        made += 1
    assert prepared.stream.known(made - 1).end.row == 25  # pyright: ignore
    one = streamed(folder, tmp_path / "one", part_tokens=10**6)
    assert one.rows.parts == 1
    assert len(batches(one, steps=2 * len(one.rows) // BATCH)) == 2 * len(one.rows) // BATCH


def test_progress_says_which_part_is_trained_on_and_what_is_ahead(folder, tmp_path):
    prepared = streamed(folder, tmp_path / "cache")
    steps = len(prepared.rows) // BATCH
    batches(prepared, steps=STEPS)
    begin, end = prepared.rows.progress(1, BATCH), prepared.rows.progress(steps, BATCH)
    assert begin["data_part"] == end["data_part"] == 0
    assert begin["data_ahead_tokens"] > end["data_ahead_tokens"] > 2000
    assert prepared.rows.progress(steps + 1, BATCH)["data_part"] == 1
    assert prepared.rows.described(1).endswith("; part 2 is here")
    batches(prepared := streamed(folder, tmp_path / "cache"), steps=200)
    last = prepared.rows.parts
    assert last is not None and prepared.rows.described(last - 1).endswith(
        f"the last of {last}; then the first begins again"
    )


def test_a_process_that_makes_no_part_waits_for_the_one_that_does(folder, tmp_path):
    whole = batches(streamed(folder, tmp_path / "whole"))
    maker, waiting = (streamed(folder, tmp_path / "cache") for _ in range(2))
    waiting.rows.waits = True
    found: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: found.extend(batches(waiting)))
    thread.start()
    assert same(batches(maker), whole)
    thread.join()
    assert same(found, whole)


def test_an_error_of_the_thread_is_raised_where_its_part_is_waited_for():
    def make(number: int) -> str | None:
        if number == 2:
            raise UserError("the hub is gone")
        return None if number > 2 else f"part {number}"

    arrivals = Arrivals(make, lambda number: None)
    assert arrivals.take(0) == "part 0"
    arrivals.request(1)
    arrivals.request(2)
    assert arrivals.take(1) == "part 1"
    with pytest.raises(UserError, match="the hub is gone"):
        arrivals.take(2)
    arrivals.close()


def test_waiting_is_reported(monkeypatch):
    monkeypatch.setattr("windlass.data.streams.arrivals.LATE", 0.001)
    told, go = [], threading.Event()

    def waiting(number: int) -> None:
        told.append(number)
        go.set()

    def make(number: int) -> int:
        go.wait()
        return number

    arrivals = Arrivals(make, waiting)
    assert arrivals.take(7) == 7 and told[0] == 7
    arrivals.close()
