import gc
import itertools
import logging
import math
import resource
import shutil
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from windlass import seal
from windlass.checkpoint import Checkpoint, archive, orbax_faults
from windlass.checkpoint.store import best_step, chosen_step, load, reading
from windlass.errors import PeerLost, UserError
from windlass.files import folder_lock
from windlass.processes import hosts


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def spoil(folder: Path) -> None:
    """Change one byte of the largest file."""
    file = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_a_state_comes_back_with_the_same_bits(
    opened, place, abstract, identity, same_bits, said, shape
):
    state = place(7, shape)
    store = opened()
    assert store.save(7, state, identity, {"validation_loss": jnp.float32(2.5)})
    store.wait()
    restored = opened().restore(abstract(state), identity)
    assert (restored.step, restored.metrics) == (7, {"validation_loss": 2.5})
    assert same_bits(restored.state, state)
    assert jax.tree.map(lambda x: x.sharding, restored.state) == jax.tree.map(
        lambda x: x.sharding, state
    )
    assert said == []


@pytest.mark.parametrize(
    "before, after",
    [
        ((2, 2, 2), (1, 1, 1)),
        ((1, 1, 1), (2, 2, 2)),
        ((8, 1, 1), (1, 8, 1)),
        ((1, 8, 1), (4, 1, 2)),
    ],
)
def test_a_state_saved_on_one_mesh_comes_back_on_another(
    opened, place, abstract, identity, same_bits, before, after
):
    store = opened()
    store.save(1, place(1, before), identity)
    wanted = place(1, after)
    restored = store.restore(abstract(wanted), identity)
    assert same_bits(restored.state, wanted)
    assert restored.state.model["layer"].weight.sharding == wanted.model["layer"].weight.sharding


def test_a_state_without_shardings_comes_back_on_the_first_device(opened, place, identity):
    store = opened()
    store.save(1, place(1, (2, 2, 2)), identity)
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), place(1))
    restored = store.restore(plain, identity)
    assert restored.state.model["layer"].weight.devices() == {jax.devices()[0]}


def test_a_saved_state_may_be_donated_at_once(opened, place, abstract, identity, same_bits):
    state = place(5, (2, 2, 2))
    expected = jax.tree.map(np.array, state)
    store = opened()
    store.save(5, state, identity)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: ~x if x.dtype == bool else x + 1, tree))
    for _ in range(3):
        state = jax.jit(step, donate_argnums=0)(state)
    assert same_bits(store.restore(abstract(place(5, (2, 2, 2))), identity).state, expected)


def test_a_new_run_has_nothing_to_restore(opened, place, abstract, identity, said):
    assert opened().restore(abstract(place(0)), identity) is None
    assert said == []


def test_saving_a_step_again_changes_nothing(opened, place, abstract, identity, same_bits):
    store = opened()
    assert store.save(3, place(3), identity)
    assert not store.save(3, place(4), identity)
    assert same_bits(store.restore(abstract(place(3)), identity).state, place(3))


def test_the_newest_and_the_best_are_kept(opened, place, identity):
    store = opened(keep=2)
    losses = {0: math.nan, 10: 3.0, 20: 2.0, 30: 2.5, 40: None, 50: 2.6}
    for step, loss in losses.items():
        metrics = {} if loss is None else {"validation_loss": loss}
        store.save(step, place(step), identity, metrics)
    store.wait()
    assert store.steps() == [20, 40, 50]
    assert names(store.folder) == {"20", "40", "50"}


def test_without_losses_the_newest_are_kept(opened, place, identity):
    store = opened(keep=1)
    for step in (0, 1, 2):
        store.save(step, place(step), identity)
        store.wait()
        assert store.steps() == [step]


def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_it_taken(
    opened, place, abstract, identity, same_bits, said
):
    store = opened()
    for step in (400, 800):
        store.save(step, place(step), identity)
    store.wait()
    (store.folder / "800.damaged").mkdir()  # an earlier one
    file = "manifest/metadata"
    (store.folder / "800" / file).write_text("{}")

    restored = store.restore(abstract(place(0)), identity)
    assert restored.step == 400 and same_bits(restored.state, place(400))
    assert said == [
        "checkpoint at step 800 is damaged (file manifest/metadata); "
        f"it is now {store.folder}/800.damaged-2, and an older one is tried"
    ]
    assert names(store.folder) == {"400", "800.damaged", "800.damaged-2"}
    assert store.save(800, place(800), identity)
    assert store.restore(abstract(place(0)), identity).step == 800


def test_arrays_exchanged_with_their_hashes_are_found_by_their_fingerprints(
    opened, place, abstract, identity, same_bits, said
):
    store = opened()
    for step in (1, 2):
        store.save(step, place(step), identity)
    store.wait()
    second = store.folder / "2"
    shutil.rmtree(second / "state")
    shutil.copytree(store.folder / "1" / "state", second / "state")
    (second / seal.NAME).unlink()
    seal.seal(second, leave=())
    restored = store.restore(abstract(place(0)), identity)
    assert restored.step == 1 and same_bits(restored.state, place(1))
    assert "is damaged (arrays step, key, model.layer.weight and 3 more)" in said[0]


def test_hashes_are_committed_with_the_arrays(opened, place, abstract, identity, monkeypatch):
    store = opened()
    monkeypatch.setattr(seal, "extend", lambda *_: None)  # as if killed right after the commit
    store.save(1, place(1), identity)
    store.wait()
    monkeypatch.undo()
    sealed = {*seal.opened(store.folder / "1" / seal.NAME)["files"]}
    files = [p for p in (store.folder / "1").rglob("*") if p.is_file()]
    assert archive.MANIFEST in sealed and not sealed & {*archive.LATE}
    assert store.restore(abstract(place(1)), identity).step == 1
    sealed = {*seal.opened(store.folder / "1" / seal.NAME)["files"]}
    assert {*archive.LATE} <= sealed and len(sealed) == len(files) - 1  # all but the seal


def test_when_no_checkpoint_is_good_nothing_starts_at_step_0(opened, place, abstract, identity):
    store = opened()
    for step in (1, 2):
        store.save(step, place(step), identity)
    store.wait()
    for step in (1, 2):
        spoil(store.folder / str(step))
    for _ in range(2):  # nor does a second attempt
        with pytest.raises(UserError) as refused:
            store.restore(abstract(place(0)), identity)
        assert str(refused.value) == (
            f"no good checkpoint is left in {store.folder}, only 1.damaged, 2.damaged; put back a "
            "copy of one, start another run with run.dir, or start again at step 0 once "
            f"`windlass runs --delete {store.folder.parent}` has deleted this one"
        )


def test_a_checkpoint_of_another_run_is_refused_and_kept(opened, place, abstract, identity):
    store = opened()
    store.save(800, place(8), identity)
    other = {**identity, "model": "llama 3b", "data": "stories 1c55", "split": 2}
    with pytest.raises(UserError) as refused:
        store.restore(abstract(place(0)), other)
    assert str(refused.value) == (
        "checkpoint at step 800 was written for model llama 1b and data stories 77b0 and split "
        "unknown; this run describes model llama 3b and data stories 1c55 and split 2. "
        "Take the change back, or start another run with run.dir"
    )
    assert names(store.folder) == {"800"}


def test_a_checkpoint_of_other_arrays_is_refused_and_kept(opened, place, abstract, identity):
    store = opened()
    store.save(1, {"a": jnp.zeros((2, 3)), "b": jnp.zeros(2), "same": jnp.zeros(1)}, identity)
    wanted = {"a": jnp.zeros((2, 4)), "c": jnp.int32(0), "same": jnp.zeros(1)}
    with pytest.raises(UserError) as refused:
        store.restore(abstract(wanted), identity)
    assert str(refused.value) == (
        "checkpoint at step 1 holds other arrays than this run describes:\n"
        "  a  is float32[2, 3] there and float32[2, 4] here\n"
        "  b  is float32[2] there and absent here\n"
        "  c  is absent there and int32[] here"
    )
    assert names(store.folder) == {"1"}


def test_leftovers_of_killed_saves_and_deletions_are_removed_and_said(
    opened, place, abstract, identity, said
):
    store = opened()
    store.save(4, place(4), identity)
    store.wait()
    for name in ("8" + archive.UNFINISHED, "frozen" + archive.UNFINISHED, "2.removing"):
        (store.folder / name / "state").mkdir(parents=True)
    assert store.restore(abstract(place(4)), identity).step == 4
    assert said == [
        "removed 2.removing: a deletion of checkpoint at step 2 was cut short",
        "removed 8.orbax-checkpoint-tmp: a save of checkpoint at step 8 was cut short",
        "removed frozen.orbax-checkpoint-tmp: a save of the frozen arrays was cut short",
    ]
    assert names(store.folder) == {"4"}


def test_a_failed_write_is_told_by_the_next_call_and_loses_nothing(
    opened, abstract, identity, same_bits, capfd, monkeypatch
):
    monkeypatch.setattr(sys, "unraisablehook", orbax_faults.unraisable_hook)  # pytest has its own
    # Several: when one has failed, TensorStore has something to say of each of the others.
    values = np.random.default_rng(0).normal(size=(12, 100_000))
    large = {f"x{row}": jnp.asarray(values[row], jnp.float32) for row in range(len(values))}
    store = opened()
    store.save(1, large, identity)
    store.wait()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, unlimited[1]))
        store.save(2, large, identity)
        with pytest.raises(UserError) as failed:
            store.save(3, large, identity)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert str(failed.value) == (
        f"saving checkpoint at step 2 in {store.folder} failed: File too large; "
        "the newest checkpoint there is step 1; make room there, and the same command goes on"
    )
    assert "Traceback" not in capfd.readouterr().err
    assert same_bits(store.restore(abstract(large), identity).state, large)
    assert store.save(3, large, identity)
    store.wait()
    assert store.steps() == [1, 3]


def test_what_orbax_leaves_of_a_failed_save_is_not_told_minutes_later(caplog):
    orbaxs = "Task exception was never retrieved\nfuture: <Task coro=<...> at .../orbax/...>"
    for message in (orbaxs, "another's"):
        logging.getLogger("asyncio").error(message)
    assert [record.getMessage() for record in caplog.records] == ["another's"]

    async def async_serialize():
        pass

    with warnings.catch_warnings(record=True) as warned:
        orbax_faults.mend()
        async_serialize.__qualname__ = "async_serialize_from_host.<locals>.write_fragment"
        async_serialize()  # pyright: ignore[reportUnusedCoroutine]
        gc.collect()
    assert not warned


@pytest.mark.parametrize("jump", [1e7, -1e7])
def test_a_clock_that_is_set_while_a_checkpoint_is_saved_does_not_make_it_late(
    opened, place, abstract, identity, same_bits, monkeypatch, jump
):
    real, jumps = time.time, itertools.count(1)
    store = opened()
    monkeypatch.setattr(time, "time", lambda: real() + jump * next(jumps))
    store.save(1, place(1), identity)
    store.wait()
    assert same_bits(store.restore(abstract(place(1)), identity).state, place(1))


@pytest.mark.long
def test_saves_leave_no_object_behind(opened, place, identity):
    """TensorStore never freed what Orbax asked it before and after each of them."""
    store, left = opened(), []
    for step in range(9):
        store.save(step, place(0), identity)
        store.wait()
        gc.collect()
        left.append(sum(type(one) is list for one in gc.get_objects()))
    assert left[-1] - left[-4] < 12  # 24 lists each


def test_a_folder_that_cannot_be_written_is_told(opened, place, identity, tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder would be")
    with pytest.raises(UserError) as failed:
        opened().save(1, place(1), identity)
    assert str(failed.value) == (
        f"saving checkpoint at step 1 in {tmp_path}/checkpoints failed: Not a directory; "
        "there is none yet"
    )


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_peer_that_is_lost_during_a_save_is_no_fault_of_the_disk(
    opened, place, identity, monkeypatch, is_wrapped
):
    """With a plain ValueError, as Gloo's failures come out of some calls of JAX."""
    lost = ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer [10.0.0.3]:4711")

    def write(*_):
        if not is_wrapped:
            raise lost
        try:
            raise lost
        except ValueError:
            raise RuntimeError("the save failed")  # noqa: B904  as a library may

    store = opened()
    monkeypatch.setattr(archive, "write", write)
    with pytest.raises(UserError, match="saving checkpoint at step 1 in .* failed"):
        store.save(1, place(1), identity)
    monkeypatch.setattr(hosts, "count", lambda: 2)
    monkeypatch.setattr(hosts, "broadcast", lambda name, look: look())
    with pytest.raises(PeerLost):
        store.save(1, place(1), identity)


def test_frozen_arrays_of_a_start_that_saved_no_step_give_way_to_those_made_anew(
    opened, place, abstract, identity, same_bits
):
    killed = opened()
    killed.save_frozen(place(8, (2, 2, 2)).model, identity)
    killed.wait()
    state = place(9, (2, 2, 2))
    store = opened()
    with folder_lock(store.folder / "frozen", shared=True):  # as `windlass verify` reads it
        assert store.restore(abstract(state), identity) is None
    assert store.save_frozen(state.model, identity)
    assert same_bits(store.restore_frozen(abstract(state.model), identity), state.model)


def test_frozen_arrays_are_stored_once_and_checked(
    opened, place, abstract, identity, same_bits, tmp_path
):
    store = opened()
    frozen = place(9, (2, 2, 2)).model
    with pytest.raises(UserError) as refused:
        store.restore_frozen(abstract(frozen), identity)
    assert str(refused.value) == (
        f"the frozen arrays in {store.folder}/frozen are gone; "
        "put back a copy of that folder, or start another run with run.dir"
    )
    assert store.save_frozen(frozen, identity)
    assert not store.save_frozen(frozen, identity)
    assert same_bits(store.restore_frozen(abstract(frozen), identity), frozen)
    assert store.steps() == []

    spoil(store.folder / "frozen")
    [wrong] = seal.broken(store.folder / "frozen")
    for _ in range(2):
        with pytest.raises(UserError) as refused:
            store.restore_frozen(abstract(frozen), identity)
        assert str(refused.value) == (
            f"the frozen arrays in {store.folder}/frozen are damaged (file {wrong}); "
            "put back a copy of that folder, or start another run with run.dir"
        )


def test_a_tree_without_arrays_can_be_stored(opened, identity):
    store = opened()
    store.save_frozen({"none": None, "empty": jnp.zeros((0, 2))}, identity)
    wanted = {"none": None, "empty": jax.ShapeDtypeStruct((0, 2), jnp.float32)}
    assert store.restore_frozen(wanted, identity)["empty"].shape == (0, 2)


def test_loading_reads_only_what_is_asked_for_and_changes_nothing(
    opened, place, abstract, identity, same_bits, tmp_path
):
    store = opened()
    for step in (1, 2):
        store.save(step, place(step, (2, 2, 2)), identity)
    store.wait()
    (store.folder / ("4" + archive.UNFINISHED)).mkdir()
    before = names(store.folder)

    wanted = abstract(place(0))._replace(moments=None, nothing=None)
    loaded = load(tmp_path, wanted, identity)
    assert loaded.step == 2 and loaded.identity == identity
    assert same_bits(loaded.state, place(2)._replace(moments=None, nothing=None))
    assert load(tmp_path, wanted, identity, step=1).step == 1
    assert names(store.folder) == before


def test_loading_says_what_is_there(opened, place, abstract, identity, tmp_path):
    wanted = abstract(place(0))
    with pytest.raises(UserError) as refused:
        load(tmp_path, wanted, identity)
    assert str(refused.value) == f"no checkpoint in {tmp_path}/checkpoints"
    store = opened()
    for step in (1, 2):
        store.save(step, place(step), identity)
    store.wait()
    with pytest.raises(UserError) as refused:
        load(tmp_path, wanted, identity, step=5)
    assert str(refused.value) == f"no checkpoint at step 5 in {store.folder}; there are 1, 2"


def test_loading_refuses_a_damaged_checkpoint_and_names_those_that_are_good(
    opened, place, abstract, identity, tmp_path
):
    wanted, store = abstract(place(0)), opened()
    for step in (1, 2, 3):
        store.save(step, place(step), identity)
    store.wait()
    file = archive.MANIFEST

    def refusal(step: int | None) -> str:
        with pytest.raises(UserError) as refused:
            load(tmp_path, wanted, identity, step=step)
        return str(refused.value)

    (store.folder / "3" / file).write_text("{}")
    for step in (None, 3):
        assert refusal(step) == (
            f"checkpoint at step 3 in {store.folder} is damaged (file {file}); good there: steps "
            f"1, 2. Once {store.folder}/3 is moved away, step 2 is used; a command that has --step "
            "takes --step 2, too"
        )
    assert load(tmp_path, wanted, identity, step=2).step == 2
    for step in (1, 2):
        (store.folder / str(step) / file).write_text("{}")
    assert refusal(None) == (
        f"checkpoint at step 3 in {store.folder} is damaged (file {file}), and none of the others "
        "there is good"
    )
    for step in (1, 2):
        shutil.rmtree(store.folder / str(step))
    assert refusal(None).endswith(", and no other there is good")


def test_a_checkpoint_that_might_be_the_best_is_not_passed_over(opened, place, identity, tmp_path):
    store = opened()
    for step in (1, 2):
        store.save(step, place(step), identity, {"validation_loss": 3.0 - step})
    store.wait()
    assert best_step(tmp_path, "validation_loss") == 2
    (store.folder / "2" / archive.MANIFEST).write_text("{}")
    with pytest.raises(
        UserError, match="checkpoint at step 2 .* good there: step 1. Once .* step 1 is used"
    ):
        best_step(tmp_path, "validation_loss")


def test_a_checkpoint_stays_while_it_is_read_and_goes_after_a_later_save(
    opened, place, abstract, identity, same_bits, tmp_path
):
    store = opened(keep=1)

    def save(step: int) -> None:
        store.save(step, place(step), identity)
        store.wait()

    def read(step: int):
        save(2)
        save(3)
        return load(tmp_path, abstract(place(0)), identity, step=step)

    save(1)
    loaded = reading(tmp_path, lambda: chosen_step(tmp_path), read)
    assert loaded.step == 1 and same_bits(loaded.state, place(1))
    assert store.steps() == [1, 3]
    save(4)
    assert store.steps() == [4]


def test_a_checkpoint_that_is_removed_while_it_is_read_is_given_up_for_a_newer_one(
    opened, place, identity, tmp_path
):
    """As on a file system whose locks do not reach the host that trains."""
    store, tried = opened(), []
    store.save(0, place(0), identity)
    store.wait()

    def read(step: int) -> int:
        tried.append(step)
        store.save(step + 1, place(step + 1), identity)
        store.wait()
        if step < 2:
            shutil.rmtree(store.folder / str(step))
        return len(archive.manifest(store.folder / str(step))["arrays"])

    assert reading(tmp_path, lambda: chosen_step(tmp_path), read)
    assert tried == [0, 1, 2]

    def never(step: int) -> None:
        shutil.rmtree(store.folder / str(step))
        (store.folder / str(step + 1)).mkdir()
        raise FileNotFoundError

    with pytest.raises(UserError) as refused:
        reading(tmp_path, lambda: chosen_step(tmp_path), never)
    assert str(refused.value) == (
        f"the checkpoints in {store.folder} are replaced faster than they can be read; a higher "
        "checkpoint.keep of the run that trains there keeps them longer"
    )


def test_keeping_none_is_refused():
    with pytest.raises(ValueError, match="keep is 0; it must be 1 or more"):
        Checkpoint(keep=0)
