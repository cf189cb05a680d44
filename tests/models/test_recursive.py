"""Recursive models beside their equations in PyTorch, and what text mode may not see."""

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests import tiny
from tests.models.test_families import ten_batches, trained
from windlass.analysis.flops import training_flops
from windlass.config import read, tree
from windlass.errors import UserError
from windlass.layers.kv_cache import KVCache
from windlass.layers.names import named
from windlass.layers.stack import arrange
from windlass.models import recursive
from windlass.models.recursive import Config, PositionMixing, Prefix
from windlass.objectives import Carry
from windlass.objectives.halting import Objective

SMALL: dict[str, Any] = dict(vocab=11, embed=16, mlp=24, layers=2, h_cycles=2, l_cycles=2, passes=3)
PREFIX = Prefix(positions=2, identifiers=3, width=24)
TRM = Config(**SMALL, heads=2, bidirectional=True, prefix=PREFIX)
MIXING = PositionMixing(length=9, mlp=20)
MLP_TRM = dataclasses.replace(TRM, layers=1, heads=None, mixing=MIXING, theta=None)
HRM = Config(**SMALL, networks=2, gradient="last_step", heads=2, bidirectional=True, prefix=PREFIX)
ATHENA = Config(
    **SMALL, heads=4, kv_heads=2, bidirectional=True, learned=11, theta=None, gate="norm_gate"
)
EACH = {"TRM": TRM, "TRM with an MLP over positions": MLP_TRM, "HRM": HRM, "Athena": ATHENA}


def puzzles(rows: int = 4, length: int = 9, vocab: int = 11, seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shape = (rows, length)
    columns = {
        "tokens": rng.integers(vocab, size=shape).astype(np.int32),
        "targets": rng.integers(vocab, size=shape).astype(np.int32),
        "weight": rng.integers(2, size=shape).astype(np.float32),
        "position": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "document": np.zeros(shape, np.int32),
        "identifier": (np.arange(rows) % 3).astype(np.int32),
    }
    return {name: jnp.asarray(column) for name, column in columns.items()}


# The equations in PyTorch, from scratch.


class Restated:
    """A recursive model over tensors by our names; without `cuts` all has its gradient."""

    def __init__(self, config: Config, tensors: dict[str, torch.Tensor], *, cuts: bool = True):
        self.config, self.w, self.cuts = config, tensors, cuts

    def think(self, batch, high, low):
        c, x = self.config, self.embedded(batch)
        with torch.set_grad_enabled(not self.cuts):
            for cycle in range(c.h_cycles):
                is_last = cycle == c.h_cycles - 1
                if is_last and c.gradient == "last_cycle":
                    break
                for step in range(c.l_cycles):
                    if not (is_last and step == c.l_cycles - 1):
                        low = self.net("blocks", low + (high + x))
                if not is_last:
                    high = self.net(self.upper, high + low)
        for _ in range(c.l_cycles if c.gradient == "last_cycle" else 1):
            low = self.net("blocks", low + (high + x))
        high = self.net(self.upper, high + low)
        q = high[:, 0] @ self.w["halt.weight"] + self.w["halt.bias"]
        return high, q, low

    @property
    def upper(self) -> str:
        return "high_blocks" if self.config.networks == 2 else "blocks"

    def embedded(self, batch):
        c = self.config
        x = self.w["embedding.weight"][batch["tokens"].long()]
        if c.prefix is not None:
            rows = self.w["prefix.weight"][batch["identifier"].long()]
            rows = F.pad(rows, (0, c.prefix.positions * c.embed - rows.shape[1]))
            x = torch.cat([rows.reshape(len(x), -1, c.embed), x], dim=1)
        if c.learned is None:
            return math.sqrt(c.embed) * x
        return math.sqrt(c.embed) * math.sqrt(0.5) * (x + self.w["positions.weight"][: x.shape[1]])

    def net(self, name, x):
        for layer in range(self.config.layers):

            def weight(part, name=name, layer=layer):
                return self.w[f"{name}.{part}.weight"][layer]

            if self.config.mixing is None:
                mixed = self.attention(weight, x)
            else:
                mixed = self.mlp(weight, "mixing", x.transpose(1, 2)).transpose(1, 2)
            x = self.rms(x + mixed)
            x = self.rms(x + self.mlp(weight, "mlp", x))
        return x

    def rms(self, x):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.eps)

    def mlp(self, weight, name, x):
        gate, up = x @ weight(f"{name}.gate"), x @ weight(f"{name}.up")
        if self.config.gate == "swiglu":
            return (F.silu(gate) * up) @ weight(f"{name}.down")
        return (torch.sigmoid(gate) * self.rms(gate * up)) @ weight(f"{name}.down")

    def attention(self, weight, x):
        q, k, v = (
            torch.einsum("bse,ehd->bhsd", x, weight(f"mixing.{one}"))
            for one in ("query", "key", "value")
        )
        if self.config.theta is not None:
            q, k = self.rotated(q), self.rotated(k)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        mixed = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]), dim=-1) @ v
        return torch.einsum("bhsd,hde->bse", mixed, weight("mixing.output"))

    def rotated(self, x):
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[2])[:, None] * self.config.theta ** (
            -torch.arange(half, dtype=torch.float64) / half
        )
        a, b = x[..., :half], x[..., half:]
        sin, cos = torch.sin(angle), torch.cos(angle)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def restated(config: Config, model, batch, state, *, cuts: bool = True):
    """Logits, q, states, loss and gradients of one pass in float64."""
    w = {
        name: torch.tensor(np.asarray(x, np.float64), requires_grad=not name.startswith("start"))
        for name, x in named(eqx.filter(model, eqx.is_array))
    }
    columns = {name: torch.tensor(np.asarray(x)) for name, x in batch.items()}
    high, low = (torch.tensor(np.asarray(x, np.float64)) for x in state)
    high, q, low = Restated(config, w, cuts=cuts).think(columns, high, low)
    logits = high[:, config.prefixed :] @ w["head.weight"].T
    s = torch.where(logits < 0, 1 / (1 - logits.clamp(max=0)), logits.clamp(min=0) + 1)
    p = (s / s.sum(-1, keepdim=True)).gather(-1, columns["targets"].long()[..., None])[..., 0]
    weight = columns["weight"].double()
    lm = ((-p.log() * weight).sum(1) / weight.sum(1)).sum()
    right = ((logits.argmax(-1) == columns["targets"]) | (weight == 0)).all(1).double()
    loss = lm + 0.5 * F.binary_cross_entropy_with_logits(q[:, 0], right, reduction="sum")
    loss.backward()
    gradient = {
        name: np.zeros(x.shape) if x.grad is None else x.grad.numpy() for name, x in w.items()
    }
    numbers = (logits, q, high, low, loss)
    return tuple(x.detach().numpy() for x in numbers), gradient


@eqx.filter_jit
def ours(model, batch, state):
    def total(model):
        rows = {
            "state": state,
            "steps": jnp.zeros(len(state.high), jnp.int32),
            "halted": jnp.zeros(len(state.high), bool),
            "data": batch,
            "number": jnp.arange(len(state.high), dtype=jnp.int32),
        }
        given: dict[str, Any] = dict(key=None, helpers={}, step=jnp.int32(0), steps=1)
        pool = jax.tree.map(lambda x: x[:, None], rows)
        tally, carry = Objective()(model, batch, carry=Carry(pool), **given)
        return tally.total, jax.tree.map(lambda x: x[:, 0], carry.rows["state"])

    (loss, state), gradient = eqx.filter_value_and_grad(total, has_aux=True)(model)
    return loss, state, gradient


QUICK = ("TRM", "HRM")
TIERED = [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in EACH]


@pytest.mark.parametrize("name", TIERED)
def test_a_pass_and_its_gradient_equal_the_equations_in_pytorch(name):
    config, batch = EACH[name], puzzles()
    unroll = 2 if name == "TRM" else 1  # without loops, or with them
    model = arrange(tiny.made(config), remat="saved", unroll=unroll)
    # A state at which gradients are known to 5e-6 in float32; at others the passes make up to 1e-4
    # of its rounding, which differs between processors.
    rng = np.random.default_rng(16)
    shape = model.fresh(batch).high.shape
    state = recursive.Latents(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in "hl"))
    (logits, q, high, low, loss), expected = restated(config, model, batch, state)
    thought = eqx.filter_jit(lambda model: model.think(batch, state))(model)
    found_loss, after, gradient = ours(model, batch, state)
    found = dict(named(eqx.filter(gradient, eqx.is_array)))
    assert tiny.apart(thought.hidden @ model.head.weight.T, logits) < 1e-5
    assert tiny.apart((thought.q, *after), (q, high, low)) < 1e-5
    assert abs(float(found_loss) - loss) < 1e-5 * loss
    assert tiny.apart(found, {one: expected[one] for one in found}) < 1e-5
    assert not found["start.high"].any() and not found["start.low"].any()
    # Nothing is cut in vain: all that was computed has another gradient.
    _, whole = restated(config, model, batch, state, cuts=False)
    names = ["embedding.weight", "blocks.mlp.down.weight"]
    assert all(tiny.apart(found[one], whole[one]) > 1e-2 for one in names)


@pytest.mark.long
def test_all_passes_at_once_are_the_passes_one_after_another_and_the_refinement_comes_last():
    config, batch = dataclasses.replace(TRM, refinement=2), puzzles()
    model = tiny.made(config)

    @eqx.filter_jit
    def after(model):
        state = model.fresh(batch)
        for _ in range(config.passes - 1):
            state = model.think(batch, state).state
        plain, refined = (model.think(batch, state, refines=r) for r in (False, True))
        return plain.hidden, refined.hidden, model(batch)[0]

    plain, refined, whole = after(model)
    assert tiny.apart(refined, whole) < 1e-5
    assert tiny.apart(plain, whole) > 1e-2


@pytest.mark.long
def test_a_row_of_an_mlp_over_positions_may_be_shorter_and_a_prefix_is_of_its_identifier():
    model, batch = tiny.made(MLP_TRM), puzzles(length=7)
    hidden = eqx.filter_jit(lambda batch: model(batch)[0])
    assert hidden(batch).shape == (4, 7, 16)
    others = hidden(batch | {"identifier": jnp.asarray([0, 2, 2, 0], jnp.int32)})
    moved = np.asarray(jnp.any(others != hidden(batch), axis=(1, 2)))
    assert moved.tolist() == [False, True, False, False]


def test_q_begins_at_minus_five_for_every_row_and_initial_states_are_fixed():
    config = dataclasses.replace(TRM, layers=1, embed=64)
    model, batch = eqx.filter_jit(config.init)(jax.random.key(0)), puzzles()
    q = eqx.filter_jit(lambda model: model.think(batch, model.fresh(batch)).q)(model)
    assert np.array_equal(q, np.full((4, 2), -5.0))
    assert model.prefix is not None and not model.prefix.weight.any()
    for state in model.fresh(batch):
        assert np.array_equal(state, np.broadcast_to(state[0, 0], state.shape))
        assert float(jnp.std(state)) == pytest.approx(1, abs=0.3)
    assert model.start.fixed == ("high", "low")


# Generation

TEXT = dataclasses.replace(Config(**SMALL, heads=2), vocab=96)


@pytest.mark.long
@pytest.mark.parametrize("most", [recursive.CACHED_CALLS, 0])
@pytest.mark.parametrize("passes", [1, 3])
def test_generation_by_caches_and_by_computing_again_equals_whole_passes(most, passes, monkeypatch):
    monkeypatch.setattr(recursive, "CACHED_CALLS", most)
    model = tiny.made(dataclasses.replace(TEXT, passes=passes))
    batch = {
        name: x
        for name, x in puzzles(2, 6, 96).items()
        if name in ("tokens", "position", "document")
    }
    whole = eqx.filter_jit(lambda batch: model(batch)[0])(batch)
    step = eqx.filter_jit(lambda batch, cache: model(batch, cache)[::2])
    cache, found = KVCache.empty(2, 8), []
    for part in (slice(0, 4), slice(4, 5), slice(5, 6)):
        hidden, cache = step({name: x[:, part] for name, x in batch.items()}, cache)
        found.append(hidden)
    assert tiny.apart(jnp.concatenate(found, axis=1), whole) < 1e-5
    assert model.is_cached == (most > 0)
    (_, _), (title, line) = model.facts()
    how = "a KV cache for each" if most else "every token recomputes all of them"
    calls = f"6 network calls × {passes} passes: {how} (at most {most} are cached)"
    assert (title, line) == ("generation", calls)


# Detectors of the future


def reached(config: Config) -> np.ndarray:
    """Whether changing one token moves the hidden state of another: [token changed, state]."""
    model, batch = tiny.made(config), puzzles(1, 6, config.vocab)
    rows = {name: jnp.repeat(x, 7, axis=0) for name, x in batch.items()}
    changed = rows["tokens"].at[jnp.arange(6), jnp.arange(6)].add(1) % config.vocab
    hidden = eqx.filter_jit(lambda batch: model(batch)[0])
    moved = jnp.any(hidden(rows) != hidden(rows | {"tokens": changed}), axis=-1)
    return np.asarray(moved)[:6]


def test_no_output_is_moved_by_a_later_token_in_text_mode_and_all_are_in_the_original_form():
    assert np.array_equal(reached(TEXT), np.triu(np.ones((6, 6), bool)))
    original = dataclasses.replace(TEXT, bidirectional=True)
    assert reached(original).all()


def loss_on_independent_tokens(config: Config) -> float:
    """Loss over ln V, on next tokens that nothing predicts, after training on such tokens."""
    config = dataclasses.replace(config, vocab=16, passes=1, embed=32)
    model = config.init(jax.random.key(0))
    weights, static = eqx.partition(model, eqx.is_array)
    frame = puzzles(16, 12, 16)

    def loss(weights, key):
        tokens = jax.random.randint(key, (16, 13), 0, 16, jnp.int32)
        batch = frame | {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        batch |= {"weight": jnp.ones((16, 12))}
        return tiny.loss(eqx.combine(weights, static), batch)

    return tiny.loss_after(loss, weights, rate=5e-3, steps=150) / math.log(16)


@pytest.mark.long
def test_independent_tokens_teach_text_mode_nothing():
    assert loss_on_independent_tokens(TEXT) > 0.98


@pytest.mark.long
def test_independent_tokens_are_copied_by_the_original_bidirectional_form():
    share = loss_on_independent_tokens(dataclasses.replace(TEXT, bidirectional=True))
    print(f"bidirectional: {share:.4f} of ln V")
    assert share < 0.6


# FLOPs


@pytest.mark.parametrize("name", ["TRM", "TRM with an MLP over positions", "HRM"])
def test_flops_are_those_of_one_pass_with_its_cut_gradient_counted_by_hand(name):
    config = dataclasses.replace(EACH[name], h_cycles=3, l_cycles=4)
    batch = puzzles()
    rows, length, width = 4, 9, config.embed
    positions = length + config.prefixed
    tokens = rows * positions
    call = 2 * tokens * 3 * width * config.mlp  # the MLP: gate, up and down
    if config.mixing is not None:
        call += 2 * rows * width * 3 * positions * config.mixing.mlp
    else:
        call += 2 * tokens * 4 * width**2  # query, key, value and output, of as many heads
        call += 2 * 2 * rows * width * positions**2  # scores and mixed values, to both sides
    call *= config.layers
    calls = config.h_cycles * (config.l_cycles + 1)
    # A matmul with its gradient is three: of the last cycle, or of its last two calls.
    trained = config.l_cycles + 1 if config.gradient == "last_cycle" else 2
    head = 2 * rows * length * width * config.vocab  # with its gradient, and once for the answers
    q = 2 * rows * width * 2
    expected = (calls + 2 * trained) * call + (3 + 1) * head + 3 * q

    def total(model, batch):
        objective = Objective()
        given: dict[str, Any] = dict(key=None, helpers={}, step=jnp.int32(0), steps=1)
        return objective(model, batch, carry=objective.start(model, batch), **given)[0].total

    model = eqx.filter_eval_shape(config.init, jax.random.key(0))
    assert training_flops(total, model, batch) == expected


# Rounding


@pytest.mark.long
def test_a_deep_model_on_a_mesh_drifts_as_far_as_rounding_that_steps_too_long_amplify():
    config = dataclasses.replace(Config.tiny(), layers=2, l_cycles=3, eps=1e-3)
    model, batches = tiny.made(config), ten_batches()
    rng = np.random.default_rng(0)
    other = jax.tree.map(
        lambda x: x * (1 + 1e-7 * jnp.asarray(rng.normal(size=x.shape), x.dtype)), model
    )

    def losses(model, rate, batches=batches) -> np.ndarray:
        return np.asarray(trained(model, batches, jnp.float32(rate))[0][0])

    def drifts(rate) -> tuple[float, float]:
        """Of ten losses with weights that are 1e-7 apart, and of the same weights on a mesh."""
        alone, near = losses(model, rate), losses(other, rate)
        with tiny.on((2, 2, 2)) as mesh:
            placed, _ = tiny.placed(model, {}, mesh)
            rows = NamedSharding(mesh, P(None, ("data", "fsdp")))
            split = losses(placed, rate, jax.device_put(batches, rows))
        return np.abs(near / alone - 1).max(), np.abs(split / alone - 1).max()

    # The largest eigenvalue λ of the curvature is 109 (21 with one layer), and steps above 2 / λ
    # amplify all that is apart: ten of 0.1 by 1e5, ten of 0.01 by 10.
    near, split = drifts(0.1)
    assert near > 1e-3 and 0.1 < split / near < 10
    assert max(drifts(0.01)) < 1e-4


# Refusals


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("networks", 3, "is 3; it must be 1 or 2"),
        ("heads", 3, "is 3; it must divide embed (16)"),
        ("heads", 16, "is 16, each of 1; rotary positions need an even size"),
        ("kv_heads", 3, "is 3; it must divide heads (2)"),
        ("passes", 0, "is 0; it must be 1 or more"),
        ("theta", 0.5, "is 0.5; it must be above 1"),
        ("refinement", -1, "is -1; it is a count, 0 or more"),
        ("eps", 0.0, "is 0.0; it must be above 0"),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_key(field, value, what):
    with pytest.raises(UserError) as error:
        read(Config, tree(TRM) | {field: value})
    assert str(error.value) == f"1 problem in the recipe:\n  {field}  {what}"


def test_attention_without_heads_and_a_table_wider_than_its_prefix_are_refused():
    with pytest.raises(ValueError, match="heads is required by attention; mixing: {length: .., ml"):
        Config(**SMALL)
    with pytest.raises(ValueError, match="prefix.width is 40; 2 positions of 16 hold up to 32"):
        dataclasses.replace(TRM, prefix=Prefix(positions=2, identifiers=1, width=40))
    with pytest.raises(ValueError, match="identifiers is 0; it must be 1 or more"):
        Prefix(positions=1, identifiers=0)
    with pytest.raises(ValueError, match="length is 0; it must be 1 or more"):
        PositionMixing(length=0, mlp=4)
