"""Caches of other programs are read into ours, row for row, without running anything in them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import windlass
from windlass.data import Data, prepare
from windlass.data.imported import write
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.sources.teacher import Source

ROWS, LENGTH, K, R, VOCAB = 5, 9, 4, 3, 50


def foreign(rows: int = ROWS, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shape = (rows, LENGTH - 1)

    def distinct(count: int) -> np.ndarray:
        every = np.stack([rng.permutation(VOCAB)[:count] for _ in range(rows * (LENGTH - 1))])
        return every.reshape(*shape, count).astype(np.int32)

    mask = np.ones((rows, LENGTH), np.uint8)
    mask[0, 6:] = 0
    return {
        "input_ids": rng.integers(VOCAB, size=(rows, LENGTH)).astype(np.int32),
        "attention_mask": mask,
        "topk_idx": distinct(K),
        "topk_logits": -np.sort(-rng.normal(size=(*shape, K))).astype(np.float16),
        "rand_idx": rng.integers(VOCAB, size=(*shape, R)).astype(np.int32),
        "rand_logits": rng.normal(size=(*shape, R)).astype(np.float16),
    }


def refusal(*words) -> str:
    with pytest.raises(UserError) as refused:
        write(*words)
    return str(refused.value)


def test_rows_of_every_file_come_back_in_their_places(tmp_path: Path):
    first, second = foreign(), foreign(3, seed=1)
    (tmp_path / "old").mkdir()
    np.savez(tmp_path / "old/shard_00000.npz", **first)
    save_file(second, tmp_path / "old/shard_00001.safetensors")
    taught = windlass.teach(imports=tmp_path / "old", out=tmp_path / "cache")
    assert (taught.rows, taught.tokens) == (8, 8 * (LENGTH - 1))
    data = prepare(Data(source=Source(path=str(tmp_path / "cache"))), Tokenizer())
    found = data.split("train").batch(range(8))
    both = {name: np.concatenate([first[name], second[name]]) for name in first}
    assert data.data.length == LENGTH - 1
    np.testing.assert_array_equal(found["tokens"], both["input_ids"][:, :-1])
    np.testing.assert_array_equal(found["targets"], both["input_ids"][:, 1:])
    np.testing.assert_array_equal(found["weight"][0], [1, 1, 1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(found["document"][0], [0, 0, 0, 0, 0, 0, -1, -1])
    np.testing.assert_array_equal(found["teacher_ids"][..., :K], both["topk_idx"])
    np.testing.assert_array_equal(found["teacher_logits"][..., :K], both["topk_logits"])
    np.testing.assert_array_equal(found["teacher_ids"][..., K:], both["rand_idx"])
    for row in range(8):
        for place in range(LENGTH - 1):
            seen = set(both["topk_idx"][row, place].tolist())
            for number, drawn in enumerate(both["rand_idx"][row, place].tolist()):
                logit = found["teacher_logits"][row, place, K + number]
                known = both["rand_logits"][row, place, number]
                assert logit == (-np.inf if drawn in seen else known)
                seen.add(drawn)
    mass = np.exp(found["teacher_logits"].astype(np.float64)).sum(axis=-1)
    np.testing.assert_allclose(found["teacher_log_z"], np.log(mass), atol=1e-5)
    assert windlass.verify(tmp_path / "cache").good
    assert windlass.teach(imports=tmp_path / "old", out=tmp_path / "cache") == taught


def test_what_is_no_cache_is_refused(tmp_path: Path):
    old, out = tmp_path / "old", tmp_path / "cache"
    assert refusal(old, out) == f"--import is {old}; there is no such folder"
    old.mkdir()
    (old / "shard_00000.pt").write_bytes(b"pickled")
    assert refusal(old, out) == (
        f"--import is {old}; it takes .npz and .safetensors files, and has shard_00000.pt. Pickled "
        "files are not read, since that can run any program: docs/distillation.md says how they "
        "are converted"
    )
    few = foreign()
    np.savez(old / "a.npz", **{name: few[name] for name in ("input_ids", "topk_idx")})
    assert refusal(old, out) == f"{old / 'a.npz'} has input_ids and topk_idx; it lacks topk_logits"
    np.savez(old / "a.npz", **few | {"topk_idx": few["topk_idx"][:, :-1]})
    assert refusal(old, out) == (
        f"{old / 'a.npz'} has topk_idx of shape [5, 7, 4], beside input_ids of [5, 9]; input_ids "
        "are [N, L], and candidates [N, L-1, K]"
    )
    np.savez(old / "a.npz", **few | {"topk_idx": few["topk_idx"].astype(object)})
    assert refusal(old, out).startswith(f"{old / 'a.npz'} cannot be read: Object arrays")
    (old / "a.npz").write_bytes(b"half of it")
    assert refusal(old, out).startswith(f"{old / 'a.npz'} cannot be read: ")
    np.savez(old / "a.npz", **few)
    np.savez(
        old / "b.npz", **{name: few[name] for name in ("input_ids", "topk_idx", "topk_logits")}
    )
    assert refusal(old, out) == (
        f"{old / 'b.npz'} has rows of 8 tokens with 4 candidates and 0 negatives, and "
        f"{old / 'a.npz'} of 8 tokens with 4 candidates and 3 negatives; all files of a cache have "
        "the same"
    )
    assert not out.exists()
    (old / "b.npz").unlink()
    write(old, out)
    np.savez(old / "a.npz", **foreign(seed=2))
    assert refusal(old, out).startswith(
        f"--out is {out}, a cache of other files: of imported files"
    )


def test_an_imported_cache_is_refused_beside_rows_of_documents(tmp_path: Path):
    from windlass.data.taught import joined
    from windlass.data.teacher import Teacher
    from windlass.sources import stories

    (tmp_path / "old").mkdir()
    np.savez(tmp_path / "old/a.npz", **foreign())
    write(tmp_path / "old", tmp_path / "cache")
    data = Data(source=stories.Source(count=4), teacher=Teacher(path=str(tmp_path / "cache")))
    with pytest.raises(UserError) as refused:
        joined(prepare(data, Tokenizer()), vocab=257)
    assert str(refused.value) == (
        f"data.teacher.path is {tmp_path}/cache, a cache that was imported with rows of its own; "
        f"data.source: {{kind: teacher, path: {tmp_path}/cache}} reads these"
    )


def test_a_split_that_a_cache_lacks_is_refused(tmp_path: Path):
    (tmp_path / "old").mkdir()
    np.savez(tmp_path / "old/a.npz", **foreign())
    write(tmp_path / "old", tmp_path / "cache")
    with pytest.raises(UserError) as refused:
        prepare(Data(source=Source(path=str(tmp_path / "cache"), split="test")), Tokenizer())
    assert str(refused.value) == (
        f"data.source.split is test, and the cache in {tmp_path}/cache has train"
    )
