"""Driven dynamical systems: memory capacity, separation of states, the echo-state property.

A system is a function from inputs [time, ..., width] and a state to begin with (None: zeros) to the
states [time, ..., units] that it passes through. Everything is NumPy's, in float64.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

System = Callable[[np.ndarray, np.ndarray | None], np.ndarray]

WASHOUT, FITTED, HELD_OUT = 200, 2000, 2000  # inputs before, and those of a reconstruction
LINEAR = 0.03  # amplitude of what is added to a unit, at which tanh is the identity, but for 3e-4
RIDGE = 1e-12  # relative to the largest variance of a direction of the states
LONGEST = 200  # delays that are looked at
NOTHING = 0.01  # squared correlation of what is forgotten; by chance it is 0.0005
SETTLED = 200  # steps after which two starts are compared
SEQUENCES = 32  # that states are told apart of
CHAOTIC = 1e-3  # ratio of distances above which a start is not forgotten


class Dynamics(NamedTuple):
    """Measures of a driven system."""

    memory: np.ndarray  # by delay, from 1 on, as far as there is any
    separation: float
    echo: float

    @property
    def memory_capacity(self) -> float:
        return float(self.memory.sum())

    @property
    def forgets(self) -> bool:
        """The echo-state property: the state follows from the inputs, not from the start."""
        return self.echo < CHAOTIC


def measure(system: System, width: int, units: int, scale: float, seed: int = 0) -> Dynamics:
    """All measures of a system, with inputs that follow from a seed.

    `scale` is the standard deviation of what inputs of variance 1 add to a unit.
    """
    rng = np.random.default_rng(seed)
    memory = memory_function(system, width, units, LINEAR / scale, rng)
    longest = max(np.flatnonzero(memory > NOTHING), default=0)
    return Dynamics(
        memory[: longest + 1],
        separation(system, width, rng),
        echo_ratio(system, width, units, rng),
    )


def spectral_radius(matrix: np.ndarray) -> float:
    """max |λ| over the eigenvalues of a square matrix."""
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def memory_function(
    system: System, width: int, units: int, amplitude: float, rng: np.random.Generator
) -> np.ndarray:
    """Squared correlation of u_{t-k} with its best linear reconstruction from the state at t.

    For k = 1, 2, ... of scalar inputs u, uniform in [-1, 1], along one direction, of an amplitude
    so small that the system is linear. The sum over k is the memory capacity (Jaeger 2001), at most
    the number of units. Weights are of a ridge regression, correlations of inputs that it has not
    seen.
    """
    u = rng.uniform(-1, 1, WASHOUT + FITTED + HELD_OUT)
    direction = amplitude * rng.choice([-1.0, 1.0], size=width)
    states = system(u[:, None] * direction, None)[WASHOUT:]
    delays = np.arange(1, min(2 * units, LONGEST, WASHOUT) + 1)
    past = np.stack([u[WASHOUT - k : len(u) - k] for k in delays], axis=1)
    fitted, held_out = states[:FITTED], states[FITTED:]
    mean = fitted.mean(axis=0)
    gram = (fitted - mean).T @ (fitted - mean)
    penalty = RIDGE * np.linalg.eigvalsh(gram)[-1] * np.eye(units)
    weights = np.linalg.solve(gram + penalty, (fitted - mean).T @ past[:FITTED])
    return _squared_correlation((held_out - mean) @ weights, past[FITTED:])


def separation(system: System, width: int, rng: np.random.Generator) -> float:
    """Distance of the states of unrelated inputs, relative to that of the inputs.

    Both are root mean squares, per unit and per dimension, of the last states of sequences of
    normal inputs of variance 1: 0 where all of them lead to the same state.
    """
    last = system(rng.normal(size=(SETTLED, SEQUENCES, width)), None)[-1]
    return float(np.sqrt(last.var(axis=0, ddof=1).mean()))


def echo_ratio(system: System, width: int, units: int, rng: np.random.Generator) -> float:
    """Distance of two states after the same inputs, relative to that of their starts.

    Inputs and starts are normal, of variance 1. The state of a system with the echo-state property
    forgets where it began: the ratio is next to nothing.
    """
    starts = rng.normal(size=(2, units))
    inputs = rng.normal(size=(SETTLED, 1, width))
    a, b = system(np.broadcast_to(inputs, (SETTLED, 2, width)), starts)[-1]
    return float(np.linalg.norm(a - b) / np.linalg.norm(starts[0] - starts[1]))


def _squared_correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Squared correlation of each column of two matrices."""
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    product = np.sum(a * b, axis=0) ** 2
    power = np.sum(a**2, axis=0) * np.sum(b**2, axis=0)
    return np.divide(product, power, out=np.zeros_like(product), where=power > 0)
