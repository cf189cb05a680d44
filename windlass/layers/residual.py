"""Residual connections: how a branch of a block joins the residual stream."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from windlass.layers.auxiliary import Report
from windlass.layers.low_rank import Sum
from windlass.layers.norm import Fork, Norm, has_fork

Hidden = Float[Array, "batch seq embed"]
Branch = Callable[[Hidden], Hidden]


class NormedBranch(NamedTuple):
    """A branch F(x) = inner(norm(x)), of which a connection may leave the norm's place open."""

    norm: Norm
    inner: Callable[[Any], Any]  # of hidden states, or of a fork where there is one
    leaves_sums: bool = False  # inner may return a sum, if it is given a fork that takes them

    def __call__(self, x: Hidden) -> Hidden:
        return self.inner(self.norm(x))

    def added(self, x: Hidden) -> Hidden:
        """x + F(x)."""
        if not has_fork(x):
            return x + self(x)
        fork = Fork(self.norm, x, takes_sums=self.leaves_sums)
        y = self.inner(fork)
        return y.total(fork.stream) if isinstance(y, Sum) else fork.stream + y


class Connection(eqx.Module):
    """The connection of one branch, attention or feed-forward, of a block.

    A block never adds: it calls `self.attention_residual(x, branch, context)`, and knows neither
    how many streams x holds nor which of them the branch reads. It is made with `Plain`, whose
    place a `residual:` section of the recipe gives to another; so the field is named for the
    branch, and ends in `_residual`.
    """

    @abstractmethod
    def __call__(self, x: PyTree, branch: Branch, context) -> PyTree: ...


class Plain(Connection):
    """One stream, to which the branch is added: x + F(x)."""

    def __call__(self, x: Hidden, branch: Branch, context) -> Hidden:
        y = branch.added(x) if isinstance(branch, NormedBranch) else x + branch(x)
        return checkpoint_name(y, "residual")


class Streams:
    """Residual streams: how they leave the embedding, and how they enter the last norm."""

    @property
    def are_several(self) -> bool:
        return False

    def widen(self, x: Hidden) -> PyTree:
        """The streams that enter the first block."""
        return x

    def narrow(self, x: PyTree) -> Hidden:
        """The hidden states of those that leave the last block."""
        return x

    def report(self, x: PyTree, context) -> Report:
        """Metrics of the streams that leave the last block, such as a gain over all layers."""
        return {}


ONE_STREAM = Streams()
