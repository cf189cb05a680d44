"""Networks that think in cycles: blocks, states, and what of it has a gradient.

With embedded inputs e, an answer state z_H and a scratch state z_L, a pass has H cycles

    repeat L times: z_L ← f(z_L + z_H + e);   then z_H ← g(z_H + z_L)

where f and g are blocks h ← rms(h + mixing(h)), h ← rms(h + mlp(h)) without a learned scale; g is f
where there is one network. The gradient is that of the last cycle, or of its last two calls alone:
all before them is computed without.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from windlass.devices.axes import Placed
from windlass.layers.attention import Attention
from windlass.layers.auxiliary import Report, added
from windlass.layers.context import Packed
from windlass.layers.initializers import narrow
from windlass.layers.kv_cache import DecodeContext
from windlass.layers.mlp import Gated
from windlass.layers.norm import normed
from windlass.layers.stack import Stack

States = Float[Array, "batch positions embed"]  # of all positions of a row, those of a prefix too
Some = TypeVar("Some")


class Latents(NamedTuple):
    """States of a row that are handed on from pass to pass: z_H and z_L."""

    high: States
    low: States


class InitialStates(Placed):
    """The states that every position begins with: fixed random vectors."""

    high: Float[Array, " embed"]
    low: Float[Array, " embed"]
    matrices: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[tuple[str, ...]] = ("high", "low")

    def __init__(self, width: int, *, key: PRNGKeyArray):
        self.high, self.low = (narrow(one, (width,), 1) for one in jax.random.split(key))

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"high": ("embed",), "low": ("embed",)}


class PostNormBlock(eqx.Module):
    """Mixing over positions, then an MLP; the norm, without a scale, is of their sums.

    Where an MLP mixes, states are [positions, batch, embed]: a matmul over positions is then one of
    two matrices, which needs no transposed copy.
    """

    mixing: Attention | Gated  # attention, or an MLP over the positions of a row
    mlp: Gated
    eps: float = eqx.field(static=True)

    @property
    def is_position_major(self) -> bool:
        return isinstance(self.mixing, Gated)

    def __call__(self, x: States, context) -> States:
        if isinstance(self.mixing, Gated):
            mixed = jnp.moveaxis(self.mixing(jnp.moveaxis(x, 0, -1)), -1, 0)
            mlp = jax.vmap(self.mlp)
        else:
            mixed, mlp = self.mixing(x, context), self.mlp
        x = self._normed(checkpoint_name(x + mixed, "residual"))
        return self._normed(checkpoint_name(x + mlp(x), "residual"))

    @jax.named_scope("norm")
    def _normed(self, x: States) -> States:
        return normed(x, self.eps).astype(x.dtype)


class Cycles(eqx.Module):
    """The networks of both states with the inputs and the context of the rows they think about.

    Its methods return caches of all their calls and the sum of the reports beside the states.
    """

    low: Stack
    high: Stack  # the same where there is one network
    inputs: States
    context: Packed | DecodeContext
    l_cycles: int = eqx.field(static=True)
    cut: int = eqx.field(static=True)  # changes of z_L in the last cycle that have no gradient

    def run(
        self, state: Latents, cycles: int, past: PyTree = None
    ) -> tuple[Latents, PyTree, Report]:
        """So many cycles, of which the last alone has a gradient."""
        early, last = (None, None) if past is None else past
        inner = dataclasses.replace(self, inputs=self._turned(self.inputs))
        still, state = stopped((inner, self._turned(state)))
        state, left, report = _repeated(partial(still._cycle, cut=0), state, early, cycles - 1)
        # Where layers are no loop, calls with a gradient are none: a loop stacks what they save.
        loops = self.low.is_loop or past is not None
        state, (own, further) = inner._cycle(state, last, cut=self.cut, loops=loops)
        return self._turned(state), (left, own), added(report, further)

    def refined(
        self, high: States, calls: int, past: PyTree = None
    ) -> tuple[States, PyTree, Report]:
        """The answer state after further calls on it alone."""
        step = partial(self._call, self.high)
        high, left, report = _repeated(step, self._turned(high), past, calls)
        return self._turned(high), left, report

    def _turned(self, states: Some) -> Some:
        """States in the order of axes that blocks read, and back."""
        if not all(block.is_position_major for block in self.low.kinds):
            return states
        return jax.tree.map(lambda x: x.swapaxes(0, 1), states)

    def _cycle(
        self, state: Latents, past: PyTree, *, cut: int, loops: bool = True
    ) -> tuple[Latents, tuple[PyTree, Report]]:
        """One cycle, whose first `cut` changes of the scratch state have no gradient."""
        early, late, last = (None,) * 3 if past is None else past
        high, low = state
        given = high + self.inputs
        step = partial(self._scratched, *stopped((self.low, given)))
        low, *first = _repeated(step, low, early, cut)
        step = partial(self._scratched, self.low, given)
        low, *second = _repeated(step, low, late, self.l_cycles - cut, loops=loops)
        high, third = self._call(self.high, high + low, last)
        left, reports = zip(first, second, third, strict=True)
        return Latents(high, low), (left, added(*reports))

    def _scratched(
        self, network: Stack, given: States, low: States, past: PyTree
    ) -> tuple[States, tuple[PyTree, Report]]:
        return self._call(network, low + given, past)

    def _call(
        self, network: Stack, x: States, past: PyTree
    ) -> tuple[States, tuple[PyTree, Report]]:
        x, left, report = network(x, self.context, past)
        return x, (left, report)


def stopped(tree: Some) -> Some:
    """A tree whose arrays have no gradient."""
    return jax.tree.map(lambda x: jax.lax.stop_gradient(x) if eqx.is_array(x) else x, tree)


def _repeated(
    step: Callable[..., tuple[PyTree, tuple[PyTree, Report]]],
    state: PyTree,
    past: PyTree,
    times: int,
    *,
    loops: bool = True,
) -> tuple[PyTree, PyTree, Report]:
    """So many steps: the state after them, the caches of all, and the sum of reports."""
    if times == 0:
        return state, None, {}
    if not loops:
        each = []
        for _ in range(times):
            state, both = step(state, None)
            each.append(both)
        left, reports = jax.tree.map(lambda *x: jnp.stack(x), *each)
        return state, left, jax.tree.map(lambda x: jnp.sum(x, axis=0), reports)
    state, (left, reports) = jax.lax.scan(step, state, past, length=times)
    return state, left, jax.tree.map(lambda x: jnp.sum(x, axis=0), reports)
