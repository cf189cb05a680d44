"""Scales of a quantised matrix on the host: largest values of groups, and their low-rank factors.

A matrix W[i, o] is Q[i, o] S[i, o], entries of a table times scales of low rank:

    S[i, o] = Σₖ bₖ[i] gₖ aₖ[o]    with ‖aₖ‖ = ‖bₖ‖ = 1
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

NOISE = 0.01  # of the gain of ranks that a conversion adds, as a share of the least there is
LEAST = 1e-6  # by which norms are divided at least


class Factors(NamedTuple):
    """Scales of low rank: Σₖ inputs[:, k] gains[k] outputs[k, :], in unit vectors."""

    inputs: Float[np.ndarray, "inputs rank"]
    gains: Float[np.ndarray, " rank"]
    outputs: Float[np.ndarray, "rank outputs"]

    def matrix(self) -> Float[np.ndarray, "inputs outputs"]:
        return (self.inputs * self.gains) @ self.outputs


def largest(
    weight: Float[np.ndarray, "inputs outputs"], group: int
) -> Float[np.ndarray, "groups outputs"]:
    """The largest magnitude of each `group` inputs in a row, for every output."""
    return np.maximum.reduceat(np.abs(weight), np.arange(0, len(weight), group), axis=0)


def factored(weight: Float[np.ndarray, "inputs outputs"], group: int, rank: int) -> Factors:
    """The best factors of some rank for the largest magnitudes of groups.

    Those of the matrix in which each group's magnitude is repeated for its inputs, whose singular
    vectors follow from the small one: with n inputs in a group and M √n = U s Vᵀ they are U, s,
    and Vᵀ / √n, repeated.
    """
    sizes = _sizes(len(weight), group)
    u, s, vt = np.linalg.svd(
        (largest(weight, group) * np.sqrt(sizes)[:, None]).T, full_matrices=False
    )
    signs = np.where(vt.sum(axis=1) < 0, -1, 1)  # which LAPACK is free to choose
    outputs, inputs = (u * signs).T, np.repeat(vt.T * signs / np.sqrt(sizes)[:, None], sizes, 0)
    return padded(Factors(inputs, s, outputs), rank, gain=0.0)


def normalised(
    inputs: Float[np.ndarray, "inputs rank"], outputs: Float[np.ndarray, "rank outputs"]
) -> Factors:
    """Factors of a product of any vectors: gₖ = ‖aₖ‖ ‖bₖ‖."""
    a, b = np.linalg.norm(outputs, axis=1), np.linalg.norm(inputs, axis=0)
    unit = inputs / np.maximum(b, LEAST), outputs / np.maximum(a, LEAST)[:, None]
    return Factors(unit[0], a * b, unit[1])


def padded(factors: Factors, rank: int, gain: float) -> Factors:
    """Factors of another rank: the strongest of them, or more, in random directions.

    A gain of zero leaves the scales as they are; its directions are there to be trained from.
    """
    inputs, gains, outputs = (x.astype(np.float32) for x in factors)
    strongest = np.argsort(-gains, kind="stable")[:rank]
    inputs, gains, outputs = inputs[:, strongest], gains[strongest], outputs[strongest]
    if (more := rank - len(gains)) > 0:
        rng = np.random.default_rng([len(inputs), outputs.shape[1], rank])
        b = rng.normal(size=(len(inputs), more)).astype(np.float32)
        a = rng.normal(size=(more, outputs.shape[1])).astype(np.float32)
        inputs = np.concatenate([inputs, b / np.linalg.norm(b, axis=0)], axis=1)
        outputs = np.concatenate([outputs, a / np.linalg.norm(a, axis=1)[:, None]])
        gains = np.concatenate([gains, np.full(more, gain, np.float32)])
    return Factors(inputs, gains, outputs)


def spread(scales: Float[np.ndarray, "groups outputs"], inputs: int, group: int) -> np.ndarray:
    """Scales of groups, repeated for each of the inputs."""
    return np.repeat(scales, _sizes(inputs, group), axis=0)


def rank_sum(
    x: Float[np.ndarray, "... inputs"],
    values: Float[np.ndarray, "inputs outputs"],
    factors: Factors,
) -> Float[np.ndarray, "... outputs"]:
    """y = Σₖ gₖ aₖ ∘ ((bₖ ∘ x) Q): the product as a device computes it that never builds S."""
    ranks = zip(factors.inputs.T, factors.gains, factors.outputs, strict=True)
    return sum(g * a * ((b * x) @ values) for b, g, a in ranks)  # pyright: ignore


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """‖found − expected‖ / ‖expected‖."""
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


def relative_errors(squares: Mapping[str, np.ndarray]) -> str:
    """Relative error of matrices by name, of which the squares of errors and weights are summed."""
    parts = {path: math.sqrt(error / of) for path, (error, of) in squares.items() if of}
    error, of = sum(squares.values(), np.zeros(2))
    worst = max(parts, key=parts.__getitem__, default="")
    where = re.sub(r"\bkinds\.\d+\.", "", worst)  # as a recipe names it
    whole, most = math.sqrt(error / (of or 1)), f"{parts.get(worst, 0):.4f} ({where})"
    return f"relative error {whole:.4f}, at most {most}"


def _sizes(inputs: int, group: int) -> np.ndarray:
    """The sizes of the groups of a number of inputs, of which the last may be smaller."""
    return np.diff([*range(0, inputs, group), inputs])
