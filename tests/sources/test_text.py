import os
from pathlib import Path

import pytest

from windlass.errors import UserError
from windlass.sources import text
from windlass.sources.text import Source

POEM = b"one\r\ntwo\r\n\r\n \t\nthree\nfour\n\n"


def texts(source) -> list[str]:
    return [source[index]["text"] for index in range(len(source))]


@pytest.fixture
def poem(tmp_path: Path) -> Path:
    path = tmp_path / "poem.txt"
    path.write_bytes(POEM)
    return path


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ("file", ["one\ntwo\n\n \t\nthree\nfour\n\n"]),
        ("line", ["one", "two", "three", "four"]),
        ("blank_line", ["one\ntwo", "three\nfour"]),
    ],
)
def test_a_document_is_a_file_a_line_or_what_stands_between_blank_lines(
    poem: Path, documents, expected: list[str]
):
    assert texts(Source(path=str(poem), documents=documents)) == expected


def test_a_last_line_needs_no_line_end(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo")
    assert texts(Source(path=str(tmp_path), documents="line")) == ["one", "two"]


def test_a_byte_order_mark_is_not_text(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo")
    assert texts(Source(path=str(tmp_path / "a.txt"))) == ["one\ntwo"]
    assert texts(Source(path=str(tmp_path / "a.txt"), documents="line")) == ["one", "two"]


def test_a_folder_and_a_pattern_name_files_in_the_order_of_their_names(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt", "other.md"):
        (tmp_path / name).write_text(name)
    assert texts(Source(path=str(tmp_path))) == ["a.txt", "b.txt", "deep/c.txt"]
    assert texts(Source(path=f"{tmp_path}/*.md")) == ["other.md"]


def test_the_fingerprint_changes_with_the_file_and_with_how_it_is_read(poem: Path):
    before = Source(path=str(poem)).fingerprint()
    assert Source(path=str(poem)).fingerprint() == before
    assert Source(path=str(poem), documents="line").fingerprint() != before
    known = poem.stat()
    os.utime(poem, ns=(known.st_atime_ns, known.st_mtime_ns + 1000))
    assert Source(path=str(poem)).fingerprint() != before


def test_a_path_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        len(Source(path="gone.txt"))
    assert str(refused.value) == (
        f"data.source.path is gone.txt, which does not exist; it is looked for from {tmp_path}"
    )
    with pytest.raises(UserError) as refused:
        Source(path="*.txt").fingerprint()
    assert str(refused.value) == (
        f"data.source.path is *.txt, which matches no file; it is looked for from {tmp_path}"
    )
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError) as refused:
        len(Source(path="folder"))
    assert str(refused.value) == (
        "data.source.path is folder, a folder without a file that ends in .txt; "
        "a pattern such as *.md names files with another ending"
    )


def test_another_encoding_is_refused_and_not_replaced(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"plain\ncaf\xe9\n")
    with pytest.raises(UserError) as refused:
        texts(Source(path=str(file), documents="line"))
    assert str(refused.value) == (
        f"{file} is not UTF-8: byte 9 is 0xe9; "
        "`iconv -f latin1 -t utf-8` converts a file, from whatever encoding it has"
    )


def test_a_document_too_large_to_tokenise_is_refused(poem: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text, "LARGEST_DOCUMENT_BYTES", 2**20)
    poem.write_bytes(b"x" * 3 * 2**20)
    with pytest.raises(UserError) as refused:
        texts(Source(path=str(poem)))
    assert str(refused.value) == (
        f"{poem} holds a document of 3.0 MiB; a document is at most 1.0 MiB: "
        "data.source.documents=blank_line or line makes shorter ones"
    )
