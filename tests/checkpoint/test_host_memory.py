"""What comes off a GPU at step 0: of zeros one copy, which stands for all that are alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from windlass.checkpoint.host_memory import is_used_by, reserve, share_zeros


@pytest.fixture
def split():
    mesh = jax.make_mesh((4,), ("fsdp",), devices=jax.devices()[:4])
    return NamedSharding(mesh, PartitionSpec("fsdp"))


def test_zeros_that_are_alike_are_one_array_and_all_else_is_left_as_it_is(split):
    zeros = jnp.zeros((8, 2))
    arrays = {
        "weight": jnp.arange(16.0).reshape(8, 2),
        "mu": zeros,
        "nu": zeros + 0,
        "narrow": jnp.zeros((8, 2), jnp.bfloat16),
        "split": jax.device_put(zeros, split),
        "also": jax.device_put(zeros, split),
        "everywhere": jax.device_put(zeros, NamedSharding(split.mesh, PartitionSpec())),
        "negative": -zeros,
        "step": jnp.zeros((), jnp.int32),
        "none": jnp.zeros((0, 2)),
    }
    found = share_zeros(arrays)
    assert [*found] == [*arrays]
    for name in ("weight", "everywhere", "negative"):
        assert found[name] is arrays[name]
    assert found["mu"] is found["nu"] and found["split"] is found["also"]
    assert len({id(found[name]) for name in ("mu", "narrow", "split", "step")}) == 4
    assert found["split"].sharding == split.with_memory_kind("pinned_host")
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert np.asarray(found[name]).tobytes() == np.asarray(array).tobytes()


def test_memory_is_reserved_without_being_kept(split):
    assert not is_used_by({"weight": jax.device_put(np.zeros(4), split)})  # a CPU's is as it is
    before = len(jax.live_arrays())
    reserve([jax.ShapeDtypeStruct((4, 10), jnp.float32, sharding=split)])
    assert len(jax.live_arrays()) == before
