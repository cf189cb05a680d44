"""Reservoirs: fixed random layers, of whose states only a readout is learned.

With inputs x, fixed matrices U and W and the leak rate a, a recurrence has

    h_t = a f(x_t U + h_{t-1} W) + (1 − a) h_{t-1}

and a window of n inputs, each older one weaker by γ, has no state but the inputs themselves:

    h_t = f(Σ_{i<n} γ^i x_{t-i} U_i)

Matrices are drawn on the host (eigenvalues are nothing that a TPU computes), follow from a seed of
the model alone, and are never trained, decayed, averaged or cast.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from windlass.config import below_one, section
from windlass.devices.axes import Placed
from windlass.dynamics import spectral_radius
from windlass.layers import recurrence
from windlass.layers.initializers import Initializer, host
from windlass.layers.linear import Linear

Activation = Literal["tanh", "relu", "leaky_relu", "gelu"]
ACTIVATIONS: dict[Activation, Callable] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "leaky_relu": jax.nn.leaky_relu,
    "gelu": jax.nn.gelu,
}
# The same in NumPy, for measures in float64.
ON_HOST: dict[Activation, Callable] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "gelu": lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
}
RATE = 10.0  # of decay of the state space, −A
SLOWEST = 64.0  # positions over which its slowest channel forgets, at first


@section
class Reservoir:
    """A fixed random layer: a leaky recurrence, or with a window a map of the last inputs."""

    size: int  # units
    # spectral radius, the largest absolute eigenvalue; 0: no recurrence; null with a window
    radius: float | None = None
    leak: float = 1.0  # leak rate of a recurrence: 1 keeps nothing of the last state but by W
    density: float = 1.0  # share of the recurrent weights, or of those of a window, that are not 0
    activation: Activation = "tanh"  # of every unit
    # standard deviation of what inputs of variance 1 add before the activation
    input_scale: float = 1.0
    window: int | None = None  # inputs that are read, the own one included; null: a recurrence
    decay: float = 1.0  # of a window: factor by which each older input is weaker

    def __post_init__(self):
        problems = below_one(self, "size", "window")
        for name in ("leak", "density", "decay"):
            if not 0 < getattr(self, name) <= 1:
                problems.append(f"{name} is {getattr(self, name)}; it is a share, above 0 up to 1")
        if self.input_scale <= 0:
            problems.append(f"input_scale is {self.input_scale}; it must be above 0")
        problems += self._of_recurrence() if self.window is None else self._of_window()
        if problems:
            raise ValueError(*problems)

    def _of_recurrence(self) -> list[str]:
        problems = []
        if self.radius is None:
            problems.append("radius is null; a recurrence needs one, such as 0.9, or a window")
        elif self.radius < 0:
            problems.append(f"radius is {self.radius}; it must be 0 or more")
        elif self.radius and 0 < self.density * self.size < 1:
            problems.append(
                f"density is {self.density}; of {self.size} units most would have no connection: "
                f"{1 / self.size:.2g} or more would do"
            )
        if self.decay != 1:
            problems.append(f"decay is {self.decay}; it is of a window, and window is null")
        return problems

    def _of_window(self) -> list[str]:
        read = {"radius": (self.radius, None), "leak": (self.leak, 1.0)}
        return [
            f"{name} is {value}; it is of a recurrence, and window is {self.window}: leave it out"
            for name, (value, usual) in read.items()
            if value != usual
        ]


class LeakyReservoir(Placed):
    """A leaky recurrence with a sparse random matrix of a given spectral radius, in float32."""

    inputs: Float[Array, "inputs units"]
    recurrent: Float[Array, "units units"]
    about: Reservoir = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[tuple[str, ...]] = ("inputs", "recurrent")

    def __init__(self, about: Reservoir, width: int, *, key: PRNGKeyArray):
        inputs, recurrent = jax.random.split(key)
        self.inputs = scaled(about.input_scale)(inputs, (width, about.size), width)
        shape = (about.size, about.size)
        assert about.radius is not None
        self.recurrent = of_radius(about.radius, about.density)(recurrent, shape, about.size)
        self.about = about

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"inputs": ("inputs", "units"), "recurrent": ("units", "units")}

    def driven(self, x: Float[Array, "batch seq inputs"]) -> Float[Array, "batch seq units"]:
        """x U, of all positions at once."""
        inputs = self.inputs.astype(x.dtype)
        return jnp.tensordot(x, inputs, axes=1, preferred_element_type=jnp.float32)

    def step(self, state: Array, driven: Array) -> Array:
        leak, f = self.about.leak, ACTIVATIONS[self.about.activation]
        fresh = f(driven + state @ self.recurrent)
        return leak * fresh + (1 - leak) * state

    def simulated(self, inputs: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
        """States in NumPy, in float64, of inputs [time, ..., width]; of one layer."""
        leak, f = self.about.leak, ON_HOST[self.about.activation]
        into, recurrent = (np.asarray(x, np.float64) for x in (self.inputs, self.recurrent))
        driven, states = inputs @ into, []
        state = np.zeros_like(driven[0]) if start is None else start
        for now in driven:
            state = leak * f(now + state @ recurrent) + (1 - leak) * state
            states.append(state)
        return np.stack(states)


class WindowedReservoir(Placed):
    """A random map of the last inputs, without a state: all positions are computed at once."""

    inputs: Float[Array, "window inputs units"]
    about: Reservoir = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[tuple[str, ...]] = ("inputs",)

    def __init__(self, about: Reservoir, width: int, *, key: PRNGKeyArray):
        assert about.window is not None
        faded = about.decay ** np.arange(about.window - 1, -1, -1)  # the own input is the last
        draw = scaled(about.input_scale, about.density, faded)
        self.inputs = draw(key, (about.window, width, about.size), width)
        self.about = about

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"inputs": ("window", "inputs", "units")}

    @jax.named_scope("reservoir")
    def __call__(
        self, x: Float[Array, "batch seq inputs"], context
    ) -> Float[Array, "batch seq units"]:
        past, inputs = context.before(x, self.about.window), self.inputs.astype(x.dtype)
        summed = jnp.tensordot(past, inputs, axes=2, preferred_element_type=jnp.float32)
        return ACTIVATIONS[self.about.activation](summed)

    def simulated(self, inputs: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
        """States in NumPy, in float64; a start is forgotten at once."""
        window, f = len(self.inputs), ON_HOST[self.about.activation]
        before = np.zeros((window - 1, *inputs.shape[1:]))
        padded = np.concatenate([before, inputs])
        taps = np.asarray(self.inputs, np.float64)
        return f(sum(padded[i : i + len(inputs)] @ taps[i] for i in range(window)))


AnyReservoir = LeakyReservoir | WindowedReservoir


def reservoir(about: Reservoir, width: int, *, key: PRNGKeyArray) -> AnyReservoir:
    """The layer that a section describes, of inputs of this width."""
    kind = LeakyReservoir if about.window is None else WindowedReservoir
    return kind(about, width, key=key)


def states(
    reservoirs: Sequence[AnyReservoir], x: Float[Array, "batch seq inputs"], context
) -> list[Float[Array, "batch seq units"]]:
    """States of reservoirs that read the same input. All recurrences are one loop over time."""
    leaky = [one for one in reservoirs if isinstance(one, LeakyReservoir)]
    ends = np.cumsum([one.about.size for one in leaky])

    def cell(state, driven):
        parts = (jnp.split(whole, ends[:-1], axis=-1) for whole in (state, driven))
        each = [one.step(*both) for one, *both in zip(leaky, *parts, strict=True)]
        state = jnp.concatenate(each, axis=-1)
        return state, state

    recurrences: Iterator[Array] = iter(())
    if leaky:
        driven = jnp.concatenate([one.driven(x) for one in leaky], axis=-1)
        start = jnp.zeros(int(ends[-1]), jnp.float32)
        whole = context.recur(cell, start, driven, remat=True)
        recurrences = iter(jnp.split(whole, ends[:-1], axis=-1))
    return [
        next(recurrences) if isinstance(one, LeakyReservoir) else one(x, context)
        for one in reservoirs
    ]


class DelayProducts(eqx.Module):
    """Features of nonlinear vector autoregression (NVAR): no state, no random number.

    With v = (p_t, ..., p_{t-d+1}), the last projections p = x P: 1, v and all v_i v_j with i ≤ j.
    """

    projection: Linear
    delays: int = eqx.field(static=True)

    def __init__(self, sizes: dict[str, int], delays: int, *, key: PRNGKeyArray):
        self.projection = Linear("embed", "projected", sizes, key=key)
        self.delays = delays

    @staticmethod
    def count(delays: int, projected: int) -> int:
        """Number of features."""
        linear = delays * projected
        return 1 + linear + linear * (linear + 1) // 2

    @jax.named_scope("reservoir")
    def __call__(
        self, x: Float[Array, "batch seq embed"], context
    ) -> Float[Array, "batch seq features"]:
        past = context.before(self.projection(x).astype(jnp.float32), self.delays)
        v = past.reshape(*past.shape[:2], -1)
        products = [v[..., i : i + 1] * v[..., i:] for i in range(v.shape[-1])]
        return jnp.concatenate([jnp.ones_like(v[..., :1]), v, *products], axis=-1)


class StateSpace(Placed):
    """A diagonal state space whose input map is fixed, discretised with a learned step Δ.

    s_t = Ā_t s_{t-1} + B̄_t with Δ_t = softplus(x_t D + b), Ā = exp(A Δ), A = −10 and
    B̄ = −(1 − Ā)/A · x_t B: positive, so that of a constant input s → −x B / A.
    """

    inputs: Float[Array, "inputs channels"]
    step: Linear
    matrices: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[tuple[str, ...]] = ("inputs",)

    def __init__(self, sizes: dict[str, int], *, key: PRNGKeyArray, fixed_key: PRNGKeyArray):
        width, channels = sizes["embed"], sizes["channels"]
        self.inputs = scaled(1.0)(fixed_key, (width, channels), width)
        step = Linear("embed", "channels", sizes, bias=True, key=key)
        # Channels begin with time constants from one position to many: with Δ = softplus(0) all of
        # them would forget 999 parts of 1000 at once.
        first = 1 / (RATE * jnp.geomspace(1.0, SLOWEST, channels, dtype=jnp.float32))
        self.step = eqx.tree_at(lambda one: one.bias, step, jnp.log(jnp.expm1(first)))

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"inputs": ("inputs", "channels")}

    @jax.named_scope("reservoir")
    def __call__(
        self, x: Float[Array, "batch seq embed"], context
    ) -> Float[Array, "batch seq channels"]:
        # Products of many decays, in float32: bfloat16 has no 0.999.
        kept = jnp.exp(-RATE * jax.nn.softplus(self.step(x).astype(jnp.float32)))
        inputs = self.inputs.astype(x.dtype)
        driven = jnp.tensordot(x, inputs, axes=1, preferred_element_type=jnp.float32)
        return context.scan(recurrence.linear, (kept, (1 - kept) / RATE * driven))[1]


def of_radius(radius: float, density: float) -> Initializer:
    """Sparse normal, scaled to a spectral radius: W ρ / max |λ(W)|; zeros where ρ is 0."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int) -> np.ndarray:
        if not radius:
            return np.zeros(shape)
        weight, found = np.zeros(shape), 0.0
        usual = np.sqrt(density * fan_in)  # by the circular law
        # Of few connections there may be no cycle: every eigenvalue is 0 then, but for rounding.
        while found < 0.1 * usual:
            weight = rng.normal(size=shape) * (rng.random(shape) < density)
            found = spectral_radius(weight)
        return weight * (radius / found)

    return host(draw)


def scaled(scale: float, density: float = 1.0, taps: np.ndarray | None = None) -> Initializer:
    """Sparse uniform, such that outputs have the standard deviation `scale` for inputs of 1.

    With `taps` there is a matrix for each of several inputs, times its factor.
    """

    def draw(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int) -> np.ndarray:
        factors = np.ones(()) if taps is None else taps[:, None, None]
        bound = scale * np.sqrt(3 / (density * fan_in * np.sum(factors**2)))
        return factors * rng.uniform(-bound, bound, shape) * (rng.random(shape) < density)

    return host(draw)


def each(model: PyTree) -> Iterator[tuple[str, AnyReservoir]]:
    """Every reservoir of a model with its arrays on the host, one of each layer, by its name."""
    is_one = lambda node: isinstance(node, AnyReservoir)  # noqa: E731
    for path, node in jax.tree.leaves_with_path(model, is_leaf=is_one):
        if not is_one(node):
            continue
        name = f"reservoirs.{path[-1].idx}"
        on_host = jax.tree.map(np.asarray, node)
        if node.inputs.ndim == len(node.axes["inputs"]):
            yield name, on_host
            continue
        for layer in range(len(node.inputs)):
            yield f"blocks.{layer}.{name}", jax.tree.map(lambda x, i=layer: x[i], on_host)
