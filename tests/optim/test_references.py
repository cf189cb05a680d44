"""Every optimiser against another implementation: PyTorch's, or the paper's in numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests import tiny
from windlass.devices.axes import ArrayFacts, placements
from windlass.layers.embedding import Embedding
from windlass.layers.linear import Linear
from windlass.layers.norm import RMSNorm
from windlass.optim import Descent, Schedule, adafactor, adam_atan2, adamw, lion, muon, sign

SIZES = dict(vocab=11, embed=6, heads=2, head_dim=4)
RATE, DECAY, STEPS = 0.02, 0.3, 4
KEYS: dict[str, Any] = dict(learning_rate=RATE, weight_decay=DECAY, clip_norm=None)
KEYS |= dict(schedule=Schedule(shape="constant"))
LAYERS = 3


def weights() -> dict:
    """An embedding, and stacks of a matrix out of a hidden state, one into it, and a norm."""
    rng = np.random.default_rng(0)

    def stack(x):
        return jnp.asarray(rng.normal(size=(LAYERS, *x.shape)).astype(np.float32))

    key = jax.random.key(0)
    blocks = {
        "query": Linear("embed", "heads head_dim", SIZES, key=key),
        "output": Linear("heads head_dim", "embed", SIZES, key=key),
        "norm": RMSNorm("embed", SIZES, eps=1e-6),
    }
    return {"embedding": Embedding(SIZES, key=key), **jax.tree.map(stack, blocks)}


def plain(tree: dict) -> dict[str, np.ndarray]:
    """The same numbers as PyTorch would hold them: a matrix, [out, in], for each layer."""
    found = {"embedding": np.asarray(tree["embedding"].weight)}
    for layer in range(LAYERS):
        query, output = (np.asarray(tree[name].weight[layer]) for name in ("query", "output"))
        found[f"query.{layer}"] = query.reshape(6, 8).T
        found[f"output.{layer}"] = output.reshape(8, 6).T
        found[f"norm.{layer}"] = np.asarray(tree["norm"].scale[layer])
    return found


def gradients() -> list[dict]:
    rng = np.random.default_rng(1)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape).astype(np.float32))  # noqa: E731
    return [jax.tree.map(draw, weights()) for _ in range(STEPS)]


def ours(optimizer: Descent) -> dict[str, np.ndarray]:
    now = weights()
    built = optimizer.build(100, now)
    update, state = jax.jit(built.update), built.init(now)
    with jax.numpy_dtype_promotion("standard"):
        for step, gradient in enumerate(gradients()):
            updates, state = update(gradient, state, now, step=step)
            now = jax.tree.map(jnp.add, now, updates)
    return plain(now)


def theirs(make, names=lambda name: True) -> dict[str, np.ndarray]:
    """PyTorch's; norms are not decayed."""
    torch = pytest.importorskip("torch")
    chosen = {name: x for name, x in plain(weights()).items() if names(name)}
    now = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in chosen.items()}
    groups = [
        {"params": [x for name, x in now.items() if ("norm" in name) == is_norm], **keys}
        for is_norm, keys in ((True, {"weight_decay": 0.0}), (False, {"weight_decay": DECAY}))
    ]
    optimizer = make(torch, [group for group in groups if group["params"]])
    for gradient in gradients():
        for name, x in plain(gradient).items():
            if name in now:
                now[name].grad = torch.tensor(x)
        optimizer.step()
    return {name: x.detach().numpy() for name, x in now.items()}


def agree(found: dict, expected: dict, tolerance: float) -> None:
    start = plain(weights())
    for name, x in expected.items():
        np.testing.assert_allclose(
            found[name] - start[name], x - start[name], atol=tolerance * RATE, err_msg=name
        )


def test_adamw_is_that_of_pytorch():
    expected = theirs(lambda t, groups: t.optim.AdamW(groups, lr=RATE, betas=(0.8, 0.9), eps=1e-3))
    agree(ours(adamw.Optimizer(**KEYS, beta1=0.8, beta2=0.9, eps=1e-3)), expected, 1e-4)


def test_adafactor_is_that_of_pytorch_for_each_layer_and_for_axes_that_belong_together():
    # PyTorch also bounds the rate by one over the root of the step, which is not reached here.
    expected = theirs(lambda t, groups: t.optim.Adafactor(groups, lr=RATE, beta2_decay=-0.7, d=1.5))
    agree(ours(adafactor.Optimizer(**KEYS, decay=0.7, threshold=1.5)), expected, 1e-4)


def test_adafactor_stores_a_row_and_a_column_of_each_matrix():
    now = weights()
    moments: Any = adafactor.Optimizer(learning_rate=RATE).direction().init(now)
    shapes = jax.tree.map(jnp.shape, (moments.rows, moments.columns))
    assert shapes[0]["query"].weight == (LAYERS, 6, 1, 1)
    assert shapes[1]["query"].weight == (LAYERS, 1, 2, 4)
    assert shapes[0]["output"].weight == (LAYERS, 2, 4, 1)
    assert shapes[1]["output"].weight == (LAYERS, 1, 1, 6)
    assert (shapes[0]["embedding"].weight, shapes[1]["embedding"].weight) == ((11, 1), (1, 6))
    assert (shapes[0]["norm"].scale, shapes[1]["norm"].scale) == ((LAYERS, 6), None)


def test_lion_is_that_of_the_paper():
    now = {name: x.astype(float) for name, x in plain(weights()).items()}
    moment = {name: np.zeros_like(x) for name, x in now.items()}
    for gradient in gradients():
        for name, g in plain(gradient).items():
            decay = 0.0 if "norm" in name else DECAY
            sign = np.sign(0.7 * moment[name] + 0.3 * g)
            now[name] = now[name] - RATE * (sign + decay * now[name])
            moment[name] = 0.9 * moment[name] + 0.1 * g
    agree(ours(lion.Optimizer(**KEYS, beta1=0.7, beta2=0.9)), now, 1e-4)


def test_adam_atan2_is_its_equation_in_pytorch():
    torch = pytest.importorskip("torch")
    now = {name: torch.tensor(x) for name, x in plain(weights()).items()}
    mean, square = ({name: torch.zeros_like(x) for name, x in now.items()} for _ in range(2))
    for step, gradient in enumerate(gradients(), start=1):
        for name, g in ((name, torch.tensor(x)) for name, x in plain(gradient).items()):
            mean[name] = 0.8 * mean[name] + 0.2 * g
            square[name] = 0.9 * square[name] + 0.1 * g**2
            root = torch.sqrt(square[name] / (1 - 0.9**step))
            decay = 0.0 if "norm" in name else DECAY
            turned = 1.27 * torch.atan2(mean[name] / (1 - 0.8**step), root)
            now[name] = now[name] * (1 - RATE * decay) - RATE * turned
    found = ours(adam_atan2.Optimizer(**KEYS, beta1=0.8, beta2=0.9))
    for name, x in now.items():
        np.testing.assert_allclose(found[name], x.numpy(), atol=1e-6, rtol=0, err_msg=name)


def test_adam_atan2_does_not_know_the_scale_of_gradients():
    gradient = jnp.asarray([1.0, -2.0, 0.0])
    rule = adam_atan2.Rule().direction()
    with jax.numpy_dtype_promotion("standard"):
        usual, tiny_ones = (
            np.asarray(rule.update(size * gradient, rule.init(gradient))[0])
            for size in (1.0, 1e-15)
        )
    np.testing.assert_allclose(usual, [1.27 * np.pi / 4, -1.27 * np.pi / 4, 0], rtol=1e-6)
    np.testing.assert_allclose(tiny_ones, usual, rtol=1e-5)


def test_sparse_sign_descent_is_its_equation_in_pytorch_on_the_rows_of_a_batch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    now: Any = Embedding({"vocab": 7, "embed": 3}, key=jax.random.key(0))
    table = np.asarray(now.weight)
    built = sign.Optimizer(**KEYS).build(100, now)
    state, expected = built.init(now), torch.tensor(table)
    update = jax.jit(built.update)
    for step in range(STEPS):
        read = torch.tensor(rng.integers(5, size=4))  # some twice; the last two never
        each = torch.tensor(rng.normal(size=(4, 3)).astype(np.float32))
        rows, place = torch.unique(read, return_inverse=True)
        merged = torch.zeros(len(rows), 3).index_add_(0, place, each)
        expected[rows] = expected[rows] * (1 - RATE * DECAY) - RATE * torch.sign(merged)
        dense = jnp.asarray(torch.zeros(7, 3).index_add_(0, read, each).numpy())
        with jax.numpy_dtype_promotion("standard"):
            gradient = jax.tree.map(lambda _, g=dense: g, now)
            updates, state = update(gradient, state, now, step=step)
        now = jax.tree.map(jnp.add, now, updates)
    found = np.asarray(now.weight)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6, rtol=0)
    np.testing.assert_array_equal(found[5:], table[5:])
    assert not jax.tree.leaves(state)


def is_between_states(name: str) -> bool:
    return name.startswith(("query", "output"))


def polynomial(g: np.ndarray) -> np.ndarray:
    """Newton and Schulz's iterations on the singular values themselves."""
    a, b, c = 3.4445, -4.7750, 2.0315
    u, s, v = np.linalg.svd(g, full_matrices=False)
    s = s / np.sqrt(np.sum(s**2))
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ v


def test_muon_is_that_of_its_author_for_each_layer_and_for_axes_that_belong_together():
    now = {name: x.astype(float) for name, x in plain(weights()).items() if is_between_states(name)}
    momentum = {name: np.zeros_like(x) for name, x in now.items()}
    for gradient in gradients():
        for name, g in plain(gradient).items():
            if is_between_states(name):
                momentum[name] = 0.9 * momentum[name] + 0.1 * g
                turned = polynomial(0.9 * momentum[name] + 0.1 * g)
                size = 0.2 * np.sqrt(max(g.shape))
                now[name] = now[name] - RATE * (size * turned + DECAY * now[name])
    agree(ours(muon.Optimizer(**KEYS, momentum=0.9)), now, 1e-3)


def test_muon_is_that_of_pytorch_to_the_precision_of_its_bfloat16():
    def make(torch, groups):
        return torch.optim.Muon(groups, lr=RATE, momentum=0.9, adjust_lr_fn="match_rms_adamw")

    agree(ours(muon.Optimizer(**KEYS, momentum=0.9)), theirs(make, is_between_states), 0.1)


def test_muon_leaves_embeddings_and_norms_to_adamw_at_a_rate_of_its_own():
    adam = muon.Adam(learning_rate=RATE, beta1=0.8, beta2=0.9, eps=1e-3)
    keys: dict[str, Any] = {**KEYS, "learning_rate": 1.0}
    found = ours(muon.Optimizer(**keys, adamw=adam))
    expected = ours(adamw.Optimizer(**KEYS, beta1=0.8, beta2=0.9, eps=1e-3))
    for name in found:
        same = np.array_equal(found[name], expected[name])
        assert same != is_between_states(name), name


@pytest.mark.parametrize(("layers", "zeros"), [(4, 0), (6, 2), (2, 2)])
def test_on_a_mesh_muon_gives_each_device_whole_matrices_of_some_layers(layers, zeros, capfd):
    rng = np.random.default_rng(0)
    whole = jnp.asarray(rng.normal(size=(layers, 6, 2, 4)).astype(np.float32))
    about = ArrayFacts(("embed", "heads", "head_dim"), True, 1)
    turn = muon.Optimizer(learning_rate=RATE)._turned
    expected = turn(whole, about)
    query = Linear("embed", "heads head_dim", SIZES, key=jax.random.key(0))
    with tiny.on((2, 2, 2)) as mesh:
        stacked = jax.tree.map(lambda _: whole, query)
        x = jax.device_put(whole, placements(stacked, mesh).weight)
        way, more = muon.stations(x, 1)
        assert (way[-1], more) == (P(("fsdp", "tensor"), None, None, None), zeros)
        run = jax.jit(turn, static_argnums=1)
        assert "all-gather" not in (run.lower(x, about).compile().as_text() or "")
        found = run(x, about)
        assert found.sharding == x.sharding
    assert "nvoluntary" not in capfd.readouterr().err
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_a_number_of_the_others_that_cannot_be_is_refused():
    cases: list[tuple[dict[str, Any], str]] = [
        (dict(learning_rate=-1.0), "learning_rate is -1.0; it must be above 0"),
        (dict(beta2=1.0), "beta2 is 1.0; it is a share, below 1"),
    ]
    for keys, message in cases:
        with pytest.raises(ValueError) as error:
            muon.Adam(**keys)
        assert str(error.value) == message
