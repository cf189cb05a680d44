"""What a run will take of a device's memory, from the shapes of its arrays."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from windlass.devices.axes import About, annotate, is_cast
from windlass.devices.chips import Chip, usable
from windlass.devices.mesh_choice import ROOM, Footprint
from windlass.layers.head import TILE_TOKENS
from windlass.program import trainable
from windlass.program.abstract import blank, is_shape
from windlass.run import Run

# Bytes of each number of a matrix of words while it is whole: as it is multiplied, a float32 copy,
# and where it is trained a sum of gradients.
WORDS_TRAINED, WORDS_FROZEN = 10, 6
# What a layer leaves for its backward pass, in numbers for each that a matrix product writes.
LEFT = {"none": 3.0, "saved": 1.0}
OF_LOGITS = 6  # bytes: in the precision of the model, and in float32


def footprint(run: Run, chip: Chip, compute: str) -> Footprint:
    """Without making an array, in less than a tenth of a second.

    Up to a third above what the TPU compiler finds.
    """
    whole = eqx.filter(blank(run.architecture, run.adapter), is_shape)
    chosen = trainable.choose(whole, run.train.trainable)
    trained, frozen = eqx.partition(whole, chosen.mask)
    width = jnp.dtype(compute).itemsize
    optimizer = run.optim.build(1, trained)
    moments = jax.eval_shape(optimizer.init, trained)
    copies = 4 + width * (width < 4) + 4 * (run.train.ema is not None)
    state = _bytes(trained) + _bytes(moments) + copies * chosen.trained
    helpers = [eqx.filter(blank(one.architecture, ()), is_shape) for one in run.helpers.values()]
    held = annotate((frozen, helpers), lambda x, about: _held(x, about, width))
    state += sum(jax.tree.leaves(held))
    plain = eqx.filter(blank(run.architecture, ()), is_shape)
    tokens, vocab = run.data.length, run.model.vocab
    return Footprint(
        state=state,
        vocabulary=max(_words(trained, WORDS_TRAINED), _words((frozen, helpers), WORDS_FROZEN)),
        # One layer is gathered while the one before it is computed.
        layer=2 * width * sum(jax.tree.leaves(annotate(plain, _of_a_layer))),
        row=int(tokens * width * _left(plain, run.train.remat, _streams(run))),
        row_logits=OF_LOGITS * tokens * vocab,
        tile=OF_LOGITS * TILE_TOKENS * vocab,
        is_frozen=2 * chosen.trained < chosen.total,
        memory=usable(chip),
        room=ROOM[chip.kind] * usable(chip),
    )


def _words(arrays: PyTree, bytes_each: int) -> int:
    found = annotate(arrays, lambda x, about: x.size if "vocab" in about.axes else 0)
    return bytes_each * max(jax.tree.leaves(found), default=0)  # one is used after the other


def _of_a_layer(x: Any, about: About) -> int:
    is_stacked = x.ndim > len(about.axes)
    return x.size // x.shape[0] if is_stacked else 0


def _streams(run: Run) -> int:
    """How many hidden states wide the residual is."""
    hidden = jax.ShapeDtypeStruct((1, 1, run.model.sizes["embed"]), jnp.float32)
    wide = jax.eval_shape(run.residual.widen, hidden)
    return sum(x.size for x in jax.tree.leaves(wide)) // hidden.size


def _left(arrays: PyTree, remat: str, streams: int) -> float:
    """Numbers that a token leaves: what all matrices write, or where less is saved the stream."""

    def written(x, about):
        if about.reads is None:
            return 0
        read = x.shape[x.ndim - len(about.axes) :][: about.reads]
        is_stream = about.axes[about.reads :] == ("embed",)
        wide = streams if is_stream else 1
        return wide * x.size // math.prod(read) if remat != "full" or is_stream else 0

    return LEFT.get(remat, 1.0) * sum(jax.tree.leaves(annotate(arrays, written)))


def _held(x: Any, about: About, width: int) -> int:
    return x.size * (width if is_cast(x, about) else x.dtype.itemsize)


def _bytes(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
