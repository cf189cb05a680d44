"""Measures of driven systems, on reservoirs whose figures are known."""

import jax
import numpy as np
import pytest

from windlass import dynamics
from windlass.networks.reservoir import LeakyReservoir, Reservoir


def drawn(radius: float, input_scale: float = 1.0) -> list[LeakyReservoir]:
    """Some reservoirs of 50 units, which differ in their random numbers."""
    about = Reservoir(size=50, radius=radius, density=0.2, input_scale=input_scale)
    keys = map(jax.random.key, range(3))
    return [jax.tree.map(np.asarray, LeakyReservoir(about, 16, key=key)) for key in keys]


@pytest.mark.parametrize(("radius", "expected"), [(0.5, 13.5), (0.9, 21.4), (1.0, 21.6)])
def test_the_memory_capacity_of_50_units_grows_with_the_spectral_radius_up_to_1(radius, expected):
    every = drawn(radius, input_scale=0.5)
    found = [dynamics.measure(one.simulated, 16, 50, 0.5).memory_capacity for one in every]
    print(f"radius {radius}: memory capacity {np.mean(found):.1f}")
    assert np.mean(found) == pytest.approx(expected, rel=0.15)


def test_a_start_is_forgotten_up_to_a_radius_of_1_2_and_not_at_2():
    def ratios(radius: float) -> list[float]:
        rng = np.random.default_rng(0)
        every = drawn(radius, input_scale=0.4)
        return [dynamics.echo_ratio(one.simulated, 16, 50, rng) for one in every]

    assert max(ratios(0.5) + ratios(0.9) + ratios(1.2)) < 1e-9 < dynamics.CHAOTIC
    chaotic = ratios(2.0)
    print(f"radius 2: ratio {np.mean(chaotic):.2f}")
    assert np.mean(chaotic) == pytest.approx(0.47, abs=0.2)
    assert min(chaotic) > dynamics.CHAOTIC


def test_a_delay_line_remembers_as_many_inputs_as_it_has_units():
    shift = np.eye(12, k=1)

    def line(inputs: np.ndarray, start: np.ndarray | None) -> np.ndarray:
        state, states = np.zeros(12) if start is None else start, []
        for now in inputs[..., :1]:
            state = state @ shift + now * np.eye(12)[0]
            states.append(state)
        return np.stack(states)

    found = dynamics.measure(line, 1, 12, 1.0)
    # The first unit has the own input, which is no memory.
    assert found.memory == pytest.approx([1.0] * 11, abs=1e-9)
    assert found.memory_capacity == pytest.approx(11.0)
    assert found.echo == 0.0


def test_states_of_one_unit_are_as_far_apart_as_its_inputs_or_not_at_all():
    rng = np.random.default_rng(0)
    assert dynamics.separation(lambda inputs, start: inputs, 64, rng) == pytest.approx(1, rel=0.05)
    assert dynamics.separation(lambda inputs, start: 0 * inputs, 64, rng) == 0.0
