"""Random bits of dropout: even, independent, and the same on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from windlass.layers.dropout import Dropout, random_bits

AXES = ("batch", "seq", "embed")
SHAPE = (8, 64, 128)


def bits(seed: int, shape=SHAPE) -> np.ndarray:
    return np.asarray(random_bits(jax.random.key_data(jax.random.key(seed)), AXES, shape))


def test_every_bit_is_set_in_half_of_the_places():
    shares = [np.mean((bits(3) >> place) & 1) for place in range(32)]
    assert np.abs(np.array(shares) - 0.5).max() < 4.5 * 0.5 / np.sqrt(np.prod(SHAPE))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_masks_of_neighbours_and_of_other_keys_are_independent(rate):
    kept = [bits(seed) < np.uint32((1 - rate) * 2**32) for seed in (0, 1)]
    pairs = [(kept[0], kept[1])]
    for axis in range(3):
        for distance in (1, 2, 7):
            ahead, behind = np.arange(distance, SHAPE[axis]), np.arange(SHAPE[axis] - distance)
            pairs.append((kept[0].take(ahead, axis), kept[0].take(behind, axis)))
    for one, other in pairs:
        correlation = np.corrcoef(one.ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 4.5 / np.sqrt(one.size)


def test_how_many_of_a_row_are_dropped_varies_as_chance_has_it():
    dropped = (bits(5, (32, 256, 128)) >= np.uint32(0.9 * 2**32)).sum(-1).ravel()
    assert np.mean(dropped) == pytest.approx(12.8, abs=0.15)
    assert np.var(dropped) == pytest.approx(128 * 0.1 * 0.9, rel=0.06)


def test_the_mask_is_the_same_on_any_mesh():
    drop = Dropout(0.1, (), jax.random.key_data(jax.random.key(7)))
    x = jnp.ones((8, 16, 4, 8))
    axes = ("batch", "seq", "heads", "head_dim")
    alone = np.asarray(drop(x, axes))
    mesh = jax.make_mesh(
        (2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 3
    )
    with jax.set_mesh(mesh):
        spec = jax.sharding.PartitionSpec(("data", "fsdp"), None, "tensor")
        together = jax.jit(lambda x: drop(x, axes))(jax.device_put(x, spec))
        assert together.sharding.spec[0] == ("data", "fsdp")
    assert np.array_equal(alone, np.asarray(together))
