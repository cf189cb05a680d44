"""Every family that `transformers` has computes what it computes there."""

import dataclasses
import functools
import importlib

import equinox as eqx
import jax
import numpy as np
import pytest

from tests import tiny
from tests.models import reference
from windlass.export.names import from_tensors, to_tensors

FAMILIES = sorted({family for family, _ in reference.CASES})

cases = pytest.mark.parametrize(("name", "tied"), reference.CASES)


@functools.cache
def ours(name: str, tied: bool, turned: float = 1.0) -> reference.Answers:
    """The same from this package: all documents packed in rows, two of them with padding."""
    config = reference.config(name, tied)
    names = importlib.import_module(type(config).__module__).NAMES
    tensors = reference.tensors(config)
    config = dataclasses.replace(config, theta=turned * config.theta)
    model = from_tensors(tiny.abstract(config), names, tensors)
    a, b, c, d, e = texts = reference.texts(config.vocab)
    batch = tiny.packed([[a, b, d], [c], [e]], length=14)

    @eqx.filter_jit
    def run(model):
        return model.head.logits(model(batch)[0]), eqx.filter_grad(tiny.loss)(model, batch)

    logits, gradient = run(model)
    at = [(0, 0), (0, 8), (1, 0), (0, 11), (2, 0)]  # each document's row, and where it begins
    found = {
        str(number): np.asarray(logits)[row, first : first + len(texts[number]) - 1]
        for number, (row, first) in enumerate(at)
    }
    return reference.Answers(found, to_tensors(gradient, names))


def gaps(found: reference.Answers, expected: reference.Answers) -> tuple[float, float]:
    """The largest difference of a logit, and of a gradient relative to its array's largest."""
    logits = jax.tree.map(lambda a, b: np.abs(a - b).max(), found.logits, expected.logits)
    return max(logits.values()), tiny.apart(found.gradients, expected.gradients)


@pytest.mark.skipif(not reference.HAS_TORCH, reason="then the record is what there is")
@cases
def test_logits_and_gradients_are_those_of_transformers(name, tied):
    logits, gradients = gaps(ours(name, tied), reference.computed(name, tied))
    print(f"{name}, tied {tied}: logits differ by {logits:.1e}, gradients by {gradients:.1e}")
    assert logits < 1e-5
    assert gradients < 1e-5


@cases
def test_logits_and_gradients_are_those_recorded_of_transformers(name, tied):
    found = reference.sketched(ours(name, tied))
    logits, gradients = gaps(found, reference.recorded(name, tied))
    assert logits < 1e-5
    assert gradients < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rotary_base_that_is_off_by_a_hundredth_is_noticed(name):
    found = reference.sketched(ours(name, tied=True, turned=1.01))
    logits, gradients = gaps(found, reference.recorded(name, tied=True))
    print(f"{name}: logits differ by {logits:.1e}, gradients by {gradients:.1e}")
    assert logits > 1e-4
    assert gradients > 1e-4


def test_every_family_with_a_table_of_names_has_a_reference(family):
    has_names = hasattr(importlib.import_module(f"windlass.models.{family}"), "NAMES")
    assert has_names == (family in FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_field_of_the_compared_configs_has_its_default(name):
    config = tiny.config(name)
    for field in dataclasses.fields(config):
        assert getattr(config, field.name) != field.default, field.name
