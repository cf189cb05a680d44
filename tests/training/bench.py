"""A tiny model on a mesh with its compiled step, to be driven batch by batch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tests import tiny
from windlass.adapters.lora import Adapter
from windlass.devices.axes import cast, placements
from windlass.objectives import Carry
from windlass.objectives.next_token import Objective
from windlass.optim import Descent
from windlass.optim.adamw import Optimizer
from windlass.program.step import Frozen, State, make_step, start
from windlass.program.trainable import choose

STEPS = 10
# With the usual eps of 1e-8, rounding errors of gradients that are zero become steps, and after ten
# of them the norm of the gradient differs by 1e-5 between any two orders of summation; in GPT-OSS's
# tiny model, with 1e-6, too.
ADAMW = Optimizer(learning_rate=1e-3, eps=1e-5)


def batch(step: int, vocab: int) -> dict[str, jax.Array]:
    """Sixteen packed rows with uneven weights, others at each step."""
    parts = [tiny.rows(vocab, seed=97 * step), tiny.rows(vocab, seed=97 * step + 31)]
    return {name: jnp.concatenate([part[name] for part in parts]) for name in parts[0]}


class Bench:
    """A tiny model of a family on a mesh, and its compiled step."""

    def __init__(
        self,
        family: str,
        sizes: tuple[int, int, int],
        microbatches: int,
        skips: int = 0,
        optim: Descent = ADAMW,
        ema: float | None = None,
        compute: str = "float32",
        adapter: Adapter | None = None,
        **changes,  # to the config of the model
    ):
        config = tiny.wide(family, **changes)
        self.vocab = config.vocab
        whole, static = eqx.partition(tiny.made(config, adapter), eqx.is_array)
        arrays, frozen = eqx.partition(whole, choose(whole, None).mask)
        with tiny.on(sizes) as self.mesh:
            optimizer = optim.build(STEPS, arrays)
            copies = jax.tree.map(np.array, arrays)  # the step takes its state away
            weights = jax.device_put(copies, placements(arrays, self.mesh))
            state = start(
                weights,
                optimizer,
                Carry(),
                key=jax.random.key(0),
                has_ema=ema is not None,
                has_loss_scale=compute == "float16",
            )
            self.state: State = jax.device_put(state, placements(state, self.mesh))
            self.frozen = Frozen(jax.device_put(frozen, placements(frozen, self.mesh)), {})
            step = make_step(
                lambda weights, frozen: cast(eqx.combine(weights, frozen, static), compute),
                Objective(),
                optimizer,
                steps=STEPS,
                microbatches=microbatches,
                skips=skips,
                ema=ema,
            )
            self.step = jax.jit(step, donate_argnums=0)

    def rows(self, step: int) -> dict[str, jax.Array]:
        place = NamedSharding(self.mesh, PartitionSpec(("data", "fsdp")))
        return jax.device_put(batch(step, self.vocab), place)

    def go(self, rows: dict[str, jax.Array]) -> dict[str, float]:
        with jax.set_mesh(self.mesh):
            self.state, metrics = self.step(self.state, self.frozen, rows)
            return {name: float(value) for name, value in metrics.items()}

    def curve(self, steps: int = STEPS) -> np.ndarray:
        told = [self.go(self.rows(step)) for step in range(steps)]
        return np.array([[one["loss"], one["gradient_norm"]] for one in told])
