"""Where compiled programs are kept, and what is done about those that are spoilt or too many."""

import os
import resource
import warnings
import zlib
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from windlass.starting.describe import describe
from windlass.telemetry import compile_cache
from windlass.telemetry.compile_cache import keep, setting


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A user's cache, and JAX as it is when nobody told it where to keep programs."""
    before = setting("jax_compilation_cache_dir")
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "compiled"
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def entry(folder: Path, name: str, used: int, text: bytes = b"a program", cut: int = 0) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{name}-cache"
    data = zlib.compress(text)
    path.write_bytes(data[: len(data) - cut])
    os.utime(path, (used, used))
    return path


def test_programs_are_kept_in_a_folder_of_the_user_alone(place):
    assert keep() == (place, None)
    assert place.stat().st_mode & 0o777 == 0o700
    assert setting("jax_compilation_cache_dir") == str(place)


def test_a_folder_that_jax_was_told_of_is_left_as_it_is(place, tmp_path):
    mine = entry(tmp_path / "mine", "jit_step", used=1, cut=3)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    assert keep().folder == tmp_path / "mine" and mine.exists() and not place.exists()


def test_nothing_is_kept_when_jax_was_told_not_to(place):
    jax.config.update("jax_enable_compilation_cache", False)
    assert keep() == (None, None) and not place.exists()


def test_nothing_is_kept_of_several_devices_on_cpus(place):
    assert keep("gpu", 8) == keep("cpu") == (place, None)
    one, two = (["device=cpu", f"device.count={count}"] for count in (1, 2))
    assert describe("quickstart", one).compile_cache == (place, None)
    assert describe("quickstart", two).compile_cache == (None, None)
    assert not setting("jax_enable_compilation_cache")


def test_a_folder_that_others_may_write_to_is_not_used(place):
    place.mkdir()
    place.chmod(0o770)
    assert keep() == (
        None,
        f"compiled programs are not kept for the next start: others may write to {place}, and "
        "what is there is run; chmod 700 it, or name another folder with WINDLASS_CACHE",
    )
    assert setting("jax_compilation_cache_dir") is None


def test_a_folder_that_cannot_be_made_is_done_without(place):
    place.write_text("in the way")
    assert keep() == (
        None,
        f"compiled programs are not kept for the next start ({place}: File exists)",
    )


def test_on_a_full_disk_kept_programs_are_used_and_one_line_says_that_no_more_are(place):
    compiled = jax.jit(lambda x: x + 1)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, unlimited[1]))
    try:
        kept = keep()
        with warnings.catch_warnings(record=True) as said:
            compiled(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert kept == (
        place,
        f"compiled programs are not kept for the next start ({place}: File too large)",
    )
    assert setting("jax_compilation_cache_dir") == str(place) and not said


def test_what_a_kill_left_half_written_is_removed_so_that_it_can_be_kept_again(place):
    half, whole = entry(place, "half", used=1, cut=3), entry(place, "whole", used=1)
    empty = place / "empty-cache"
    empty.touch()
    keep()
    assert whole.exists() and not half.exists() and not empty.exists()


def test_a_program_that_another_process_removes_meanwhile_counts_for_nothing(place):
    whole = entry(place, "whole", used=1)
    (place / "gone-cache").symlink_to(place / "nowhere")
    assert keep() == (place, None) and keep().size == whole.stat().st_size


def test_above_the_limit_the_longest_unused_go(place, monkeypatch):
    entries = [entry(place, f"jit_{used}", used, os.urandom(1000)) for used in (3, 1, 2)]
    monkeypatch.setattr(compile_cache, "LIMIT", 2500)
    assert keep().size > 2000
    assert [path.exists() for path in entries] == [True, False, True]
