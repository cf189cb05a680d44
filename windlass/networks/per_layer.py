"""Per-layer embeddings (PLE): an input of a few features for each token and each layer."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from windlass.devices.axes import layout
from windlass.layers.embedding import Embedding
from windlass.layers.linear import Linear
from windlass.layers.norm import RMSNorm


class PerLayerInputs(eqx.Module):
    """Inputs p = (RMSNorm(x W / sqrt(embed)) + sqrt(d) E[token]) / sqrt(2) of d features a layer.

    x is the embedding of the token. W and E have the features of all layers side by side.
    """

    embedding: Embedding
    projection: Linear
    norm: RMSNorm

    def __init__(self, sizes: dict[str, int], layers: int, *, eps: float, key: PRNGKeyArray):
        embedding, projection = jax.random.split(key)
        sizes, size = sizes | {"depth": layers}, sizes["per_layer"]
        wide = sizes | {"embed": layers * size}
        self.embedding = Embedding(wide, scale=math.sqrt(size), key=embedding)
        self.projection = Linear("embed", "depth per_layer", sizes, key=projection)
        self.norm = RMSNorm("per_layer", sizes, eps=eps)

    @jax.named_scope("embedding")
    def __call__(
        self, tokens: Int[Array, "batch seq"], x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "layers batch seq per_layer"]:
        of_stream = self.norm(self.projection(x) * x.shape[-1] ** -0.5)
        out = layout("batch seq . .", of_stream.shape)
        of_token = jnp.reshape(self.embedding(tokens), of_stream.shape, out_sharding=out)
        return jnp.moveaxis((of_stream + of_token) * 2**-0.5, 2, 0)


class PerLayerGate(eqx.Module):
    """Addition of a layer to the stream, of its input p: RMSNorm(project(gelu(gate(x)) · p))."""

    gate: Linear
    projection: Linear
    norm: RMSNorm

    def __init__(self, sizes: dict[str, int], *, norm: RMSNorm, key: PRNGKeyArray):
        gate, projection = jax.random.split(key)
        self.gate = Linear("embed", "per_layer", sizes, key=gate)
        self.projection = Linear("per_layer", "embed", sizes, key=projection)
        self.norm = norm

    @jax.named_scope("mlp")
    def __call__(
        self, x: Float[Array, "batch seq embed"], own: Float[Array, "batch seq per_layer"]
    ) -> Float[Array, "batch seq embed"]:
        gate = jax.nn.gelu(checkpoint_name(self.gate(x), "gate"))
        return self.norm(self.projection(gate * own))
