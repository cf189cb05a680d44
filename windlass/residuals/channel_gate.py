"""The gated residual: one stream, of which a gate keeps a share of every channel.

    x ← s ⊙ (g ⊙ x + (1 − g) ⊙ F(x)),    g = σ(logits) ∈ R^C, s ∈ R^C

An ablation of `mhc`, of C numbers where `sinkhorn_dense` has C². It starts with g near 1/2, so that
half of the stream is lost at every branch: a model from elsewhere does not survive it.
"""

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from windlass.config import section
from windlass.devices.axes import Placed, gathered
from windlass.layers.initializers import small
from windlass.layers.residual import Branch, Connection, Hidden
from windlass.residuals import BaseResidual


@section
class Residual(BaseResidual):
    """A gate for every channel between the stream and the branch, as an ablation of mhc."""

    def connection(
        self, branch: str, layer: Int[Array, ""], sizes: Mapping[str, int], *, key: PRNGKeyArray
    ) -> Connection:
        return GatedConnection(sizes["embed"], key)


class GatedConnection(Connection, Placed):
    """x ← s ⊙ (g ⊙ x + (1 − g) ⊙ F(x)) with a gate g of each channel."""

    logits: Float[Array, "*layers embed"]
    scale: Float[Array, "*layers embed"]
    matrices: ClassVar[tuple[str, ...]] = ()

    def __init__(self, width: int, key: PRNGKeyArray):
        self.logits, self.scale = 0.5 * small(key, (width,), width), jnp.ones(width)

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"logits": ("embed",), "scale": ("embed",)}

    def __call__(self, x: Hidden, branch: Branch, context) -> Hidden:
        y = checkpoint_name(branch(x), "residual")
        gate = jax.nn.sigmoid(gathered(self.logits, ("embed",)))
        scale = gathered(self.scale, ("embed",))
        kept, added = ((s * scale).astype(x.dtype) for s in (gate, 1 - gate))
        context.auxiliary("residual_gate", jnp.mean(jax.lax.stop_gradient(gate)), 1)
        return checkpoint_name(kept * x + added * y, "residual")
