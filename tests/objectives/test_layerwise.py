"""Layer by layer: each adapted map against the frozen one, written out in NumPy."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from windlass import adapters
from windlass.adapters.scalar import Adapter
from windlass.config.start import Start
from windlass.errors import UserError
from windlass.objectives import Carry, settled
from windlass.objectives.layerwise import Objective

CONFIG = dataclasses.replace(tiny.config("qwen3"), layers=2)
MLP = Adapter(bits=2, targets=("blocks.mlp.*",))


def objective(**keys) -> Objective:
    return Objective(teacher=Start(path="somewhere"), **keys)


def loss(model, teacher, batch, **keys):
    chosen, given = objective(**keys), {"step": jnp.int32(0), "steps": 1, "key": None}
    tally, _ = chosen(model, batch, carry=Carry(), helpers={"teacher": teacher}, **given)
    tally = settled(tally, model)
    return tally.total / tally.weight


@pytest.fixture(scope="module")
def teacher():
    return tiny.made(CONFIG)


@pytest.fixture(scope="module")
def student(teacher):
    return tiny.adapted(teacher, MLP)


@pytest.fixture(scope="module")
def batch():
    return tiny.rows(CONFIG.vocab)


def written_out(model, teacher, batch, every: int, inputs: str) -> float:
    """The loss in float64, with the MLPs of both models on the inputs of the stack's MLPs."""
    onward = adapters.merged(model) if inputs == "own" else teacher
    weights = [
        jax.tree.map(lambda x, layer=layer: x[layer], one.blocks.kinds[0])
        for one in (adapters.merged(model), teacher)
        for layer in range(CONFIG.layers)
    ]
    entered = mlp_inputs(onward, batch)
    real, losses = np.asarray(batch["document"][:, ::every]) >= 0, []
    for layer, x in enumerate(entered):
        own, frozen = (weights[layer + offset].mlp for offset in (0, CONFIG.layers))
        x = np.asarray(x[:, ::every], np.float64)
        through = own if inputs == "own" else frozen
        gate, up = product(through.gate, x), product(through.up, x)
        between = gate / (1 + np.exp(-gate)) * up
        for name, given in (("gate", x), ("up", x), ("down", between)):
            y, t = (product(getattr(mlp, name), given) for mlp in (own, frozen))
            losses.append(error(y, t)[real])
    return float(np.mean(np.concatenate(losses)))


def product(linear, x: np.ndarray) -> np.ndarray:
    bias = 0.0 if linear.bias is None else np.asarray(linear.bias, np.float64)
    return x @ np.asarray(linear.weight, np.float64) + bias


def error(y: np.ndarray, t: np.ndarray) -> np.ndarray:
    def normalized(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    apart = ((normalized(y) - normalized(t)) ** 2).mean(-1)
    relative = ((y - t) ** 2).sum(-1) / (t**2).sum(-1)
    return np.minimum(0.8 * apart + 0.2 * relative, 10.0)


@eqx.filter_jit
def mlp_inputs(model, batch) -> list[jax.Array]:
    """The normalised input of each MLP of a plain model."""
    found = []

    def noting(mlp):
        class Noting(type(mlp)):
            def __call__(self, x):
                found.append(x)
                return super().__call__(x)

        noted = object.__new__(Noting)
        for field in dataclasses.fields(mlp):
            object.__setattr__(noted, field.name, getattr(mlp, field.name))
        return noted

    unrolled = dataclasses.replace(model.blocks, unroll=CONFIG.layers, remat="none")
    model = eqx.tree_at(lambda one: one.blocks, model, unrolled)
    eqx.tree_at(lambda one: one.blocks.kinds[0].mlp, model, replace_fn=noting)(batch)
    return found


@pytest.mark.parametrize("inputs", ["own", "teacher"])
def test_the_loss_is_what_the_maps_differ_by_on_the_same_inputs(student, teacher, batch, inputs):
    expected = written_out(student, teacher, batch, every=3, inputs=inputs)
    found = eqx.filter_jit(loss)(student, teacher, batch, inputs=inputs, positions=4)
    assert expected > 0.05
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_a_map_learns_from_its_own_error_alone(student, teacher, batch):
    """No gradient leaves a map: with one layer exact, nothing of it moves, whatever others do."""
    middle = adapters.merged(student).blocks.kinds[0].mlp.down.weight

    def exact(layer: int):
        return eqx.tree_at(
            lambda one: one.blocks.kinds[0].mlp.down.weight,
            teacher,
            replace_fn=lambda w: w.at[layer].set(middle[layer]),
        )

    @eqx.filter_jit
    def gradients(teacher):
        return eqx.filter_grad(lambda model: loss(model, teacher, batch))(student)

    found = gradients(exact(0)).blocks.kinds[0]
    assert float(jnp.abs(found.mlp.down.latent[0]).max()) < 1e-6
    assert float(jnp.abs(found.mlp.down.latent[1]).max()) > 1e-4
    assert float(jnp.abs(found.mlp.gate.latent[0]).max()) > 1e-4
    assert float(jnp.abs(found.attention.query.weight).max()) == 0.0


def test_a_mesh_of_all_three_axes_gives_the_same_loss(teacher, batch):
    wide = tiny.made(tiny.wide("qwen3"))
    student = tiny.adapted(wide, MLP)
    expected = float(eqx.filter_jit(loss)(student, wide, batch))
    with tiny.on((2, 2, 2)) as mesh:
        (model, frozen), rows = tiny.placed((student, wide), batch, mesh)
        found = float(eqx.filter_jit(loss)(model, frozen, rows))
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_recurrence_compares_what_is_outside_its_loop(batch):
    frozen = tiny.model("gru")
    student = tiny.adapted(frozen, Adapter(bits=2))
    rows = tiny.rows(tiny.config("gru").vocab)
    assert float(eqx.filter_jit(loss)(student, frozen, rows)) > 0.01


def test_a_teacher_of_another_shape_and_a_model_without_adapters_are_refused(
    student, teacher, batch
):
    with pytest.raises(UserError, match=r"no map here is adapted: an adapter such as lookup"):
        objective().start(teacher, batch)
    other = tiny.made(dataclasses.replace(CONFIG, mlp=64))
    with pytest.raises(UserError, match=r"has \(2, 32, 64\) for blocks.mlp.gate of \(2, 32, 48\)"):
        loss(student, other, batch)
    with pytest.raises(ValueError, match="positions is 0; it must be 1 or more"):
        objective(positions=0)
