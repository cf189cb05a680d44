"""Perplexity by a sliding window, against the loop that one would write out."""

import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from tests import trained
from windlass import api
from windlass.data import Tokenized
from windlass.data.pack import Sequences
from windlass.evaluation.finished_run import open_run
from windlass.run_folder import folder as folders

LENGTH, STRIDE = 24, 10
KEYS = [f"data.length={LENGTH}", f"data.stride={STRIDE}", "data.longer=split"]


def windows(tokens: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Inputs and targets of each window, and how many of its targets an earlier one has had."""
    found, counted, last = [], 0, len(tokens) - 1
    for begin in range(0, last, STRIDE):
        end = min(begin + LENGTH, last)
        found.append((tokens[begin:end], tokens[begin + 1 : end + 1], counted - begin))
        counted = end
        if end == last:
            break
    return found


def test_a_token_counts_once_with_what_its_window_has_before_it(tmp_path_factory, monkeypatch):
    place = trained.workplace(tmp_path_factory)
    monkeypatch.chdir(place)
    (run,) = (place / "runs").iterdir()
    found = api.evaluate(run, KEYS)

    prepared = api.data(run / folders.RECIPE, KEYS)
    assert isinstance(prepared, Tokenized)
    corpus, rows = prepared.corpora[0], prepared.split("validation")
    assert isinstance(rows, Sequences)
    held = sorted({piece.document for number in range(len(rows)) for piece in rows.pieces(number)})
    parts = []
    for document in held:
        first, stop = corpus.offsets[document : document + 2].tolist()
        parts += windows(np.asarray(corpus.tokens[first:stop]))
    assert len(parts) > 2 * len(held) > 0  # documents are longer than a window

    opened = open_run(run)
    with opened.scope():
        model = opened.model()
        log_p = eqx.filter_jit(lambda model, batch: model.head.logits(model(batch)[0]))
        total, count = 0.0, 0
        for inputs, targets, skipped in parts:
            ahead = np.arange(LENGTH) < len(inputs)
            batch = {
                "tokens": np.pad(inputs, (0, LENGTH - len(inputs))),
                "position": np.where(ahead, np.arange(LENGTH), 0),
                "document": np.where(ahead, 0, -1),
            }
            batch = {name: jnp.asarray(x, jnp.int32)[None] for name, x in batch.items()}
            logits = np.asarray(log_p(model, batch), np.float64)[0, : len(inputs)]
            logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
            total -= logits[np.arange(len(targets)), targets][skipped:].sum()
            count += len(targets) - skipped
    assert rows.tokens == count
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
