"""The compile watch: what was compiled, from where, how often and why."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import DTypeLike
from rich.console import Console

from tests import tiny
from windlass.telemetry.compile_cache import Kept
from windlass.telemetry.compiles import Program, Recompiled, Watch
from windlass.telemetry.console import ConsoleReport
from windlass.telemetry.heartbeat import PATIENCE


class Watched:
    """A watch that is open, what it wrote and what was said."""

    def __init__(
        self,
        folder: Path,
        strict: bool = False,
        former: Sequence[Path] = (),
        patience: float = PATIENCE,
    ):
        self.file, self.out = folder / "compile.jsonl", io.StringIO()
        self.report = ConsoleReport(Console(file=self.out, width=1000), patience=patience)
        self.watch = Watch(self.report, strict=strict, cache=Kept(None), former=former)
        self.watch.open(self.file, 0)

    @property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    @property
    def ours(self) -> list[dict]:
        return [record for record in self.records if record["program"]]


@pytest.fixture
def watched(tmp_path):
    found = Watched(tmp_path)
    with found.watch, tiny.on((8, 1, 1)):
        yield found


def batch(
    rows: int = 8, dtype: DTypeLike = np.int32, split: str | None = "data"
) -> dict[str, jax.Array]:
    place = NamedSharding(jax.sharding.get_mesh(), PartitionSpec(split))
    return {"tokens": jax.device_put(np.arange(rows * 4, dtype=dtype).reshape(rows, 4), place)}


def double(scale, batch):
    return {"sum": batch["tokens"].sum().astype(scale.dtype) * scale, "tokens": 2 * batch["tokens"]}


def test_a_changed_shape_dtype_and_sharding_are_each_named_as_the_cause(watched):
    step = Program(double, "step")
    arguments = [batch(), batch(16), batch(dtype=np.int16), batch(split=None)]
    for number, argument in enumerate(arguments):
        found = step(np.int16(3), argument)
        expected = jax.jit(double)(np.int16(3), argument)
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), found, expected))
        watched.watch.took(number + 1)
    causes = [
        "first",
        "batch['tokens']: shape (8, 4) -> (16, 4)",
        "batch['tokens']: dtype int32 -> int16",
        "batch['tokens']: sharding P('data') -> P(None)",
    ]
    assert [record["cause"] for record in watched.ours] == causes
    said = [line for line in watched.out.getvalue().splitlines() if line.startswith("warning")]
    assert said == [
        f"warning: the step is compiled again after step {number}: {cause}"
        for number, cause in enumerate(causes[1:], start=1)
    ]


def test_a_record_says_what_was_compiled_when_and_from_where(watched):
    Program(double, "step")(np.int16(3), batch())
    (record,) = watched.ours
    assert (record["function"], record["inputs"], record["outputs"]) == ("double", 2, 2)
    assert record["step"] == 0 and record["cached"] is False and record["seconds"] > 0
    Program(double, "other")(np.int16(3), batch())
    assert watched.ours[1]["fingerprint"] == record["fingerprint"]
    Program(double, "other")(np.int32(3), batch())
    assert watched.ours[2]["fingerprint"] != record["fingerprint"]
    assert watched.ours[2]["cause"] == "another function of the same name"


def test_arrays_that_lie_alike_are_served_by_one_program(watched):
    step = Program(double, "step")
    (tokens,) = batch().values()
    shape = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=tokens.sharding)
    step.prepare(jax.ShapeDtypeStruct((), jnp.int16), {"tokens": shape})
    place = NamedSharding(jax.sharding.get_mesh(), PartitionSpec(("data", "fsdp"), None))
    for alike in (batch(), jax.device_put(batch(), place), jax.tree.map(np.asarray, batch())):
        assert step(jnp.int16(3), alike)["sum"] == 3 * sum(range(32))
    assert len(watched.ours) == 1, watched.ours


def test_arguments_that_come_and_go_are_named(watched):
    def either(a, b=None):
        return a if b is None else a + b

    program = Program(either, "step")
    program(jnp.ones(3))
    program(jnp.ones(3), jnp.ones(3))
    assert watched.ours[1]["cause"] == "b: absent -> float32 (3,)"


def test_many_changes_are_counted(watched):
    def first(many):
        return many[0]

    program = Program(first, "step")
    program([jnp.ones(3)] * 9)
    program([jnp.ones(4)] * 9)
    shown = "; ".join(f"many[{i}]: shape (3,) -> (4,)" for i in range(4))
    assert watched.ours[1]["cause"] == f"{shown} and 5 more"


def test_when_strict_a_program_is_not_compiled_again_and_its_arguments_are_whole(tmp_path):
    watched = Watched(tmp_path, strict=True)
    with watched.watch, tiny.on((8, 1, 1)):
        step = Program(double, "step", donate_argnums=1)
        step(np.int16(3), batch())
        step(np.int16(3), batch(16))  # before the first step nothing is said of it
        watched.watch.took(7)
        Program(double, "evaluation")(np.int16(3), batch())  # it is its first time
        given = batch(24)
        with pytest.raises(Recompiled) as refusal:
            step(np.int16(3), given)
        assert str(refusal.value) == (
            "the step is compiled again after step 7: batch['tokens']: shape (8, 4) -> (24, 4). "
            "train.strict ends the run there, saved; train.strict=false goes on with a warning, "
            "and every such compilation costs its time"
        )
        assert not given["tokens"].is_deleted() and len(watched.ours) == 3


def test_small_programs_are_noted_and_summed_up(watched):
    jnp.cbrt(np.ones((3, 5), np.float32))
    jnp.cbrt(np.ones((3, 6), np.float32))
    watched.watch.flush()
    found = [record for record in watched.records if record["function"] == "cbrt"]
    assert [record["cause"] for record in found] == ["first", "argument 0: f32[3,5] -> f32[3,6]"]
    for record in found:
        assert (record["program"], record["inputs"], record["outputs"]) == (None, 1, 1)
        assert record["cached"] is False and len(record["fingerprint"]) == 16
    seconds = sum(record["seconds"] for record in watched.records)
    count = len(watched.records)
    assert watched.watch.summary() == f"{count} small programs in {seconds:.1f} s (not kept)"


def test_a_small_program_that_is_compiled_at_every_step_is_warned_of_once(watched):
    for step in range(1, 6):
        watched.watch.took(step)
        jnp.cbrt(np.ones((4, 4 + step), np.float32))
        watched.watch.flush()
    assert watched.out.getvalue() == (
        "warning: cbrt is compiled over and over, at steps 1, 2, 3: "
        "argument 0: f32[4,5] -> f32[4,7]\n"
    )


def test_nothing_is_noted_when_no_watch_is_open(tmp_path):
    watched = Watched(tmp_path)
    with watched.watch:
        pass
    assert Program(double, "step")(np.int16(3), {"tokens": np.ones(3, np.int16)})["sum"] == 9
    assert not watched.file.exists() and Watch.current is None


def test_what_another_run_wrote_of_its_compilations_may_be_spoilt(tmp_path):
    spoilt, good = tmp_path / "spoilt.jsonl", tmp_path / "good.jsonl"
    spoilt.write_bytes(b"\0" * 64 + b"\n")
    good.write_text('{"program": "step", "cached": false, "seconds": 65.5}\n')
    assert Watched(tmp_path, former=[spoilt, good]).watch.last("step") == 65.5


def test_records_are_written_once_the_run_is_known_to_be_right(tmp_path):
    watch = Watch(ConsoleReport(Console(file=io.StringIO())), strict=False, cache=Kept(None))
    with watch:
        Program(double, "start")(np.int16(3), {"tokens": np.ones(3, np.int16)})
        assert not list(tmp_path.iterdir())
        watch.open(tmp_path / "compile.jsonl", 7)
        first = json.loads((tmp_path / "compile.jsonl").read_text().splitlines()[-1])
        assert first["program"] == "start" and first["step"] == 7


def slow(x):
    for i in range(30):
        x = jnp.sin(x @ x) + jnp.cumsum(jnp.sort(x, axis=i % 2), axis=0) * i
    return x


def test_a_long_compilation_shows_signs_of_life_and_how_long_it_took_before(tmp_path):
    former = tmp_path / "former.jsonl"
    seconds = [{"program": "step", "seconds": 65.2, "cached": False}]
    seconds.append({"program": "step", "seconds": 0.4, "cached": True})
    former.write_text("".join(json.dumps(record) + "\n" for record in seconds))
    files = [tmp_path / "absent.jsonl", former]
    watched = Watched(tmp_path, former=files, patience=0.01)
    with watched.report, watched.watch:
        Program(slow, "step").prepare(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    first, *_, last = watched.out.getvalue().splitlines()
    assert first == "compiling the step, 0:00; last time 1:05"
    assert last.startswith("compiling the step took ") and "cache" not in last
