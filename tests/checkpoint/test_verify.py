import shutil
from pathlib import Path

import numpy as np
import pytest

from windlass import seal
from windlass.checkpoint import archive
from windlass.checkpoint.verify import verify
from windlass.errors import UserError


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def flips(file: Path):
    """The file with its first, middle and last byte changed, one after the other; then mended."""
    good = file.read_bytes()
    random = np.random.default_rng(len(good))
    for offset in sorted({0, len(good) // 2, len(good) - 1}):
        content = bytearray(good)
        content[offset] ^= 1 << int(random.integers(8))
        file.write_bytes(content)
        yield offset
    file.write_bytes(good)


@pytest.fixture
def run(opened, place, identity):
    """A store with steps 1 and 2, written on eight devices."""
    store = opened()
    for step in (1, 2):
        store.save(step, place(step, (2, 2, 2)), identity)
    store.wait()
    return store


@pytest.mark.long
def test_a_flipped_byte_in_any_file_is_found_at_restore(
    run, place, abstract, identity, same_bits, said
):
    wanted, expected = abstract(place(1)), place(1)
    folder = run.folder / "2"
    there = files(folder)
    assert {seal.NAME, "_CHECKPOINT_METADATA", "manifest/metadata", "state/_METADATA"} < {*there}
    for name in there:
        for offset in flips(folder / name):
            restored = run.restore(wanted, identity)
            where = f"byte {offset} of {name}"
            assert restored.step == 1 and same_bits(restored.state, expected), where
            assert name in said.pop() and not said, where
            (run.folder / "2.damaged").rename(folder)
    assert run.restore(wanted, identity).step == 2


@pytest.mark.long
def test_a_flipped_byte_in_any_file_is_found_by_verify(run, tmp_path):
    assert verify(tmp_path).good
    shutil.rmtree(run.folder / "1")
    folder = run.folder / "2"
    named = set()
    for name in files(folder):
        for offset in flips(folder / name):
            report = verify(tmp_path)
            assert not report.good, f"byte {offset} of {name}"
            [finding] = report.findings
            assert finding.damage.files == [name], f"byte {offset} of {name}"
            named.update(finding.damage.arrays)
    assert "model.layer.weight" in named
    assert verify(tmp_path).good


def test_a_missing_file_is_found(run, tmp_path, place, abstract, identity):
    name = next(name for name in files(run.folder / "2") if name.startswith("state/d/"))
    (run.folder / "2" / name).unlink()
    assert name in verify(tmp_path).findings[1].damage.files
    assert run.restore(abstract(place(0)), identity).step == 1


@pytest.mark.parametrize("name", [seal.NAME, "manifest", "manifest/metadata"])
def test_a_folder_in_the_place_of_a_file_is_damage_and_so_is_the_contrary(
    run, tmp_path, place, abstract, identity, name
):
    path = run.folder / "2" / name
    if path.is_dir():
        shutil.rmtree(path)
        path.touch()
    else:
        path.unlink()
        path.mkdir()
    assert name in str(verify(tmp_path).findings[1])
    assert run.restore(abstract(place(0)), identity).step == 1


def test_an_array_that_its_own_list_does_not_name_is_damaged(run, tmp_path):
    file = run.folder / "2" / "state" / "_METADATA"
    file.write_text(file.read_text().replace('"key": "step"', '"key": "stek"'))
    assert str(verify(tmp_path).findings[1]) == (
        "step 2: damaged (file state/_METADATA; array step)"
    )


def test_a_checkpoint_that_a_trainer_removes_meanwhile_is_no_finding(run, tmp_path, monkeypatch):
    examine = archive.examine

    def removing(folder: Path) -> archive.Damage:
        if folder.name == "1":
            shutil.rmtree(folder)  # as on another host, where the lock of this one is not seen
        return examine(folder)

    monkeypatch.setattr(archive, "examine", removing)
    assert [finding.name for finding in verify(tmp_path).findings] == ["2"]


def test_frozen_arrays_that_a_trainer_removes_meanwhile_are_not_waited_for(tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / "frozen").mkdir(parents=True)  # of a start that saved no step
    monkeypatch.setattr(archive, "examine", lambda folder: folder.rmdir())
    with pytest.raises(UserError, match="^no checkpoint in "):
        verify(tmp_path)


def test_verify_needs_neither_the_mesh_nor_the_model_and_reports_in_words(
    run, place, identity, tmp_path, said
):
    run.save_frozen(place(5, (1, 8, 1)).model, identity)
    run.wait()
    before = files(run.folder)
    (run.folder / "1" / seal.NAME).unlink()
    shutil.rmtree(run.folder / "2" / "manifest")
    assert str(verify(tmp_path)) == (
        f"{run.folder}\n"
        "  step 1: damaged (file files.json)\n"
        "  step 2: damaged (files manifest/commit_success.txt, manifest/metadata)\n"
        "  frozen arrays: good"
    )
    gone = {"1/files.json", "2/manifest/commit_success.txt", "2/manifest/metadata"}
    assert files(run.folder) == sorted({*before} - gone)


def test_verify_says_when_there_is_nothing(tmp_path):
    with pytest.raises(UserError) as refused:
        verify(tmp_path)
    assert str(refused.value) == f"no checkpoint in {tmp_path}/checkpoints"
