"""Profiles: operations of a real trace, by part of the model."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import windlass
from windlass.analysis import profile
from windlass.analysis.hlo import Text
from windlass.analysis.profile import OTHER, PARTS

STEPS, ROWS, WIDTH, LAYERS = 3, 64, 128, 4


def step(weights, x):
    """An update of weights by the gradient of a scan, with scopes as layers have them."""

    def block(x, weight):
        with jax.named_scope("mlp"):
            return jnp.tanh(x @ weight), None

    def loss(weights):
        y, _ = jax.lax.scan(jax.checkpoint(block), x, weights)
        with jax.named_scope("head"):
            return jnp.sum(y * y)

    gradient = jax.grad(loss)(weights)
    with jax.named_scope("optimizer"):
        return weights - 0.1 * gradient


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> tuple[profile.StepProfile, str]:
    """The profile of some steps, and the text of their program."""
    folder = tmp_path_factory.mktemp("trace")
    weights, x = jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH))
    program = jax.jit(step).lower(weights, x).compile()
    other = jax.jit(lambda x: jnp.cos(x @ x.T)).lower(x).compile()
    with jax.profiler.trace(folder):
        for _ in range(STEPS):
            weights = program(weights, x)
            other(x)
        jax.block_until_ready(weights)
    (trace,) = folder.glob("plugins/profile/*/*.xplane.pb")
    text = program.as_text() or ""
    return profile.read(trace, text, STEPS), text


def test_operations_have_their_part_and_their_pass(traced):
    found, _ = traced
    parts = {one.part for one in found.operations}
    assert {"mlp", "mlp, backward", "optimizer"} <= parts
    assert {part.partition(",")[0] for part in parts} <= {"mlp", "head", "optimizer", OTHER}
    assert found.by_part["mlp"] > 0 and sum(found.by_part.values()) == pytest.approx(1)


def test_numbers_are_of_one_step_and_of_this_program_alone(traced):
    found, text = traced
    matmuls = [one for one in found.operations if one.flops]
    # Forward, again for the gradient, and by both operands, in every layer.
    assert sum(one.flops for one in matmuls) == Text(text).flops
    assert sum(one.flops for one in matmuls) in (
        count * LAYERS * 2 * ROWS * WIDTH * WIDTH for count in (3, 4)
    )
    assert {one.calls for one in matmuls} == {LAYERS}
    assert all(one.what.startswith("matmul f32[") for one in matmuls)


def test_the_table_has_the_most_expensive_first_and_the_share_of_peak_where_it_is_known(traced):
    found, _ = traced
    title, *rows = profile.table(found, None)
    assert title.split("  ")[0] == "part" and title.endswith("share  calls")
    assert len(rows) == min(profile.TOP, len(found.operations))
    times = [float(re.findall(r"(\d+\.\d{3}) ", row)[0]) for row in rows]
    assert times == sorted(times, reverse=True)
    title, *rows = profile.table(found, 1e18)
    assert title.endswith("share  calls  of peak")
    assert [row.endswith("0%") for row in rows] == [one.flops > 0 for one in found.operations][:10]


def test_every_part_is_a_scope_of_the_package():
    files = Path(windlass.__file__).parent.rglob("*.py")
    text = "".join(file.read_text() for file in files)
    assert {*re.findall(r'named_scope\("(\w+)"', text)} == {*PARTS}
