"""`windlass export` as it is typed."""

import pytest

from tests import trained
from windlass.release import check

HEADS = {"file", "export", "check", "push", "pushed", "next"}


def test_a_dry_run_lists_files_and_where_they_would_go(program, place, tmp_path):
    run = trained.only_run(place)
    done = program("export", "tiny", "--to", str(tmp_path / "it"), "--dry-run", cwd=place)
    assert done.code == 0
    *files, total = done.out.splitlines()
    names = [line.split()[1] for line in files]
    assert names == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    ]
    assert total.startswith("export  the model of step 4, last weights, would be 1")
    assert total.endswith(f" KiB in 6 files in {tmp_path}/it; nothing written")
    assert not (tmp_path / "it").exists()
    words = ["--push", "me/it", "--private", "--dry-run"]
    done = program("export", str(run), "--to", "it", *words)
    assert done.out.splitlines()[-1] == (
        "push    it would be pushed to me/it, private, where it is new"
    )


@pytest.mark.long
def test_a_check_that_fails_is_the_exit_code(program, place, tmp_path, monkeypatch):
    words = ["export", "tiny", "--to", str(tmp_path / "it"), "--check"]
    done = program(*words, cwd=place)
    assert done.code == 0, done.err
    assert "\ncheck   the same: logits differ by at most " in done.out
    assert done.out.splitlines()[-1] == f"next    {tmp_path}/it/README.md says how to load it"
    assert {line.split()[0] for line in done.out.splitlines()} <= HEADS
    monkeypatch.setattr(check, "TOLERANCE", 0.0)
    done = program(*words, "--force", cwd=place)
    assert done.code == 1
    assert "\ncheck   NOT the same: logits differ by at most " in done.out
    assert "; 0.0e+00 would be alike\n" in done.out


def test_options_that_cannot_be_are_told_as_they_are_typed(program, place):
    done = program("export", "tiny", "--as", "whole", "--shard-size", "5", cwd=place)
    assert done.code == 2
    assert done.err == (
        '--as is "whole"; it must be model, adapter, merged, own, low-bit, gguf, gguf-adapter or '
        "null\n"
    )
    assert program("export", "tiny", cwd=place).err == (
        "where to? windlass export RUN --to DIR writes into a new folder DIR\n"
    )
    assert program("export", "tiny", "--to", "x", "--private", cwd=place).err == (
        "--private is of what is pushed; push names that\n"
    )


def test_the_next_lines_of_a_gguf_file_are_those_that_load_it(program, place, tmp_path):
    pytest.importorskip("gguf")
    words = ["--as", "gguf", "--quantize", "q8_0"]
    done = program("export", "tiny", "--to", str(tmp_path / "it"), *words, cwd=place)
    assert done.code == 0, done.err
    assert [line.split()[1] for line in done.out.splitlines()[:3]] == [
        "it.gguf",
        "Modelfile",
        "README.md",
    ]
    assert done.out.splitlines()[-4:] == [
        "bits    8.50 bits per weight of the linear maps",
        f"next    llama-cli -m {tmp_path}/it/it.gguf -p 'Once upon a time'",
        f"next    ollama create it -f {tmp_path}/it/Modelfile",
        f"next    {tmp_path}/it/README.md says how to load it",
    ]
    done = program("export", "tiny", "--to", str(tmp_path / "it"), "--quantize", "q8_0", cwd=place)
    assert done.err == "--quantize is of a GGUF file; --as gguf writes one\n"
