"""Rotary positions by their definitions, and as `transformers` has them for public models."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.reference import HAS_TORCH, rope_parameters
from windlass.config import read, section
from windlass.errors import UserError
from windlass.layers.rotary import READS, Rotary, Scaling, halves, interleaved


def scaling(kind: str, factor: float, length: int | None = None, **more: Any) -> Scaling:
    return read(Scaling, dict(kind=kind, factor=factor, original_length=length, **more))


# The rotary positions of public models, and the width of their heads.
PUBLIC = {
    "Llama 3.1 8B": (128, Rotary(5e5, "half", scaling("llama3", 8, 8192, slow=1, fast=4))),
    "Llama 3.2 1B": (64, Rotary(5e5, "half", scaling("llama3", 32, 8192))),
    "Qwen2.5 7B": (128, Rotary(1e6, "half", scaling("yarn", 4, 32768))),
    "Qwen3 0.6B": (128, Rotary(1e6, "half", scaling("yarn", 2.5, 32768, truncate=False))),
    "Gemma 3 4B": (256, Rotary(1e6, "half", scaling("linear", 8))),
    "Mistral 7B": (128, Rotary(1e4)),
}


def by_definition(rotary: Rotary, dim: int) -> list[float]:
    """One pair after the other, from the wavelengths, as the papers have it."""
    found, by = [], rotary.scaling
    length = (by and by.original_length) or 0
    for pair in range(dim // 2):
        frequency = 1 / rotary.theta ** (2 * pair / dim)
        if by is None:
            found.append(frequency)
        elif by.kind == "linear":
            found.append(frequency / by.factor)
        elif by.kind == "llama3":
            wavelength = 2 * math.pi / frequency
            if wavelength < length / 4:
                found.append(frequency)
            elif wavelength > length / 1:
                found.append(frequency / by.factor)
            else:
                smooth = (length / wavelength - 1) / (4 - 1)
                found.append((1 - smooth) * frequency / by.factor + smooth * frequency)
        else:
            ends = [
                dim * math.log(length / (2 * math.pi * turns)) / math.log(rotary.theta)
                for turns in (32, 1)
            ]
            first, last = (end / 2 for end in ends)
            if by.truncate is None:
                first, last = math.floor(first), math.ceil(last)
            ramp = min(max((pair - first) / (last - first), 0), 1)
            found.append((1 - ramp) * frequency + ramp * frequency / by.factor)
    return found


@pytest.mark.parametrize("model", PUBLIC)
def test_pairs_turn_as_fast_as_the_papers_say(model):
    dim, rotary = PUBLIC[model]
    np.testing.assert_allclose(rotary.frequencies(dim), by_definition(rotary, dim), rtol=1e-12)


@pytest.mark.skipif(not HAS_TORCH, reason="the definitions are what there is")
@pytest.mark.parametrize("more", [{}, {"mscale": 0.7, "mscale_all_dim": 1.3}], ids=str)
@pytest.mark.parametrize("model", [name for name, (_, rotary) in PUBLIC.items() if rotary.scaling])
def test_pairs_turn_as_fast_as_in_transformers(model, more):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    dim, rotary = PUBLIC[model]
    by = rotary.scaling
    assert by is not None
    if more and by.kind == "yarn":
        one, other = (0.1 * m * math.log(by.factor) + 1 for m in more.values())
        rotary = dataclasses.replace(
            rotary, scaling=dataclasses.replace(by, attention_factor=one / other)
        )
    theirs = LlamaConfig(head_dim=dim, rope_parameters=rope_parameters(rotary.theta, by) | more)
    frequencies, gain = ROPE_INIT_FUNCTIONS[by.kind](theirs)
    np.testing.assert_allclose(rotary.frequencies(dim), frequencies.numpy(), rtol=1e-6)
    assert rotary.gain == pytest.approx(gain, rel=1e-12)


def turned(x: np.ndarray, position: np.ndarray, rotary: Rotary) -> np.ndarray:
    """Neighbours as the real and imaginary parts of a number, which is turned: in float64."""
    numbers = x[..., ::2] + 1j * x[..., 1::2]
    turns = np.exp(1j * position[:, :, None, None] * np.array(by_definition(rotary, x.shape[-1])))
    numbers = numbers * turns * rotary.gain
    return np.stack([numbers.real, numbers.imag], axis=-1).reshape(x.shape)


@pytest.mark.parametrize("by", [None, scaling("yarn", 4, 400)], ids=["plain", "yarn"])
def test_interleaved_pairs_are_complex_numbers_that_turn_and_half_split_ones_the_same(by):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 4, 10)).astype(np.float32)
    position = np.array([[0, 1, 2], [5, 700, 701]], np.int32)
    neighbours, far = Rotary(100.0, "interleaved", by), Rotary(100.0, "half", by)
    expected = turned(x, position, neighbours)
    at = jnp.asarray(position)
    np.testing.assert_allclose(neighbours(jnp.asarray(x), at), expected, atol=2e-4)
    np.testing.assert_allclose(far(jnp.asarray(halves(x)), at), halves(expected), atol=2e-4)
    assert np.array_equal(interleaved(halves(x)), x)
    assert not np.array_equal(halves(x), x)


def test_the_product_of_a_query_and_a_key_depends_on_their_distance_alone():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 1, 8)).astype(np.float32))
    rotary = Rotary(50.0, "interleaved", scaling("llama3", 4, 20, slow=0.5, fast=2.0))

    def product(query: int, key: int):
        q, k = rotary(x, jnp.array([[query], [key]], jnp.int32))
        return jnp.sum(q * k)

    assert abs(product(9, 4) - product(105, 100)) < 1e-4
    assert abs(product(9, 4) - product(9, 5)) > 1e-2


MORE: dict[str, Any] = dict(
    original_length=100, slow=0.5, fast=3.0, attention_factor=1.2, truncate=False
)


@pytest.mark.parametrize("kind", READS)
def test_a_kind_of_scaling_reads_what_it_says_and_refuses_the_rest(kind):
    whole = Scaling(kind=kind, factor=2.0, **{name: MORE[name] for name in READS[kind]})

    def computed(scaling: Scaling) -> tuple:
        rotary = Rotary(50.0, "half", scaling)
        return *rotary.frequencies(16), rotary.gain

    for name in ("factor", *READS[kind]):
        value = getattr(whole, name)
        other = not value if isinstance(value, bool) else 2 * value
        assert computed(dataclasses.replace(whole, **{name: other})) != computed(whole), name
    for name in MORE.keys() - READS[kind]:
        with pytest.raises(ValueError) as error:
            dataclasses.replace(whole, **{name: MORE[name]})
        assert str(error.value) == f"{name} is {MORE[name]}; {kind} scaling does not read it"


@section
class Recipe:
    scaling: Scaling | None = None


@pytest.mark.parametrize(
    ("given", "key", "what"),
    [
        (dict(kind="yran", factor=4), "kind", 'is "yran"; did you mean yarn?'),
        (dict(kind="dynamic", factor=4), "kind", 'is "dynamic"; it must be linear, llama3 or yarn'),
        (dict(factor=4), "kind", "is required: linear, llama3 or yarn"),
        (dict(kind="linear"), "factor", "is required: a number"),
        (
            dict(kind="linear", factor=0.25),
            "factor",
            "is 0.25; it is 1 or more: how many times further positions reach",
        ),
        (
            dict(kind="yarn", factor=4),
            "original_length",
            "is required by yarn scaling: how many positions the model was first trained with",
        ),
        (
            dict(kind="llama3", factor=4, original_length=0),
            "original_length",
            "is 0; it must be 1 or more",
        ),
        (
            dict(kind="llama3", factor=4, original_length=8192, slow=5),
            "slow",
            "is 5.0; it must be above 0 and below fast (4.0)",
        ),
        (
            dict(kind="yarn", factor=4, original_length=8192, attention_factor=0),
            "attention_factor",
            "is 0.0; it must be above 0",
        ),
        (
            dict(kind="linear", factor=8, original_length=8192),
            "original_length",
            "is 8192; linear scaling does not read it",
        ),
    ],
)
def test_a_scaling_that_means_nothing_is_refused_by_key(given, key, what):
    with pytest.raises(UserError) as error:
        read(Recipe, {"scaling": given})
    assert str(error.value) == f"1 problem in the recipe:\n  scaling.{key}  {what}"


@pytest.mark.skipif(not HAS_TORCH, reason="compares with transformers")
def test_far_positions_differ_from_transformers_by_the_rounding_of_angles_and_no_more():
    """Both have angles in float32: at 8,000 either is 1e-4 off, and ours is not further off."""
    import torch
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    dim, rotary = 128, Rotary(1e6)
    config = Qwen3Config(head_dim=dim, rope_parameters=rope_parameters(rotary.theta, None))
    one = jnp.concatenate([jnp.ones(dim // 2), jnp.zeros(dim // 2)])  # of which cosines are left
    gaps = {}
    for last in (100, 8000):
        position = np.arange(last - 100, last)
        ours = rotary(jnp.tile(one, (1, 100, 1, 1)), jnp.asarray(position[None], jnp.int32))
        ours = np.asarray(ours, np.float64)[0, :, 0, : dim // 2]
        cosines, _ = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.from_numpy(position[None]))
        theirs = cosines[0, :, : dim // 2].double().numpy()
        exact = np.cos(position[:, None] * rotary.theta ** (-np.arange(0, dim, 2) / dim))
        gaps[last] = np.abs(ours - theirs).max()
        off, their_off = (np.abs(cosine - exact) for cosine in (ours, theirs))
        print(f"{last}: {gaps[last]:.1e} apart, {off.max():.1e} and {their_off.max():.1e} off")
        assert off.max() < last * 2.0**-23 and off.mean() <= their_off.mean()
    assert gaps[100] < 1e-5 and 1e-4 < gaps[8000] < 1e-3
