"""Reservoirs beside their equations, written out."""

import dataclasses
from typing import get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from windlass.config import read, tree
from windlass.dynamics import spectral_radius
from windlass.errors import UserError
from windlass.layers.context import Packed
from windlass.layers.linear import Linear
from windlass.layers.stack import stacked
from windlass.networks import reservoir as reservoirs
from windlass.networks.reservoir import (
    Activation,
    DelayProducts,
    LeakyReservoir,
    Reservoir,
    StateSpace,
    WindowedReservoir,
    reservoir,
    states,
)

FUNCTIONS = {
    "tanh": torch.tanh,
    "relu": torch.nn.functional.relu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}
# Two documents in the first row and one in the second, which ends in padding.
POSITION = np.array([[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0]], np.int32)
DOCUMENT = np.array([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, -1]], np.int32)
X = np.random.default_rng(0).normal(size=(2, 7, 6)).astype(np.float32)
KEY = jax.random.key(4)


def context() -> Packed:
    return Packed({"position": jnp.asarray(POSITION), "document": jnp.asarray(DOCUMENT)})


def documents():
    """Row and positions of each document."""
    yield from [(0, slice(0, 4)), (0, slice(4, 7)), (1, slice(0, 6))]


def test_leaky_recurrences_of_every_activation_are_their_equation_in_one_loop():
    sections = [
        Reservoir(size=5 + i, radius=0.5 + 0.3 * i, leak=1 - 0.2 * i, density=0.6, activation=name)
        for i, name in enumerate(get_args(Activation))
    ]
    layers = [reservoir(one, 6, key=jax.random.key(i)) for i, one in enumerate(sections)]
    found = jax.jit(lambda x: states(layers, x, context()))(jnp.asarray(X))
    program = str(jax.make_jaxpr(lambda x: states(layers, x, context()))(jnp.asarray(X)))
    assert program.count("scan[") == 1
    for one, layer, ours in zip(sections, layers, found, strict=True):
        assert isinstance(layer, LeakyReservoir)
        into, recurrent = (torch.tensor(np.asarray(x)) for x in (layer.inputs, layer.recurrent))
        for row, where in documents():
            state = torch.zeros(one.size)
            for at in range(where.start, where.stop):
                z = torch.tensor(X[row, at]) @ into + state @ recurrent
                state = one.leak * FUNCTIONS[one.activation](z) + (1 - one.leak) * state
                np.testing.assert_allclose(ours[row, at], state, atol=1e-6)
            simulated = jax.tree.map(np.asarray, layer).simulated(X[row, where])
            np.testing.assert_allclose(ours[row, where], simulated, atol=1e-6)


def test_a_window_reads_the_last_inputs_of_its_document_each_older_one_weaker():
    about = Reservoir(size=5, window=3, decay=0.5, density=0.7, activation="relu")
    layer = WindowedReservoir(about, 6, key=KEY)
    plain = WindowedReservoir(dataclasses.replace(about, decay=1.0), 6, key=KEY)
    for age in range(3):  # the same numbers, by the decay, and as strong in all
        factor = 0.5**age * (3 / (1 + 0.5**2 + 0.5**4)) ** 0.5
        np.testing.assert_allclose(layer.inputs[2 - age], factor * plain.inputs[2 - age], rtol=1e-5)
    (found,) = jax.jit(lambda x: states([layer], x, context()))(jnp.asarray(X))
    for row, where in documents():
        for at in range(where.start, where.stop):
            past = range(max(where.start, at - 2), at + 1)
            z = sum(X[row, i] @ np.asarray(layer.inputs)[2 - (at - i)] for i in past)
            np.testing.assert_allclose(found[row, at], np.maximum(z, 0), atol=1e-6)
        simulated = jax.tree.map(np.asarray, layer).simulated(X[row, where])
        np.testing.assert_allclose(found[row, where], simulated, atol=1e-6)


def test_products_of_delayed_projections_are_one_the_linear_and_all_quadratic_ones():
    layer = DelayProducts({"embed": 6, "projected": 2}, 3, key=KEY)
    found = np.asarray(jax.jit(lambda x: layer(x, context()))(jnp.asarray(X)))
    projected = X @ np.asarray(layer.projection.weight)
    assert found.shape[-1] == DelayProducts.count(3, 2) == 1 + 6 + 21
    assert DelayProducts.count(5, 256) == 1 + 1280 + 819_840
    for row, where in documents():
        for at in range(where.start, where.stop):
            past = [projected[row, i] if i >= where.start else [0, 0] for i in (at - 2, at - 1, at)]
            v = np.concatenate(past)
            quadratic = [v[i] * v[j] for i in range(6) for j in range(i, 6)]
            np.testing.assert_allclose(found[row, at], [1, *v, *quadratic], atol=1e-6)


def test_a_state_space_is_its_recurrence_and_moves_the_way_its_input_points():
    sizes = {"embed": 6, "channels": 4}
    layer = StateSpace(sizes, key=KEY, fixed_key=jax.random.key(1))
    found = np.asarray(jax.jit(lambda x: layer(x, context()))(jnp.asarray(X)), np.float64)
    weight, bias = (np.asarray(x, np.float64) for x in (layer.step.weight, layer.step.bias))
    into, rate = np.asarray(layer.inputs, np.float64), -10.0
    for row, where in documents():
        state = np.zeros(4)
        for at in range(where.start, where.stop):
            step = np.log1p(np.exp(X[row, at] @ weight + bias))
            kept = np.exp(rate * step)
            state = kept * state - (1 - kept) / rate * (X[row, at] @ into)
            np.testing.assert_allclose(found[row, at], state, atol=1e-6)
    # Time constants from one position to 64 at first.
    kept = np.exp(rate * np.log1p(np.exp(bias)))
    assert kept[0] == pytest.approx(np.exp(-1), rel=1e-4)
    assert kept[-1] == pytest.approx(np.exp(-1 / 64), rel=1e-4)
    # ds/dt = A s + B x: a state moves the way its input points.
    assert (np.sign(found[:, 0]) == np.sign(X[:, 0] @ into)).all()


def test_radius_density_and_input_scale_are_as_asked():
    about = Reservoir(size=200, radius=1.3, density=0.1, input_scale=0.4)
    layer = jax.tree.map(np.asarray, LeakyReservoir(about, 64, key=KEY))
    assert spectral_radius(layer.recurrent) == pytest.approx(1.3, abs=1e-5)
    assert (layer.recurrent != 0).mean() == pytest.approx(0.1, abs=0.01)
    x = np.random.default_rng(1).normal(size=(2000, 64))
    assert (x @ layer.inputs).std() == pytest.approx(0.4, rel=0.03)
    window = Reservoir(size=200, window=8, decay=0.8, density=0.3, input_scale=0.4)
    taps = np.asarray(WindowedReservoir(window, 64, key=KEY).inputs)
    past = np.random.default_rng(1).normal(size=(500, 8, 64))
    assert np.tensordot(past, taps, 2).std() == pytest.approx(0.4, rel=0.03)


def test_a_matrix_whose_connections_have_no_cycle_is_drawn_again_and_radius_0_is_none():
    drawn = []

    class Few(np.random.Generator):
        def random(self, *shape, **rest):
            drawn.append(shape)
            above = np.triu(np.ones(*shape), k=1)  # all connections that the first matrix has
            return 1 - above if len(drawn) == 1 else super().random(*shape)

    make = reservoirs.of_radius(0.9, 0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "default_rng", lambda seed: Few(np.random.PCG64(seed)))
        found = np.asarray(make(KEY, (6, 6), 6))
    assert len(drawn) == 2 and spectral_radius(found) == pytest.approx(0.9, abs=1e-5)
    assert not np.asarray(reservoirs.of_radius(0.0, 0.5)(KEY, (6, 6), 6)).any()


def test_fixed_arrays_have_no_gradient_that_anything_could_train():
    layer = reservoir(Reservoir(size=5, radius=0.9), 6, key=KEY)
    assert {*layer.fixed} == {*layer.axes} and layer.matrices == ()
    x = jnp.asarray(X)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(states([layer], x, context())[0])))(x)
    assert (np.abs(gradient).sum(-1) > 0)[DOCUMENT >= 0].all()  # what is before it learns


def test_a_step_goes_through_time_twice_there_and_back():
    layer = reservoir(Reservoir(size=5, radius=0.9), 6, key=KEY)
    make = lambda key, layer: Linear("embed", "units", {"embed": 6, "units": 6}, key=key)  # noqa: E731

    class Block(eqx.Module):
        linear: Linear

        def __call__(self, x, context):
            (found,) = states([layer], self.linear(x), context)
            return x + jnp.sum(found, axis=-1, keepdims=True)

    stack = stacked([lambda key, number: Block(make(key, number))], 3, key=KEY)

    @eqx.filter_grad
    def gradient(stack):
        return jnp.sum(stack(jnp.asarray(X), context())[0] ** 2)

    program = jax.jit(lambda stack: gradient(stack)).lower(stack).compile().as_text() or ""
    assert program.count('"known_trip_count":{"n":"7"}') == 2  # along the sequence
    assert program.count('"known_trip_count":{"n":"3"}') == 2  # over the layers


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"size": 0}, "size         is 0; it must be 1 or more"),
        ({"radius": None}, "radius  is null; a recurrence needs one, such as 0.9, or a window"),
        ({"radius": -1.0}, "radius  is -1.0; it must be 0 or more"),
        ({"leak": 0.0}, "leak  is 0.0; it is a share, above 0 up to 1"),
        (
            {"density": 0.01},
            "density  is 0.01; of 24 units most would have no connection: 0.042 or more would do",
        ),
        ({"decay": 0.5}, "decay  is 0.5; it is of a window, and window is null"),
        ({"input_scale": 0.0}, "input_scale  is 0.0; it must be above 0"),
        ({"activation": "tan"}, 'activation  is "tan"; did you mean tanh?'),
        (
            {"window": 4, "leak": 1.0},
            "radius  is 0.8; it is of a recurrence, and window is 4: leave it out",
        ),
        ({"window": 0, "radius": None, "leak": 1.0}, "window  is 0; it must be 1 or more"),
    ],
)
def test_a_reservoir_that_cannot_be_is_refused_by_key(change, what):
    good = tree(Reservoir(size=24, radius=0.8, leak=0.7, density=0.5))
    with pytest.raises(UserError) as refusal:
        read(Reservoir, good | change)
    assert what.split() == str(refusal.value).splitlines()[1].split()


def test_the_states_of_a_model_that_computes_in_bfloat16_are_of_float32():
    layers = [
        reservoir(Reservoir(size=5, radius=0.9), 6, key=KEY),
        reservoir(Reservoir(size=5, window=2), 6, key=KEY),
    ]
    low = jax.ShapeDtypeStruct(X.shape, jnp.bfloat16)
    found = eqx.filter_eval_shape(lambda x: states(layers, x, context()), low)
    assert [one.dtype for one in found] == [jnp.float32] * 2
