"""Sinkhorn's normalization in a kernel: that of plain XLA, in one call each way."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from windlass import doubly_stochastic
from windlass.devices import absent
from windlass.networks import sinkhorn


def random(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(2 * np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def plain(entries: jax.Array, n: int, iterations: int) -> jax.Array:
    rows = tuple(tuple(entries[i * n : (i + 1) * n]) for i in range(n))
    found: Any = doubly_stochastic.sinkhorn(rows, iterations)
    return jnp.stack([lane for row in found for lane in row])


# Less than a block of tokens, a whole number of blocks, and some that end in the midst of one.
@pytest.mark.parametrize(
    ("n", "iterations", "tokens"), [(4, 20, (3, 50)), (2, 20, (8, 256)), (3, 5, (3, 700))]
)
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_kernel_gives_the_values_and_gradients_of_plain_xla(n, iterations, tokens, platform):
    entries, gradient = (random(n * n, *tokens, seed=seed) for seed in (0, 1))
    found, pull = jax.vjp(
        lambda x: sinkhorn.in_kernel(x, n, iterations, platform, interpret=True), entries
    )
    expected, expected_pull = jax.vjp(lambda x: plain(x, n, iterations), entries)
    np.testing.assert_allclose(np.asarray(found), expected, atol=1e-6)
    np.testing.assert_allclose(pull(gradient)[0], expected_pull(gradient)[0], atol=1e-6)


@pytest.mark.parametrize(
    ("platform", "kind", "calls"),
    [
        ("tpu", "TPU v6 lite", 2),
        ("gpu", "NVIDIA H200", 2),
        ("gpu", "AMD Instinct MI300X", 0),
        ("cpu", "cpu", 0),
    ],
)
def test_devices_that_have_a_kernel_call_it_once_each_way(platform, kind, calls):
    """On two devices, each of which has half of the rows."""
    mesh = absent.mesh(dict(data=2, fsdp=1, tensor=1), absent.Absent(platform, kind))
    with jax.sharding.use_abstract_mesh(mesh):
        place = jax.NamedSharding(mesh, jax.P(None, ("data", "fsdp")))
        logits = jax.ShapeDtypeStruct((16, 4, 256), jnp.float32, sharding=place)

        def both(logits):
            found, pull = jax.vjp(lambda logits: sinkhorn.sinkhorn(logits, 20), logits)
            return found, pull(found)

        text = str(jax.make_jaxpr(both)(logits))
    assert text.count("pallas_call[") == calls
    # 512 tokens of a device in blocks of 128 or 1,024.
    assert text.count(f"grid=({4 if platform == 'gpu' else 1},)") == calls
