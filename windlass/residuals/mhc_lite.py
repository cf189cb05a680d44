"""Exact manifold-constrained hyper-connections (mHC-lite): convex sums of permutation matrices.

Every doubly stochastic matrix is one (Birkhoff and von Neumann), so that for few streams

    res = Σ_p softmax(α₃ φ_res x' + b_res)_p P_p    over all n! permutations p

needs no iterations, and rows and columns sum to 1 to rounding for any logits. All else is `mhc`.
"""

import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from windlass.config import section
from windlass.doubly_stochastic import Matrix, permutation_sum
from windlass.residuals.mhc import HyperConnection, HyperStreams, Logits, SigmoidConnection

MOST = 5  # streams: 120 permutations
IDENTITY = 8.0  # logit of the identity at first: 0.992 of all for n = 4


@section
class Residual(HyperStreams):
    """mHC-lite: mixing matrices are convex sums of all permutations, without iterations."""

    def __post_init__(self):
        super().__post_init__()
        if self.streams > MOST:
            raise ValueError(
                f"streams is {self.streams}, of which there are {math.factorial(self.streams):,} "
                f"permutations; it must be {MOST} or less here, and mhc takes any number"
            )

    def hyper_connection(self, layer: Int[Array, ""], width: int) -> HyperConnection:
        return PermutationConnection(self.streams, layer, width)


class PermutationConnection(SigmoidConnection):
    """The connection of mHC-lite: a logit for each permutation, the identity first."""

    res_axes: ClassVar[tuple[str, ...]] = ("permutations",)

    def __init__(self, n: int, layer: Int[Array, ""], width: int):
        self._start(n, layer, width, jnp.zeros(math.factorial(n)).at[0].set(IDENTITY))

    def mixing(self, logits: Logits) -> Matrix:
        return permutation_sum(tuple(logits), self.pre.shape[-1])
