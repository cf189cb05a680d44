"""Surroundings in which a command cannot work, or only just."""

import os
import shutil
import sys

import pytest

from windlass import seal
from windlass.cli import prepare_streams, writing
from windlass.cli.commands import run
from windlass.errors import UserError
from windlass.processes.signals import Signals
from windlass.telemetry.output import LastingOutput


@pytest.mark.parametrize("words", [["schema"], ["train"], ["runs"]])
def test_a_full_standard_output_is_named_and_ends_with_1(monkeypatch, capsys, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code = run(words, Signals())
    said = "the standard output cannot be written: No space left on device\n"
    assert (code, capsys.readouterr().err) == (1, said)


def test_a_slow_reader_of_standard_output_is_not_taken_for_lost():
    reading, writing_to = os.pipe()
    os.set_blocking(writing_to, False)
    with open(reading, "rb") as reader, open(writing_to, "w", encoding="utf-8") as stream:
        output = LastingOutput(stream)
        output.write("x" * 2**20)
        output.flush()
        assert not output.is_lost
        os.set_blocking(reading, False)
        while reader.read(2**16):
            pass
        stream.flush()
        output.write("later")
        output.flush()
        os.set_blocking(reading, False)
        assert reader.read().endswith(b"later")


def test_a_working_folder_that_was_deleted_is_named(monkeypatch, capsys, tmp_path):
    place = tmp_path / "gone"
    place.mkdir()
    monkeypatch.chdir(place)
    place.rmdir()
    code = run(["runs"], Signals())
    said = "the working folder was deleted; `cd` into one that is there\n"
    assert (code, capsys.readouterr().err) == (2, said)


def test_a_user_without_a_home_folder_is_told_how_to_have_one(monkeypatch, program):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # of a container: in no list of users
    ended = program("runs")
    assert (ended.code, ended.err) == (
        2,
        "there is no home folder: HOME is not set, and this user has none; HOME=/tmp in front of "
        "the command sets one\n",
    )


def test_a_c_locale_prints_numbers_for_what_it_cannot_write(monkeypatch, tmp_path):
    file = tmp_path / "out"
    with file.open("w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        prepare_streams()
        print("8 × TPU")
    assert file.read_text() == "8 \\xd7 TPU\n"


def test_a_word_that_is_not_read_as_utf_8_is_refused(program):
    ended = program("train", "tiny.yaml", "run.dir=caf\udcc3\udca9")  # as a C locale gives it
    assert (ended.code, ended.err) == (
        2,
        "run.dir=caf\ufffd\ufffd in the command is not read as UTF-8, as names and texts must be; "
        "where a locale is to blame, PYTHONUTF8=1 in front of the command does it\n",
    )


def test_the_name_of_a_run_is_no_markup_and_no_escape_code(program, place, tmp_path):
    (tmp_path / "runs").mkdir()
    names = {"[bold]", "a\x1b[2Jb", ":cat:"}
    for name in names:
        folder = tmp_path / "runs" / name
        shutil.copytree(next((place / "runs").iterdir()), folder)
        about = seal.opened(folder / "about.json")
        about["starts"][0]["recipe"] = "[/x]"
        seal.write_signed(folder / "about.json", about)
    ended = program("runs")
    assert (ended.code, ended.err) == (0, "")
    shown = {tuple(line.split()[:2]) for line in ended.out.splitlines()[1:]}
    assert shown == {(name.replace("\x1b", "\ufffd"), "[/x]") for name in names}


def test_a_full_disk_under_generated_texts_is_named():
    with pytest.raises(UserError) as refused:
        writing._write_lines([{"prompt": "a"}], ["b"], "/dev/full")
    said = "--out is /dev/full, which cannot be written: No space left on device"
    assert str(refused.value) == said
