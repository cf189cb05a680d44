"""Memory footprint of a run on a device, from the shapes of its arrays."""

import math
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from windlass.devices.axes import ArrayFacts, annotate, is_cast
from windlass.devices.chips import Chip, usable
from windlass.devices.mesh_choice import ROOM, Footprint
from windlass.layers.head import TILE_TOKENS
from windlass.networks.experts.layer import ExpertLayer
from windlass.program import trainable
from windlass.program.abstract import abstract_model, is_shape
from windlass.run import Run

# Bytes per entry of a vocabulary matrix while it is whole: as it is multiplied, a float32 copy,
# and where it is trained a sum of gradients.
VOCAB_TRAINED, VOCAB_FROZEN = 10, 6
# Activations that a layer saves for its backward pass, in numbers for each that a matmul writes.
SAVED = {"none": 3.0, "saved": 1.0}
OF_LOGITS = 6  # bytes: in the precision of the model, and in float32


def footprint(run: Run, chip: Chip, compute: str) -> Footprint:
    """Memory footprint of a run, without making an array, in less than a tenth of a second.

    Up to a third above what the TPU compiler finds.
    """
    shapes = eqx.filter(abstract_model(run.architecture, run.adapter), is_shape)
    chosen = trainable.of_run(shapes, run)
    trained, frozen = eqx.partition(shapes, chosen.mask)
    width = jnp.dtype(compute).itemsize
    moments = jax.eval_shape(trainable.optimizer(run, 1, trained).init, trained)
    copies = 4 + width * (width < 4) + 4 * (run.train.ema is not None)
    state = _bytes(trained) + _bytes(moments) + copies * chosen.trained
    models = [abstract_model(helper.architecture, ()) for helper in run.helpers.values()]
    helpers = [eqx.filter(model, is_shape) for model in models]
    stored = annotate((frozen, helpers), lambda x, about: _stored(x, about, width))
    state += sum(jax.tree.leaves(stored)) + _carry(run)
    of_experts = annotate(shapes, lambda x, about: x.size if "experts" in about.stacked else 0)
    share = sum(jax.tree.leaves(of_experts)) / max(1, chosen.total)
    # Matrices, whatever they are stored as: so they are gathered and multiplied.
    plain = eqx.filter(abstract_model(replace(run.architecture, base=None), ()), is_shape)
    tokens, vocab = run.data.length, run.model.vocab
    return Footprint(
        state=state,
        experts=int(share * state),
        vocabulary=max(_vocab(trained, VOCAB_TRAINED), _vocab((frozen, helpers), VOCAB_FROZEN)),
        # One layer is gathered while the one before it is computed.
        layer=2 * width * sum(jax.tree.leaves(annotate(plain, _layer_size))),
        layer_experts=2 * width * sum(jax.tree.leaves(annotate(plain, _experts_of_layer))),
        row=int(tokens * width * _activations(plain, run.train.remat, _streams(run))),
        row_logits=OF_LOGITS * tokens * vocab,
        tile=OF_LOGITS * TILE_TOKENS * vocab,
        is_frozen=2 * chosen.trained < chosen.total,
        memory=usable(chip),
        room=ROOM[chip.kind] * usable(chip),
    )


def _carry(run: Run) -> int:
    """Bytes of the sums that a run solves from; beside weights that are trained, few."""
    if run.objective.has_gradient:
        return 0
    batch = {
        name: jax.ShapeDtypeStruct(column.shape(1), column.dtype)
        for name, column in run.columns.items()
    }
    model = abstract_model(run.architecture, run.adapter)
    return _bytes(eqx.filter_eval_shape(run.objective.start, model, batch).sums)


def _vocab(arrays: PyTree, bytes_each: int) -> int:
    sizes = annotate(arrays, lambda x, about: x.size if "vocab" in about.axes else 0)
    return bytes_each * max(jax.tree.leaves(sizes), default=0)  # one is used after the other


def _layer_size(x: Any, about: ArrayFacts) -> int:
    is_stacked = x.ndim > len(about.axes)
    return x.size // x.shape[0] if is_stacked else 0


def _experts_of_layer(x: Any, about: ArrayFacts) -> int:
    return _layer_size(x, about) if "experts" in about.stacked else 0


def _streams(run: Run) -> int:
    """Width of the residual, in hidden states."""
    hidden = jax.ShapeDtypeStruct((1, 1, run.model.sizes["embed"]), jnp.float32)
    wide = jax.eval_shape(run.residual.widen, hidden)
    return sum(x.size for x in jax.tree.leaves(wide)) // hidden.size


def _activations(arrays: PyTree, remat: str, streams: int) -> float:
    """Activations saved per token: what all matrices write, or where less is saved the stream."""

    active = _active_share(arrays)

    def written(x, about):
        if about.reads is None:
            return 0
        read = x.shape[x.ndim - len(about.axes) :][: about.reads]
        is_stream = about.axes[about.reads :] == ("embed",)
        wide = streams if is_stream else 1
        wide *= active if about.stacked else 1
        return wide * x.size // math.prod(read) if remat != "full" or is_stream else 0

    return SAVED.get(remat, 1.0) * sum(jax.tree.leaves(annotate(arrays, written)))


def _active_share(arrays: PyTree) -> float:
    """The share of experts that a token has."""
    is_layer = lambda node: isinstance(node, ExpertLayer)  # noqa: E731
    layers = filter(is_layer, jax.tree.leaves(arrays, is_leaf=is_layer))
    return max((layer.active / layer.count for layer in layers), default=1.0)


def _stored(x: Any, about: ArrayFacts, width: int) -> int:
    return x.size * (width if is_cast(x, about) else x.dtype.itemsize)


def _bytes(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
