"""Every family that `transformers` has computes what it computes there."""

import dataclasses
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

from tests import tiny
from tests.models import reference
from windlass.hub.names import to_tensors
from windlass.layers.rotary import READS
from windlass.models import granite

# Of each family as it is by default; `make proof` has the variants.
cases = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.long if "," in case else ()) for case in reference.CASES],
)
AT = [(0, 0), (0, 8), (1, 0), (0, 11), (2, 0)]  # each document's row, and where it begins


def packed(config) -> dict[str, jax.Array]:
    """All documents in rows, two of them with padding."""
    a, b, c, d, e = reference.texts(config.vocab)
    return tiny.packed([[a, b, d], [c], [e]], length=14)


def filled(case: str, config):
    """The model of a config, with the weights of a case."""
    tensors = reference.tensors(reference.config(case))
    return tiny.filled(tiny.abstract(config), names(case), tensors)


def names(case: str) -> dict[str, str]:
    return importlib.import_module(f"windlass.models.{reference.CASES[case][0]}").NAMES


def apart(logits, config) -> np.ndarray:
    """Those of the documents, one after the other."""
    texts = reference.texts(config.vocab)
    return np.concatenate(
        [
            np.asarray(logits)[row, first : first + len(text) - 1]
            for (row, first), text in zip(AT, texts, strict=True)
        ]
    )


@functools.cache
def ours(case: str) -> reference.Answers:
    """The same from this package."""
    config = reference.config(case)
    batch = packed(config)

    @eqx.filter_jit
    def run(model):
        return model.head.logits(model(batch)[0]), eqx.filter_grad(tiny.loss)(model, batch)

    logits, gradient = run(filled(case, config))
    return reference.Answers(apart(logits, config), to_tensors(gradient, names(case)))


def gaps(found: reference.Answers, expected: reference.Answers) -> tuple[float, float]:
    """The largest difference of a logit, and of a gradient relative to its array's largest."""
    logits = np.abs(found.logits - expected.logits).max()
    one, other = (jax.tree.map(without_rounding, x.gradients) for x in (found, expected))
    return logits, tiny.apart(one, other)


def without_rounding(gradient: np.ndarray) -> np.ndarray:
    """Zeros where there is nothing but rounding.

    Without RoPE a bias of keys shifts all scores of a query alike, and changes nothing.
    """
    return gradient if np.abs(gradient).max() > 1e-6 else np.zeros_like(gradient)


@cases
def test_logits_and_gradients_are_those_of_transformers(case):
    """Those it computes here, where it is; and always those that were recorded of it."""
    found = ours(case)
    compared = [(reference.sketched(found), reference.recorded(case))]
    if reference.HAS_TORCH:
        compared.append((found, reference.computed(case)))
    for one, other in compared:
        logits, gradients = gaps(one, other)
        print(f"{case}: logits differ by {logits:.1e}, gradients by {gradients:.1e}")
        assert logits < 1e-5
        assert gradients < 1e-5


def mutations() -> Iterator[tuple[str, str, Any]]:
    """Every family with one number of its attention a little wrong."""
    for family in reference.FAMILIES:
        config = tiny.config(family)
        # Where a part of a head is rotated, one pair of it depends on the base.
        yield family, "theta", config.theta * (1.05 if hasattr(config, "rotary_share") else 1.01)
        if hasattr(config, "scaling"):
            yield family, "scaling", dataclasses.replace(config.scaling, factor=4.2)
        if hasattr(config, "window"):
            yield family, "window", config.window + 1
    for family in ("qwen3_5", "qwen3_5_moe"):
        yield family, "rotary_share", 0.6
    yield "gemma", "local_theta", 1.01 * tiny.config("gemma").local_theta
    yield "gemma", "query_width", tiny.config("gemma").query_width + 1
    yield "gemma", "global_every", 3
    yield "gemma4", "rotary_share", 0.5
    for field in ("local_theta", "logit_cap"):
        yield "gemma4", field, 1.05 * getattr(tiny.config("gemma4"), field)
    yield "olmo3", "global_every", 3
    yield "phi3", "rotary_share", 0.8
    yield "smollm3", "no_rope_every", 3
    for name in granite.MULTIPLIERS:
        yield "granite", name, 1.01 * getattr(tiny.config("granite"), name)


@pytest.mark.parametrize(("name", "field", "value"), list(mutations()))
@pytest.mark.long
def test_a_number_that_is_a_little_off_is_noticed(name, field, value):
    wrong = dataclasses.replace(tiny.config(name), **{field: value})
    batch = packed(wrong)
    model = eqx.filter_jit(lambda model: model.head.logits(model(batch)[0]))
    found = apart(model(filled(name, wrong)), wrong)
    gap = np.abs(found - reference.recorded(name).logits).max()
    print(f"{name} with another {field}: logits differ by {gap:.1e}")
    assert gap > 1e-4


def test_every_family_with_a_table_of_names_has_a_reference(family):
    has_names = hasattr(importlib.import_module(f"windlass.models.{family}"), "NAMES")
    assert has_names == (family in reference.FAMILIES)


@pytest.mark.parametrize("name", reference.FAMILIES)
def test_no_field_of_the_compared_configs_has_its_default(name):
    config = tiny.config(name)
    for field in dataclasses.fields(config):
        assert getattr(config, field.name) != field.default, field.name
    if hasattr(config, "scaling"):
        scaling = config.scaling
        assert all(getattr(scaling, field) is not None for field in READS[scaling.kind])
