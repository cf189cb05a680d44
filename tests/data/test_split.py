import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.prepared import tokenized
from windlass.data import Data, Tokenized
from windlass.data.checks import Checks
from windlass.data.mix import Mixture
from windlass.data.pack import Sequences
from windlass.data.show import facts
from windlass.data.split import split
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.sources import jsonl, text

SEEDS = ({}, {"seed": 0}, {"seed": 1}, {"seed": 2})


def test_every_document_is_in_one_split_and_the_shares_are_as_asked():
    parts = split(100_000, validation=0.05, test=0.1)
    joined = np.sort(np.concatenate(list(parts.values())))
    assert joined.tolist() == list(range(100_000))
    assert abs(len(parts["validation"]) - 5_000) < 250
    assert abs(len(parts["test"]) - 10_000) < 350


def test_documents_added_at_the_end_leave_the_others_in_their_split():
    before = split(1000, validation=0.1, test=0.1)
    after = split(1500, validation=0.1, test=0.1)
    for name, documents in before.items():
        assert after[name][after[name] < 1000].tolist() == documents.tolist()


def test_a_larger_share_of_validation_moves_documents_out_of_training_only():
    small, large = (split(1000, validation=share, test=0.1) for share in (0.1, 0.3))
    assert small["test"].tolist() == large["test"].tolist()
    assert set(small["validation"]) < set(large["validation"])


def test_another_seed_holds_out_others_and_seed_0_those_without_one():
    shares = dict(validation=0.1, test=0.1)
    plain, zero, one, two = (split(10_000, **shares, **seed) for seed in SEEDS)
    for name in ("validation", "test"):
        assert plain[name].tolist() == zero[name].tolist()
        for other in (one, two):
            # A tenth of those that one seed holds out is held out by another, by chance.
            shared = np.intersect1d(zero[name], other[name])
            assert 60 < len(shared) < 140
        shifted = np.intersect1d(one[name], two[name] + 1)
        assert len(shifted) < 140


def test_nothing_is_held_out_unless_asked():
    parts = split(1000, validation=0.0, test=0.0)
    assert [len(part) for part in parts.values()] == [1000, 0, 0]


SHAKESPEARE = "".join(f"Line {n} of a play.\n" + "\n" * (n % 7 == 0) for n in range(400))


def prepared_text(tmp_path: Path, **how: Any) -> tuple[Tokenized, str]:
    """A single text file as it is prepared, and what was said."""
    (tmp_path / "input.txt").write_text(SHAKESPEARE)
    console = Console(file=io.StringIO())
    kind = {"documents": how.pop("documents", "file")}
    how = {"validation": 0.1, "length": 32, "cache": str(tmp_path / "cache"), **how}
    data = Data(source=text.Source(path=str(tmp_path / "input.txt"), **kind), **how)
    made = tokenized(data, Tokenizer(kind="byte"), console=console)
    return made, console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def read(rows: Sequences | Mixture) -> str:
    batch = rows.batch(range(len(rows)))
    return "".join(map(chr, batch["targets"][batch["weight"] > 0].tolist()))


def test_the_end_of_a_single_document_is_held_out(tmp_path: Path):
    prepared, said = prepared_text(tmp_path, test=0.05)
    size = len(SHAKESPEARE) + 2
    assert said == (
        "the data is a single document, and its end is held out: "
        f"{round(size * 0.1):,} tokens for validation and {round(size * 0.05):,} tokens for test; "
        "data.source.documents=blank_line or line makes more documents of the same text, held out "
        "at random\n"
    )
    # The first token of each part is given, and nothing is in two of them.
    parts = [read(prepared.split(name)) for name in ("train", "validation", "test")]
    whole, place = SHAKESPEARE + chr(256), 0
    for part in parts:
        assert whole[place:].startswith(part)
        place += len(part) + 1
    assert place == len(whole) + 1
    other, _ = prepared_text(tmp_path, validation=0.2)
    assert len(other.split("validation")) > 1.9 * len(prepared.split("validation"))
    assert len(other.parts("train")[0].examples) == 1


def test_in_other_processes_the_parts_of_a_single_document_are_the_same(tmp_path: Path):
    rows = prepared_text(tmp_path, stride=16)[0].split("validation")
    again = pickle.loads(pickle.dumps(rows))
    for name, column in rows.batch(range(len(rows))).items():
        assert (again.batch(range(len(rows)))[name] == column).all()


def test_too_few_documents_are_refused_with_the_key_that_makes_more(tmp_path: Path):
    with pytest.raises(UserError) as refused:
        prepared_text(tmp_path, documents="blank_line", validation=1e-6)
    assert str(refused.value) == (
        "data.validation is 1e-06, and none of the 58 documents of data.source with text fell into "
        "that share; take a larger one, or data.source.documents=line makes more documents of the "
        "same text"
    )


def test_frequencies_are_those_of_what_is_trained_on(tmp_path: Path):
    """Neither what is held out nor what is longer than a row and dropped."""
    file = tmp_path / "rows.jsonl"
    texts = ["aab", "b" * 40, *["abab"] * 40]
    file.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    how: dict[str, Any] = {"length": 16, "longer": "drop", "validation": 0.3, "checks": Checks()}
    data = Data(source=jsonl.Source(path=str(file)), cache=str(tmp_path / "cache"), **how)
    prepared = tokenized(data, Tokenizer(kind="byte"))
    rows = prepared.split("train")
    batch = rows.batch(range(len(rows)))
    seen = np.bincount(batch["targets"][batch["weight"] > 0], minlength=257)
    assert (prepared.frequencies == seen / seen.sum()).all()
    lines = dict(facts(prepared))
    assert lines["examples"] == "42 read, 41 kept"
    assert lines["longest"].endswith("; 1 longer than data.length (16) are dropped")
