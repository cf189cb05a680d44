"""The dense Sinkhorn residual: one stream, whose channels a doubly stochastic matrix mixes.

    x ← s ⊙ (H x + (I − H) F(x)),    H = Sinkhorn(exp(logits)) ∈ R^{C×C}, s ∈ R^C

An ablation of `mhc`, and no residual connection as others are. Logits near 0, as it starts, make
H the matrix that averages all channels: of x its mean is left, and the gradient reaches earlier
layers through F alone. With H near I the branch is gone. A model from elsewhere does not survive
it; `docs/residuals.md` has what was measured.
"""

from collections.abc import Mapping
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from windlass.config import section
from windlass.devices.axes import Placed, gathered, layout
from windlass.layers.initializers import small
from windlass.layers.residual import Branch, Connection, Hidden
from windlass.residuals import BaseResidual


@section
class Residual(BaseResidual):
    """A doubly stochastic matrix between all channels, as an ablation of mhc."""

    iterations: int = 10  # of Sinkhorn's normalization, of rows and then columns

    def __post_init__(self):
        if self.iterations < 1:
            raise ValueError(f"iterations is {self.iterations}; it must be 1 or more")

    def connection(
        self, branch: str, layer: Int[Array, ""], sizes: Mapping[str, int], *, key: PRNGKeyArray
    ) -> Connection:
        return DenseConnection(sizes["embed"], self.iterations, key)


class DenseConnection(Connection, Placed):
    """x ← s ⊙ (H x + (I − H) F(x)): the channels of a hidden state mixed by a dense matrix."""

    logits: Float[Array, "*layers embed channels"]
    scale: Float[Array, "*layers embed"]
    iterations: int = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ()

    def __init__(self, width: int, iterations: int, key: PRNGKeyArray):
        self.logits = 0.5 * small(key, (width, width), width)
        self.scale, self.iterations = jnp.ones(width), iterations

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"logits": ("embed", "channels"), "scale": ("embed",)}

    def __call__(self, x: Hidden, branch: Branch, context) -> Hidden:
        y = checkpoint_name(branch(x), "residual")
        mixing = dense_sinkhorn(gathered(self.logits, self.axes["logits"]), self.iterations)
        _report(jax.lax.stop_gradient(mixing), context)
        mixed = jax.lax.dot_general(
            x - y,
            mixing.astype(x.dtype),
            (((2,), (1,)), ((), ())),
            out_sharding=layout("batch seq embed", x.shape),
        )
        scale = gathered(self.scale, ("embed",)).astype(x.dtype)
        return checkpoint_name((mixed + y) * scale, "residual")


def dense_sinkhorn(
    logits: Float[Array, "rows columns"], iterations: int
) -> Float[Array, "rows columns"]:
    """Sinkhorn's normalization of exp(logits) by their logarithms, rows and then columns."""

    @jax.checkpoint
    def once(logits, _):
        logits -= jax.nn.logsumexp(logits, axis=1, keepdims=True)
        return logits - jax.nn.logsumexp(logits, axis=0, keepdims=True), None

    return jnp.exp(jax.lax.scan(once, logits, length=iterations)[0])


def _report(mixing: Float[Array, "rows columns"], context) -> None:
    for name, axis in (("row", 1), ("column", 0)):
        error = jnp.max(jnp.abs(jnp.sum(mixing, axis=axis) - 1))
        for each in (f"residual_{name}_error", f"residual_{name}_error_{{layer}}"):
            context.auxiliary(each, error, 1)
