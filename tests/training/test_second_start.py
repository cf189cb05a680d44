"""Two starts of one run, each a process of its own: the second finds every program compiled."""

import json
import signal

from tests.flags import quick
from tests.training.campaign import Program


def compilations(program: Program) -> list[dict]:
    lines = (program.run_dir / "compile.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_second_start_of_a_run_compiles_nothing_and_says_so(tmp_path, monkeypatch):
    # Kept where a user has it, and not where the other tests do.
    for name in ("COMPILATION_CACHE_DIR", "PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.delenv(f"JAX_{name}")
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    keys = ["train.evaluate_every=3", "checkpoint.every=3", "train.steps=60"]
    stopped = Program(tmp_path / "stopped", flags=quick())
    first = stopped.disturb(lambda program: program.step >= 4, signal.SIGTERM, *keys)
    before = compilations(stopped)
    assert before and not any(record["cached"] for record in before)
    kept = tmp_path / "cache" / "compiled"
    told = next(line for line in first.output.splitlines() if line.startswith("compiled "))
    assert told.startswith("compiled     2 programs in ") and str(kept) in told

    there = sorted(kept.glob("*-cache"))

    done = stopped.step
    second = stopped.disturb(lambda program: program.step >= done + 4, signal.SIGTERM, *keys)
    assert second.code == 128 + signal.SIGTERM, second.output
    after = compilations(stopped)[len(before) :]
    assert [record["function"] for record in after if not record["cached"]] == []
    assert {"step", "evaluation"} <= {record["program"] for record in after}
    assert f"compiled     nothing: {len(after)} programs from the cache ({kept}, " in second.output
    assert there and sorted(kept.glob("*-cache")) == there
    assert {r["fingerprint"] for r in after} <= {r["fingerprint"] for r in before}
