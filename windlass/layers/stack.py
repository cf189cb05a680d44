"""The layers of a model: scanned, rematerialised, in a repeating pattern of kinds."""

import dataclasses
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from windlass.devices.axes import device, is_nvidia
from windlass.devices.sketch import on_one_gpu
from windlass.layers import kernels, low_rank, norm, recurrence
from windlass.layers.auxiliary import Report, added, inside, over_layers
from windlass.layers.residual import ONE_STREAM, Hidden, Streams

# What a layer saves for its backward pass under `saved`: the results of matrix products and the
# states of recurrences, which are dear to compute again. Norms, rotations and activations are
# recomputed from them.
SAVED = (
    *("query", "key", "value", low_rank.INNER, "cells", kernels.MIXED),
    *("gate", "up", "residual", norm.SCALE, recurrence.STATE),
)
# What is made again even under `none`, as it is quicker to make than to fetch.
FORMS = frozenset("broadcast_in_dim mesh_cast reshape squeeze transpose".split())
LARGE = 2**20  # bytes of a layer's gradient, from which copying it takes longer than to launch that


Maker = Callable[[PRNGKeyArray, Int[Array, ""]], PyTree]  # a block, from a key and its layer


class FoldableBlock(eqx.Module):
    """Interface of blocks that are computed in another form on some devices."""

    @abstractmethod
    def folded(self, x: PyTree) -> PyTree:
        """That form of stacked blocks on such streams, with the same outputs and gradients.

        Of arrays that are stacked, as the gradients of its own arrays are then stacked as well.
        """


class Stack(eqx.Module):
    """Blocks in a row. Every weight has a leading `layers` axis, or is apart: `LayerArrays`.

    With a pattern of several kinds, layer i is of kind `i % len(kinds)`, and each kind is stacked
    by itself.
    """

    kinds: tuple[PyTree, ...]
    layers: int = eqx.field(static=True)
    remat: str = eqx.field(static=True, default="saved")  # none, saved or full
    unroll: int = eqx.field(static=True, default=1)  # rounds of the pattern per loop iteration
    streams: Streams = eqx.field(static=True, default=ONE_STREAM)
    first: int = eqx.field(static=True, default=0)  # layers of the model before these

    def __call__(
        self, x: Hidden, context, cache: PyTree = None, inputs: PyTree = None
    ) -> tuple[Hidden, PyTree, Report]:
        """The hidden states after all blocks, the cache of each block, and the sum of reports.

        `inputs`, where there are any, have a leading axis of layers, and each block gets its own.
        """
        x = self.streams.widen(x)
        weights, rest = eqx.partition(self._computed(x), eqx.is_array)
        rounds, odd = divmod(self.layers, len(self.kinds))
        cache_rounds, cache_odd = (None, [None] * odd) if cache is None else cache

        loops = self.is_loop

        def one(kind, in_loop):
            def apply(x, weights, cache, inputs):
                if self._takes_turns(in_loop):
                    x, weights = _in_turn(x, weights)
                view = context.layer(cache)
                with inside(view):
                    own = () if inputs is None else (inputs,)
                    y = eqx.combine(weights, rest[kind])(x, view, *own)
                return y, (view.leave(), view.reported)

            return _rematerialised(apply, self.remat, in_loop=in_loop)

        apart = [_traced_once(one(kind, False)) for kind in range(len(self.kinds))]
        blocks = [one(kind, True) for kind in range(len(self.kinds))] if loops else apart

        def around(x, now):
            out = []
            for kind, own in enumerate(zip(*now, strict=True)):
                x, new = blocks[kind](x, *own)
                out.append(new)
            return x, tuple(out)

        kinds = len(self.kinds)
        nothing, whole = (None,) * kinds, rounds * kinds
        each = tuple(_take(inputs, slice(kind, whole, kinds)) for kind in range(kinds))
        scanned = (_take(weights, slice(rounds)), nothing if cache is None else cache_rounds, each)
        if loops:
            x, out_rounds = jax.lax.scan(around, x, scanned, unroll=self.unroll)
        else:
            per_round = [((None, {}),) * kinds] if rounds == 0 else []
            for each in _unstacked(scanned, rounds):
                x, out = around(x, each)
                per_round.append(out)
            out_rounds = jax.tree.map(lambda *leaves: jnp.stack(leaves), *per_round)

        out_odd = []
        for kind in range(odd):
            own = _take(weights[kind], rounds), cache_odd[kind], _take(inputs, whole + kind)
            x, out = apart[kind](x, *own)
            out_odd.append(out)
        left = tuple(tuple(own for own, _ in out) for out in (out_rounds, out_odd))
        reported = added(self._reported(out_rounds, out_odd), self.streams.report(x, context))
        return self.streams.narrow(x), left, reported

    def _computed(self, x: PyTree) -> tuple[PyTree, ...]:
        """Blocks in the form in which they are computed on such streams."""
        return tuple(
            kind.folded(x) if isinstance(kind, FoldableBlock) else kind for kind in self.kinds
        )

    @property
    def is_loop(self) -> bool:
        """Return True if layers are computed in a loop, False if each is part of the program."""
        return self.unroll < self.layers // len(self.kinds)

    def numbers(self, kind: int) -> range:
        """Numbers of the layers of a kind, in the model."""
        return range(self.first + kind, self.first + self.layers, len(self.kinds))

    def _takes_turns(self, in_loop: bool) -> bool:
        """Return True if a layer's gradients are to be complete before the layer below begins."""
        are_long = len(self.kinds) > 1 and (self.streams.are_several or self.remat == "full")
        return are_long if in_loop else on_one_gpu()

    def _reported(self, out_rounds: Sequence, out_odd: Sequence) -> Report:
        """Reports of all layers: those of the rounds by kind, and those after the last round."""
        rounds = [
            over_layers(report, self.numbers(kind)[: self.layers // len(self.kinds)])
            for kind, (_, report) in enumerate(out_rounds)
        ]
        odd = [
            over_layers(
                jax.tree.map(lambda x: jnp.expand_dims(x, 0), report), self.numbers(kind)[-1:]
            )
            for kind, (_, report) in enumerate(out_odd)
        ]
        return added(*rounds, *odd)


class LayerArrays(eqx.Module):
    """A stacked array as one array a layer, which a program reads where it lies.

    A matmul would else read the copy of a layer that was cut out of the stack.
    """

    each: tuple[Any, ...]

    def __getitem__(self, index: int | slice) -> Any:
        return LayerArrays(self.each[index]) if isinstance(index, slice) else self.each[index]


def by_layer(tree: PyTree, split: Callable[[Any], Sequence[Any]]) -> PyTree:
    """A model or a part of one, whose large arrays are one a layer where layers are no loop.

    `split` makes the rows of an array, or of its shape.
    """

    def layers(x: Any) -> Any:
        is_large = x.ndim > 1 and x.size * x.dtype.itemsize >= LARGE * x.shape[0]
        return LayerArrays(tuple(split(x))) if is_large else x

    def change(node: Any) -> Any:
        if not isinstance(node, Stack) or node.is_loop:
            return node
        return dataclasses.replace(node, kinds=jax.tree.map(layers, node.kinds))

    return jax.tree.map(change, tree, is_leaf=lambda node: isinstance(node, Stack))


def stacked(pattern: Sequence[Maker], layers: int, *, first: int = 0, key: PRNGKeyArray) -> Stack:
    """A stack of `layers` layers, made by the functions of `pattern` in turn.

    `first` is the number of layers before them, in a model of several stacks.
    """
    keys, pattern = jax.random.split(key, layers), pattern[:layers]
    numbers, kinds = jnp.arange(first, first + layers), len(pattern)
    stacks = [
        eqx.filter_vmap(make)(keys[i::kinds], numbers[i::kinds]) for i, make in enumerate(pattern)
    ]
    return Stack(tuple(stacks), layers, first=first)


def arrange(model: PyTree, *, remat: str, unroll: int) -> PyTree:
    """The model with its stacks set: rematerialization, and layers per loop iteration."""

    def change(node):
        if not isinstance(node, Stack):
            return node
        return dataclasses.replace(node, remat=remat, unroll=unroll)

    return jax.tree.map(change, model, is_leaf=lambda node: isinstance(node, Stack))


def _rematerialised(function: Callable, remat: str, *, in_loop: bool) -> Callable:
    if remat == "none" and not in_loop:
        return function  # the compiler sees all layers, and knows best what to hold
    named = jax.checkpoint_policies.save_only_these_names(*SAVED)
    saved = jax.checkpoint_policies.save_from_both_policies(named, kernels.keeps)
    policy = {"none": _is_computed, "saved": saved, "full": None}[remat]
    # The compiler would merge the second computation with the first and undo the saving; it cannot
    # do so across the loops of a scan, where the barrier against it only costs time.
    return jax.checkpoint(function, policy=policy, prevent_cse=not in_loop)


def _traced_once(layer: Callable) -> Callable:
    """A layer that is traced once, and differentiated once, for all of its kind in a program.

    On GPUs, where layers are no loop by default: there it takes most of the time to trace a step.
    """
    here = device()
    return jax.jit(layer, inline=True) if is_nvidia(here.platform, here.device_kind) else layer


def _in_turn(x: PyTree, weights: PyTree) -> tuple[PyTree, PyTree]:
    """Inputs of a layer, whose gradients are complete before the layer below has its turn.

    The compiler would else go back through all layers that it sees first, and compute the gradients
    of their weights at the end, where what these are products of is held for all layers. In the
    body of a loop it seldom does so with one stream, unless layers are computed again, and what is
    complete takes room itself.
    """
    leaves, structure = jax.tree.flatten((x, weights))
    is_trained = [False] * len(leaves)

    def forward(*given):
        is_trained[:] = [leaf.perturbed for leaf in given]
        return tuple(leaf.value for leaf in given), None

    def backward(_, gradients):
        known = [
            trained and not isinstance(gradient, SymbolicZero)
            for trained, gradient in zip(is_trained, gradients, strict=True)
        ]
        complete = jax.lax.optimization_barrier(list(itertools.compress(gradients, known)))
        rest = iter(complete)
        return tuple(next(rest) if one else None for one in known)

    same = jax.custom_vjp(lambda *leaves: leaves)
    same.defvjp(forward, backward, symbolic_zeros=True)
    return jax.tree.unflatten(structure, same(*leaves))


def _is_computed(primitive: Primitive, *arrays: Any, **settings: Any) -> bool:
    """Rematerialization policy: save what is new, not the same numbers in a larger form.

    Weights that a layer has gathered would else be held for all layers at once.
    """
    if primitive.name == "convert_element_type":
        return settings["new_dtype"].itemsize < arrays[0].dtype.itemsize
    if primitive.name == "reshard":
        shape, before, after = arrays[0].shape, arrays[0].sharding, settings["dst_sharding"]
        return math.prod(after.shard_shape(shape)) < math.prod(before.shard_shape(shape))
    return primitive.name not in FORMS


def _take(tree: PyTree, index: int | slice) -> PyTree:
    return jax.tree.map(lambda x: x[index], tree, is_leaf=_are_apart)


def _are_apart(node: Any) -> bool:
    return isinstance(node, LayerArrays)


def _unstacked(tree: PyTree, count: int) -> list[PyTree]:
    """Parts of what was stacked, one after the other."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_are_apart)
    each = [leaf.each if isinstance(leaf, LayerArrays) else _rows(leaf) for leaf in leaves]
    return [structure.unflatten([rows[i] for rows in each]) for i in range(count)]


@jax.custom_vjp
def _rows(x: Array) -> tuple[Array, ...]:
    """Rows of an array, whose gradients are stacked once.

    By JAX's own rule an update of the weights would look for each number among those of all layers.
    """
    return tuple(x[i] for i in range(len(x)))


def _whole(gradients: Sequence[Array]) -> Array:
    """Rows stacked: large ones on a GPU alone one after the other into a new array.

    A kernel that concatenates many arrays looks for each number among all of them, and takes five
    times as long.
    """
    row = gradients[0]
    if not on_one_gpu() or row.nbytes < LARGE:
        return jnp.stack(gradients)
    spec = PartitionSpec(None, *jax.typeof(row).sharding.spec)
    whole = jax.lax.empty((len(gradients), *row.shape), row.dtype, out_sharding=spec)
    for i, gradient in enumerate(gradients):
        whole = jax.lax.dynamic_update_index_in_dim(whole, gradient, i, 0)
    return whole


_rows.defvjp(
    lambda x: (_rows(x), None),
    lambda _, gradients: (jax.lax.optimization_barrier(_whole(gradients)),),
)
