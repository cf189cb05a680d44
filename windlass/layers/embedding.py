"""Tokens to vectors."""

from functools import partial
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from windlass.devices.axes import Placed, gathered, layout, stored


class Embedding(Placed):
    weight: Float[Array, "vocab embed"]
    scale: float = eqx.field(static=True)  # of the vectors that leave it
    matrices: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(self, sizes: dict[str, int], *, scale: float = 1.0, key: PRNGKeyArray):
        self.weight = 0.02 * jax.random.normal(key, (sizes["vocab"], sizes["embed"]))
        self.scale = scale

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"weight": ("vocab", "embed")}

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        out = layout("batch seq embed", (*tokens.shape, self.weight.shape[-1]))
        rows = _widened(self.weight, self.axes["weight"]).at[tokens].get(out_sharding=out)
        # The scale in the precision of the weights, as the models that have one were trained.
        return rows.astype(self.weight.dtype) * jnp.asarray(self.scale, self.weight.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _widened(weight: Float[Array, "vocab embed"], axes: tuple[str, ...]) -> Array:
    """The weight gathered, in float32, so that its gradients are added in float32.

    Those of a token that occurs a thousand times would mostly be lost in bfloat16.
    """
    return gathered(weight, axes).astype(jnp.float32)


def _forward(weight: Array, axes: tuple[str, ...]) -> tuple[Array, Array]:
    return _widened(weight, axes), jnp.zeros((), weight.dtype)


def _backward(axes: tuple[str, ...], like: Array, gradient: Array) -> tuple[Array]:
    return (stored(gradient, axes).astype(like.dtype),)


_widened.defvjp(_forward, _backward)
