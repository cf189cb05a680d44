"""What plans say of memory and time, beside what compilers and a GPU say of the same steps.

    python benchmarks/plan_accuracy.py

plans every case of benchmarks/plan_cases.py and holds it against what was found of it, which is in
benchmarks/plan_accuracy.json; prints the tables and writes them to benchmarks/plan_accuracy.md.

    TPU_SKIP_MDS_QUERY=1 python benchmarks/plan_accuracy.py --compile v5e-8,v6e-1

finds out anew what the TPU compiler says of the cases of these slices, on an x86-64 host with
libtpu and no TPU.

    python benchmarks/plan_accuracy.py --compile h200

finds the memory of those steps of benchmarks/gpu.py of which only the peak of the process was
measured, with JAX's plugin for CUDA and no GPU. Their times, and the memory of the others, are
those of benchmarks/gpu.json. `--measure all` runs what does not fit the GPU that is here.

    TPU_SKIP_MDS_QUERY=1 python benchmarks/plan_accuracy.py --compile new --jobs 8 --limit 480

compiles the cases of which nothing is known yet, and stops after so many seconds with what it has;
`--measure new` runs those that do not fit the GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.plan_cases import (  # noqa: E402
    GPU,
    MEASURED,
    SAME,
    TOO_LARGE,
    TPU,
    Case,
    measured,
)

FILE, PAGE = HERE / "plan_accuracy.json", HERE / "plan_accuracy.md"
CASES = [*TPU, *GPU]
GIB, MIB = 2**30, 2**20
WARM, ROUNDS, STEPS = 3, 3, 6


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument(
        "--compile", metavar="TARGETS", help="ask their compiler: v5e-8,v6e-1, h200 or new"
    )
    asked.add_argument(
        "--measure", choices=["all", "new"], help="run the cases of the GPU here, or those unknown"
    )
    asked.add_argument("--jobs", type=int, default=1, help="compilations at a time")
    asked.add_argument("--limit", type=float, help="seconds after which compilations are stopped")
    asked.add_argument("--one", help=argparse.SUPPRESS)
    given = asked.parse_args()
    if given.one:
        how, number = given.one.split(":")
        find = {"compile": _compiled, "measure": _measured}[how]
        print(json.dumps(find(CASES[int(number)])))
    elif given.compile:
        wanted, found = given.compile.split(","), _stored()
        steps = _measured_steps()
        of_processes = [name for name, one in steps.items() if not one["is_of_step"]]
        chosen = [
            one
            for one in CASES
            if (one in TPU or one.name in of_processes)
            and (one.on in wanted or ("new" in wanted and one.name not in found))
        ]
        environ = {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        _find("compile", chosen, given.jobs, environ, given.limit)
    elif given.measure:
        found = {} if given.measure == "all" else _stored()
        chosen = [one for one in TOO_LARGE if one.name not in found]
        _find("measure", chosen, 1, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        compare()
        print(PAGE.read_text(encoding="utf-8"))


def known() -> dict[str, Any]:
    """What compilers and a GPU said of the cases, by their names."""
    stored = _stored()
    for name, one in _measured_steps().items():
        compiled = stored.get(name, {})
        by = f"{one['by']}; memory by {compiled['by']}" if compiled else one["by"]
        stored[name] = one | compiled | {"by": by}
    return stored


def _stored() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.is_file() else {}


def _measured_steps() -> dict[str, Any]:
    """Steps that benchmarks/gpu.py measured, by the names of their cases here, each at last.

    What makes the first weights takes more than a step of a small batch: `is_of_step` is False
    where only the peak of both is known. Beside a rival the batches are large.
    """
    steps = {}
    for sides in MEASURED.values():
        last = max(sides.values(), key=lambda side: side["date"])
        own = last.get("windlass", last)
        steps[measured(**last["case"]).name] = {
            "bytes": round(own.get("step_gib", own["peak_gib"]) * GIB),
            "is_of_step": "step_gib" in own or own is not last,
            "fits": True,
            "seconds": own["step_ms"] / 1e3,
            "by": f"{last['device']}, JAX {last['versions']['jax']}",
        }
    return steps


def _find(
    how: str, chosen: Sequence[Case], jobs: int, environ: dict[str, str], limit: float | None = None
) -> None:
    """Each case in a process of its own: the peak of a device's memory never falls.

    What is found is stored at once, so that nothing of it is lost after `limit` seconds.
    """
    began = time.monotonic()

    def one(case: Case) -> tuple[str, dict[str, Any] | None]:
        words = [sys.executable, __file__, "--one", f"{how}:{CASES.index(case)}"]
        left = None if limit is None else max(1.0, limit - (time.monotonic() - began))
        settings: dict[str, Any] = {"capture_output": True, "text": True, "timeout": left}
        try:
            done = subprocess.run(words, env=os.environ | environ, **settings)
        except subprocess.TimeoutExpired:
            print(f"{case.name}: not compiled in time", flush=True)
            return case.name, None
        if done.returncode:
            print(f"{case.name}: {done.stderr[-500:]}", flush=True)
            return case.name, None
        found = json.loads(done.stdout.splitlines()[-1])
        print(case.name, found, flush=True)
        return case.name, found

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(one, case) for case in chosen]):
            name, found = done.result()
            if found is not None:
                FILE.write_text(json.dumps(_stored() | {name: found}, indent=1) + "\n")


def _compiled(case: Case) -> dict[str, Any]:
    from windlass.planning import compiler, targets
    from windlass.starting import origin

    found = compiler.find(origin.load(case.recipe, []), targets.find(case.on))
    assert isinstance(found, compiler.CompilerReport), found.why
    if case in GPU:  # the rest was measured
        return {"bytes": found.peak_bytes, "by": found.compiler, "commit": _commit()}
    return {
        "bytes": found.peak_bytes,
        "state_bytes": found.argument_bytes,
        "fits": found.fits,
        "flops": found.flops,
        "moved_bytes": found.moved_bytes,
        "cycles": found.cycles,
        "by": found.compiler,
        "commit": _commit(),
    }


def _measured(case: Case) -> dict[str, Any]:
    import jax
    import numpy as np

    from windlass.program.built import Built
    from windlass.program.programs import Programs
    from windlass.starting.describe import describe

    described = describe(case.recipe, ["device=gpu"])
    by = f"{described.devices[0].device_kind}, JAX {jax.__version__}"
    with described.scope():
        programs = Programs(Built(described), 1000)
        step, random = programs.step(), np.random.default_rng(0)

        def column(name: str, x: jax.ShapeDtypeStruct) -> jax.Array:
            values = {
                "tokens": lambda: random.integers(0, described.run.model.vocab, x.shape),
                "targets": lambda: random.integers(0, described.run.model.vocab, x.shape),
                "position": lambda: np.broadcast_to(np.arange(x.shape[1]), x.shape),
            }
            made = values.get(name, lambda: np.ones(x.shape))()
            return jax.device_put(made.astype(x.dtype), x.sharding)

        try:
            batch = {name: column(name, x) for name, x in programs.abstract_batch().items()}
            state, frozen = programs.init(batch=batch)
            for _ in range(WARM):
                state, told = step(state, frozen, batch)
            jax.block_until_ready(state)
            took = []
            for _ in range(ROUNDS * STEPS):
                began = time.perf_counter()
                state, told = step(state, frozen, batch)
                told["loss"].block_until_ready()
                took.append(time.perf_counter() - began)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return {"fits": False, "said": str(error)[:200], "by": by, "commit": _commit()}
    peak = described.devices[0].memory_stats()["peak_bytes_in_use"]
    rounds = [median(took[i : i + STEPS]) for i in range(0, len(took), STEPS)]
    found = {"bytes": peak, "fits": True, "seconds": median(rounds)}
    return found | {"by": by, "commit": _commit()}


def compare() -> dict[str, Any]:
    """Write the page; gives how far plans are off, by table."""
    found = known()
    (tpu, of_tpu), (gpu, of_gpu), (states, of_states) = _tpu(found), _gpu(found), _states()
    ranks, of_ranks = _ranked(found)
    page = TEXT.format(jax=version("jax"), tables="\n\n".join([tpu, gpu, ranks, states]))
    PAGE.write_text(page, encoding="utf-8")
    return {"tpu": of_tpu, "gpu": of_gpu, "settings": of_ranks, "state": of_states}


def _planned(case: Case) -> Any:
    from windlass.planning import memory, targets, time, traced

    target = targets.find(case.on)
    found = traced.trace(traced.described(case.recipe, target), target)
    return found, memory.memory(found), time.by_table(found)


def _rows(
    cases: Sequence[Case], known: dict[str, Any]
) -> Iterator[tuple[Case, Any, Any, Any, dict]]:
    for case in cases:
        if (found := known.get(case.name)) is not None:
            yield case, *_planned(case), found


def _small(errors: Sequence[float]) -> str:
    """Of steps so small that what the runtime holds is a large share of them."""
    if not errors:
        return ""
    return f"{len(errors)} of less are {max(map(abs, errors)) / MIB:.0f} MiB off at most; "


def _verdict(memory: Any) -> str:
    return "fits" if memory.fits else "tight" if memory.total <= memory.limit else "no"


def _tpu(known: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    lines = [
        "| model | settings | slice | data × fsdp × tensor | rows | GiB planned | compiler | error "
        "| of | planned | compiler |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    errors, small, wrong, no, by, missing = [], [], [], 0, set(), 0
    for case, traced, memory, _, found in _rows(TPU, known):
        # Of what it refuses the compiler says roughly what it would take.
        is_known = found["state_bytes"] is not None
        error = memory.total / found["bytes"] - 1
        small += [memory.total - found["bytes"]] if found["bytes"] < GIB else []
        errors += [error] if is_known and found["bytes"] >= GIB else []
        no += not found["fits"]
        wrong += [case.name] if memory.fits and not found["fits"] else []
        missing += memory.fits is False and found["fits"]
        by.add(found["by"].partition(", for")[0])
        lines.append(
            f"| {case.model} | {case.settings} | {case.on} "
            f"| {' × '.join(map(str, traced.split.values()))} | {case.rows} × {case.length} "
            f"| {memory.total / GIB:.2f} | {'' if is_known else '> '}{found['bytes'] / GIB:.2f} "
            f"| {f'{error:+.1%}' if is_known else ''} | {memory.limit / GIB:.2f} "
            f"| {_verdict(memory)} | {'fits' if found['fits'] else 'no'} |"
        )
    sizes = [abs(error) for error in errors]
    said = (
        f"## Memory, against the TPU compiler\n\n{len(lines) - 2} steps, {no} of which do not fit; "
        f"of the {len(errors)} of 1 GiB or more that it compiles median error {median(sizes):.1%}, "
        f"worst {max(sizes):.1%}; {_small(small)}"
        f'{len(wrong)} false "fits"; {missing} that fit are called tight or no. '
        f"By {', '.join(sorted(by))}, without a TPU."
    )
    found = {"cases": len(lines) - 2, "do_not_fit": no, "false_fits": wrong}
    found |= {"median_error": median(sizes), "worst_error": max(sizes)}
    return "\n".join([said, "", *lines]), found


def _gpu(known: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    lines = [
        "| model | settings | rows | GiB planned | measured | error | ms planned | measured "
        "| error | planned | GPU |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    errors, small, times, by, named, wrong = [], [], [], set(), [], []
    for case, _, memory, taken, found in _rows(GPU, known):
        cells = ["", "", "", ""]
        if found["fits"]:
            error = memory.total / found["bytes"] - 1
            errors += [error] if found["bytes"] >= GIB else []
            small += [memory.total - found["bytes"]] if found["bytes"] < GIB else []
            times.append(taken.seconds / found["seconds"] - 1)
            cells = [f"{found['bytes'] / GIB:.2f}", f"{error:+.1%}"]
            cells += [f"{1e3 * found['seconds']:.1f}", f"{times[-1]:+.1%}"]
        else:
            wrong += [case.name] if memory.fits else []
            named.append(f"{case.model}: {max(memory.parts, key=lambda part: memory.parts[part])}")
        hardware, _, compiler = found["by"].partition("; memory by ")
        by.add(hardware)
        cells[0] += " (compiler)" if compiler else ""
        lines.append(
            f"| {case.model} | {case.settings} | {case.rows} × {case.length} "
            f"| {memory.total / GIB:.2f} | {cells[0]} | {cells[1]} | {1e3 * taken.seconds:.1f} "
            f"| {cells[2]} | {cells[3]} | {_verdict(memory)} "
            f"| {'fits' if found['fits'] else 'no'} |"
        )
    memories, seconds = ([abs(error) for error in of] for of in (errors, times))
    said = (
        f"## Memory and time, against a GPU\n\n{len(times)} steps that ran: memory median error "
        f"{median(memories):.1%}, worst {max(memories):.1%}; {_small(small)}"
        f"time median {median(seconds):.1%}, "
        f"worst {max(seconds):.1%}. {len(named)} ran out of memory; their largest parts by the "
        f"plan: {'; '.join(named)}. By {', '.join(sorted(by))}; `(compiler)`: the memory of the "
        "step by JAX's plugin for CUDA, where only that of the process was measured."
    )
    found = {"cases": len(errors), "ran_out_of_memory": named, "false_fits": wrong}
    found |= {"memory_median_error": median(memories), "memory_worst_error": max(memories)}
    found |= {"time_median_error": median(seconds), "time_worst_error": max(seconds)}
    return "\n".join([said, "", *lines]), found


def _ranked(known: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The settings that a search looks at for one run, the recipe's own first."""
    lines = ["| settings | ms planned | Mcycles |", "|---|---|---|"]
    rows = list(_rows([one for one in TPU if one._replace(train=()) == SAME], known))
    for case, _, _, taken, found in rows:
        told = case.settings.removeprefix(SAME.settings).removeprefix(", ") or "its own"
        lines.append(f"| {told} | {1e3 * taken.seconds:.0f} | {found['cycles'] / 1e6:.0f} |")
    by_plan = min(rows, key=lambda row: row[3].seconds)
    own = next(row for row in rows if not row[0].train)
    best = {
        "planned": by_plan[0].settings,
        "no_slower_than_its_own": by_plan[4]["cycles"] <= own[4]["cycles"],
    }
    said = (
        f"## Settings of one run on {SAME.on}, by plans and by the TPU compiler\n\n"
        "Those of `legal-cot-sft`, its own and others that compute the same. `windlass plan "
        f"legal-cot-sft --on {SAME.on} --best` keeps its own. Cycles are what the TPU compiler "
        "reckons with, without the attention kernels and the links."
    )
    return "\n".join([said, "", *lines]), {SAME.on: best}


def _states() -> tuple[str, dict[str, Any]]:
    """What every recipe that ships stores, by the plan and by XLA for CPUs."""
    from benchmarks.plan_states import MESHES, states

    lines = [
        "| recipe | data × fsdp × tensor | bytes planned | XLA for CPUs | error |",
        "|---|---|---|---|---|",
    ]
    worst = 0.0
    for name, mesh, planned, found in states():
        worst = max(worst, abs(planned / found - 1))
        split = " × ".join(map(str, mesh))
        lines.append(f"| {name} | {split} | {planned:,} | {found:,} | {planned / found - 1:+.4%} |")
    said = (
        f"## State, against XLA for CPUs\n\nEvery recipe that ships, on 1 device and on 8 as "
        f"{', '.join(' × '.join(map(str, mesh)) for mesh in MESHES[1:])}: worst error {worst:.4%}."
    )
    return "\n".join([said, "", *lines]), {"cases": len(lines) - 2, "worst_error": worst}


def _commit() -> str:
    words = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


TEXT = """# How right plans are

    python benchmarks/plan_accuracy.py

Plans are made from shapes alone, here by JAX {jax} on a CPU, with no part of a plan set by hand for
a case. What they are held against is in benchmarks/plan_accuracy.json; the file's first lines say
how it is found out anew. A plan calls `fits` what fits even if it is 10% too low on a TPU and 5% on
a GPU, and `tight` what fits only if it is not.

{tables}
"""


if __name__ == "__main__":
    main()
