"""Reservoir models: what is fixed stays as it was asked for, whatever is around it."""

import dataclasses
import json
from io import StringIO
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import windlass
from tests import tiny
from tests.models.test_families import (
    PROMPTS,
    generated,
    loss_on_independent_tokens,
    moved,
    turns,
)
from windlass import dynamics
from windlass.checkpoint.fingerprint import measure, named
from windlass.cli.commands import run as windlass_of
from windlass.cli.evaluation import diagnosed
from windlass.config import read, tree
from windlass.devices.axes import annotate
from windlass.errors import UserError
from windlass.evaluation.finished_run import open_on_cpu
from windlass.evaluation.published_model import open_model
from windlass.models import echo_state, reservoir
from windlass.models.reservoir import NVAR
from windlass.networks import reservoir as reservoirs
from windlass.networks.reservoir import LeakyReservoir, Reservoir, each
from windlass.processes.signals import Signals
from windlass.program.abstract import abstract_model
from windlass.residuals import Architecture
from windlass.starting.describe import describe
from windlass.telemetry.console import ConsoleReport
from windlass.training.train import train

LEAKY = Reservoir(size=24, radius=0.8, leak=0.7, density=0.5, input_scale=0.5)
WINDOW = Reservoir(size=16, window=3, decay=0.8, density=0.7, activation="relu")
PLAIN = reservoir.Config(
    vocab=96, embed=16, layers=1, reservoirs=(LEAKY,), readout=12, positions=64, seed=3
)
VARIANTS = {
    "leaky": PLAIN,
    "windowed": dataclasses.replace(PLAIN, reservoirs=(WINDOW,)),
    "hybrid": dataclasses.replace(PLAIN, variant="hybrid"),
    "nvar": dataclasses.replace(PLAIN, reservoirs=(), nvar=NVAR(delays=3, projected=2)),
    "chained": echo_state.Config.tiny(),
}
# Of both families one is among the quick tests.
TIERED = [
    v if v in ("leaky", "chained") else pytest.param(v, marks=pytest.mark.long) for v in VARIANTS
]
RADII = {128: 1.07, 192: 1.02, 384: 1.05}  # of matrices that Xavier initialised again


def fixed(model) -> dict[str, jax.Array]:
    """Arrays that are declared fixed, by path."""
    arrays = eqx.filter(model, eqx.is_array)
    return named(annotate(arrays, lambda x, about: x if about.is_fixed else None))


def drawn(config) -> dict[str, jax.Array]:
    """What is fixed in a model that was built whole."""
    return jax.jit(lambda key: fixed(config.init(key)))(jax.random.key(77))


def check_radii(model) -> None:
    """Every recurrence has the spectral radius that was asked for."""
    for name, one in each(model):
        if isinstance(one, LeakyReservoir):
            measured = dynamics.spectral_radius(np.asarray(one.recurrent))
            assert one.about.radius is not None
            assert abs(measured - one.about.radius) < 1e-3, f"{name}: {measured:.3f}"


# The whole model


BOTH = dataclasses.replace(PLAIN, vocab=257, reservoirs=(LEAKY, WINDOW))
RECIPE = {
    "model": {"family": "reservoir", **tree(BOTH)},
    "data": {"source": {"kind": "stories", "count": 60}, "length": 48},
    "optim": {"kind": "adamw", "learning_rate": 1e-2, "weight_decay": 0.5},
    "train": {"steps": 2, "batch": 8, "ema": 0.9, "seed": 9},
    "device": {"kind": "cpu", "count": 1},
}


@pytest.fixture(scope="module")
def built():
    return eqx.filter_jit(BOTH.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    """A run of both kinds of reservoirs, and what it printed."""
    run = tmp_path_factory.mktemp("reservoir") / "run"
    console = Console(record=True, width=200, file=StringIO())
    with ConsoleReport(console) as report:
        train(RECIPE, [f"run.dir={run}"], report=report)
    return run, console.export_text()


@pytest.fixture(scope="module")
def stored(trained):
    source = open_on_cpu(trained[0], weights="last", step=None)
    with source.scope():
        return source.stored_model()[1]


def test_radius_and_density_of_every_reservoir_are_as_asked_in_the_whole_model(built):
    check_radii(built)
    (_, leaky), (_, window) = each(built)
    assert isinstance(leaky, LeakyReservoir)
    assert list(built.facts()) == [
        (
            "reservoir",
            "blocks.0.reservoirs.0: 24 units, spectral radius 0.8000 (asked 0.8), "
            f"density {(leaky.recurrent != 0).mean():.4f} (asked 0.5)",
        ),
        (
            "reservoir",
            "blocks.0.reservoirs.1: 16 units, "
            f"density {(window.inputs != 0).mean():.4f} (asked 0.7)",
        ),
    ]


@pytest.mark.long
def test_training_prints_what_is_measured_and_leaves_the_bits_that_the_seed_gives(
    built, trained, stored
):
    for title, fact in built.facts():
        assert f"{title}    {fact}" in trained[1]
    fixed_count = sum(x.size for x in fixed(built).values())
    assert f"{fixed_count:,} fixed" in trained[1]
    assert measure(fixed(stored)) == measure(fixed(built))
    assert len(fixed(stored)) == 3
    check_radii(stored)


@pytest.mark.long
def test_an_export_is_read_back_with_the_same_bits_and_radii(trained, stored, tmp_path):
    folder = windlass.export(trained[0], tmp_path / "it").folder
    about = json.loads((folder / "config.json").read_text())
    assert about["model_type"] == "windlass-reservoir"
    opened = open_model(str(folder), ["device.kind=cpu", "device.count=1"])
    with opened.scope():
        model = opened.model()
    check_radii(model)
    assert measure(fixed(model)) == measure(fixed(stored))
    ours, theirs = (named(eqx.filter(one, eqx.is_array)) for one in (stored, model))
    assert measure(ours) == measure(theirs)


def test_the_check_of_radii_fails_where_a_whole_model_is_initialised_again():
    sections = tuple(Reservoir(size=size, radius=0.7, density=0.2) for size in RADII)
    config = dataclasses.replace(PLAIN, embed=8, readout=8, reservoirs=sections)
    model = eqx.filter_jit(config.init)(jax.random.key(0))
    check_radii(model)
    rng = np.random.default_rng(0)

    def xavier(x):
        if x.ndim < 2:
            return x
        bound = (6 / (x.shape[-1] + x.shape[-2])) ** 0.5
        return jnp.asarray(rng.uniform(-bound, bound, x.shape), jnp.float32)

    again = jax.tree.map(lambda x: xavier(x) if eqx.is_array(x) else x, model)
    with pytest.raises(AssertionError, match="reservoirs.0: 1.0"):
        check_radii(again)
    for (_, one), expected in zip(each(again), RADII.values(), strict=True):
        assert isinstance(one, LeakyReservoir)
        found = dynamics.spectral_radius(np.asarray(one.recurrent))
        print(f"{one.about.size} units: {found:.2f} in place of 0.7")
        assert found == pytest.approx(expected, abs=0.06)


def test_layers_reservoirs_and_seeds_have_matrices_of_their_own():
    two = dataclasses.replace(PLAIN, layers=2, reservoirs=(LEAKY, LEAKY))

    first, other = drawn(two), drawn(dataclasses.replace(two, seed=4))
    matrices = [np.asarray(x) for path, x in (*first.items(), *other.items()) if "recur" in path]
    assert len({layer.tobytes() for both in matrices for layer in both}) == 8


def test_a_plan_computes_no_eigenvalues(monkeypatch):
    def refuse(matrix):
        raise AssertionError("eigenvalues are computed")

    monkeypatch.setattr(reservoirs, "spectral_radius", refuse)
    model = abstract_model(Architecture(tiny.config("reservoir")), ())
    assert model.blocks.kinds[0].reservoirs[0].recurrent.shape == (2, 24, 24)


# Every variant


@pytest.mark.parametrize("variant", TIERED)
def test_a_token_moves_the_states_behind_it_as_far_as_the_variant_remembers(variant):
    document, at = np.array([0] * 4 + [1] * 5 + [-1] * 2), np.arange(11)
    same = document[:, None] == document[None, :]
    reached = moved(tiny.made(VARIANTS[variant]))
    back = at[None, :] - at[:, None]
    assert not reached[~same | (back < 0)].any()
    window = 3 if variant in ("windowed", "nvar") else 11
    expected = same & (back >= 0) & (back < window) & (document >= 0)
    assert np.array_equal(reached & (document >= 0), expected)


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_variant_learns_anything_of_independent_tokens(variant):
    share = loss_on_independent_tokens(VARIANTS[variant])
    print(f"{variant}: {share:.4f} of ln V")
    assert share >= 0.98


@pytest.mark.parametrize("variant", TIERED)
def test_prefill_and_decode_equal_a_whole_pass_and_packed_documents_are_alone(variant):
    model, texts = tiny.made(VARIANTS[variant]), tiny.documents(96, [13] * 4)
    hidden = eqx.filter_jit(lambda batch: model(batch)[0])
    whole = hidden(tiny.packed([[text] for text in texts], 24))
    for row, length, found in zip(whole, PROMPTS, generated(model, turns(texts)), strict=True):
        np.testing.assert_allclose(found, row[: 4 + length], atol=1e-5)
    together = hidden(tiny.packed([[texts[0], texts[1]], *([text] for text in texts[1:])], 24))
    np.testing.assert_allclose(together[0, 12:24], whole[1, :12], atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_of_a_variant_is_the_same_on_a_mesh_of_all_three_axes(variant):
    config, batch = VARIANTS[variant], tiny.rows(96)
    loss = eqx.filter_jit(eqx.filter_value_and_grad(tiny.loss))
    alone, gradient = loss(tiny.made(config), batch)
    with tiny.on((2, 2, 2)) as mesh:
        value, parts = loss(*tiny.placed(tiny.made(config), batch, mesh))
    assert abs(float(value) - float(alone)) < 1e-5
    assert tiny.apart(parts, gradient) < 1e-5


# Refusals


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("readout", 0, "is 0; it must be 1 or more"),
        ("positions", 0, "is 0; it must be 1 or more"),
        ("dropout", 1.0, "is 1.0; it is a share, 0 or more and below 1"),
        ("seed", -1, "is -1; it must be 0 or more"),
        ("variant", "chained", 'is "chained"; it must be block or hybrid'),
        ("reservoirs", [], "is empty, and nvar is null: one of them must be there"),
        ("nvar", {"delays": 0, "projected": 1}, "is 0; it must be 1 or more"),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_key(field, value, what):
    with pytest.raises(UserError) as refusal:
        read(reservoir.Config, tree(PLAIN) | {field: value})
    (line,) = str(refusal.value).splitlines()[1:]
    assert line.split(maxsplit=1)[0].startswith(field) and line.split(maxsplit=1)[1] == what


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("inputs", 7, "is 7; sinusoidal positions need an even number"),
        ("reservoirs", [], "is empty; there must be one or more"),
    ],
)
def test_an_echo_state_network_that_cannot_be_is_refused_by_key(field, value, what):
    with pytest.raises(UserError) as refusal:
        read(echo_state.Config, tree(echo_state.Config.tiny()) | {field: value})
    assert str(refusal.value) == f"1 problem in the recipe:\n  {field}  {what}"


def test_sequences_that_are_longer_than_there_are_positions_are_refused():
    with pytest.raises(UserError) as refusal:
        describe(RECIPE, ["data.length=80"])
    assert str(refusal.value) == (
        "1 problem in the recipe and the command line:\n"
        "  data.length  is 80; the model has 64 positions: 64 or less would do"
    )


# Diagnosis


def test_a_diagnosis_is_a_table_and_a_plot(built):
    found = built.diagnose()
    leaky, window = found.rows
    assert leaky["part"] == "blocks.0.reservoirs.0" and leaky["asked_radius"] == 0.8
    assert abs(leaky["radius"] - 0.8) < 1e-3 and leaky["forgets_its_start"] is True
    assert (window["radius"], window["echo_ratio"]) == (None, 0.0)
    # A window of three inputs remembers the two before the own one.
    assert [delay for delay, _ in found.curves["blocks.0.reservoirs.1"]] == [1, 2]
    curve = found.curves["blocks.0.reservoirs.0"]
    assert sum(x for _, x in curve) == pytest.approx(leaky["memory_capacity"])
    assert curve[0][0] == 1 and curve[0][1] == pytest.approx(1, abs=1e-3)

    console = Console(record=True, width=160, file=StringIO())
    for line in diagnosed(found, 80):
        console.print(line)
    shown = console.export_text()
    assert "memory capacity" in shown and f"{leaky['memory_capacity']:.4f}" in shown
    assert "memory: squared correlation of a reconstruction, by delay" in shown
    assert any("\u2800" < letter <= "\u28ff" for letter in shown)


@pytest.mark.long
def test_the_diagnosis_of_a_run_is_that_of_its_model(built, trained, capsys):
    assert windlass_of(["evaluate", str(trained[0]), "--diagnose", "--json"], Signals()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == built.diagnose().rows  # what is fixed is the same
    assert windlass_of(["evaluate", str(trained[0]), "--diagnose"], Signals()) == 0
    assert f"{found['rows'][0]['memory_capacity']:.4f}" in capsys.readouterr().out
