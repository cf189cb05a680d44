"""How a block's branches join the stream that runs through the layers."""

from collections.abc import Callable

import equinox as eqx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float


class Plain(eqx.Module):
    """The branch is added."""

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        branch: Callable[[Float[Array, "batch seq embed"]], Float[Array, "batch seq embed"]],
    ) -> Float[Array, "batch seq embed"]:
        return checkpoint_name(x + branch(x), "residual")
