"""What plans say of memory and time, beside what compilers and a GPU say of the same steps.

    python benchmarks/plan_accuracy.py

plans every case of benchmarks/plan_cases.py and holds it against what was found of it, which is in
benchmarks/plan_accuracy.json; prints the tables and writes them to benchmarks/plan_accuracy.md.

    TPU_SKIP_MDS_QUERY=1 python benchmarks/plan_accuracy.py --compile v5e-8,v6e-1

finds out anew what the TPU compiler says of the cases of these slices, on an x86-64 host with
libtpu and no TPU, and `--measure all` what a step takes on the GPU that is here.

    TPU_SKIP_MDS_QUERY=1 python benchmarks/plan_accuracy.py --compile new --jobs 8 --limit 480

compiles the cases of which nothing is known yet, and stops after so many seconds with what it has;
`--compile changed` those whose program is another, or is compiled by another compiler, than the one
that is known. `--measure new` runs those of the GPU.
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

from benchmarks.plan_cases import GPU, SAME, TPU, Case  # noqa: E402
from windlass import files  # noqa: E402

FILE, PAGE = HERE / "plan_accuracy.json", HERE / "plan_accuracy.md"
GIB, MIB = 2**30, 2**20
WARM, ROUNDS, STEPS = 3, 3, 6


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument(
        "--compile", metavar="SLICES", help="ask libtpu: v5e-8,v6e-1, new or changed"
    )
    asked.add_argument(
        "--measure", choices=["all", "new"], help="run the cases of the GPU here, or those unknown"
    )
    asked.add_argument("--jobs", type=int, default=1, help="compilations at a time")
    asked.add_argument("--limit", type=float, help="seconds after which compilations are stopped")
    asked.add_argument("--one", help=argparse.SUPPRESS)
    given = asked.parse_args()
    if given.one:
        of, number = given.one.split(":")
        print(json.dumps(_measured(GPU[int(number)]) if of == "GPU" else _compiled(int(number))))
    elif given.compile:
        wanted, known = given.compile.split(","), _known()
        chosen = [
            i
            for i, one in enumerate(TPU)
            if one.on in wanted
            or "changed" in wanted
            or ("new" in wanted and one.name not in known)
        ]
        environ = {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        _find("TPU", chosen, given.jobs, environ, given.limit)
    elif given.measure:
        known = {} if given.measure == "all" else _known()
        chosen = [i for i, one in enumerate(GPU) if one.name not in known]
        _find("GPU", chosen, 1, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        compare()
        print(PAGE.read_text(encoding="utf-8"))


def _known() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.is_file() else {}


def _find(
    of: str, chosen: Sequence[int], jobs: int, environ: dict[str, str], limit: float | None = None
) -> None:
    """Each case in a process of its own: the peak of a device's memory never falls.

    What is found is stored at once, so that nothing of it is lost after `limit` seconds.
    """
    began = time.monotonic()

    def one(number: int) -> tuple[str, dict[str, Any] | None]:
        case = (GPU if of == "GPU" else TPU)[number]
        words = [sys.executable, __file__, "--one", f"{of}:{number}"]
        left = None if limit is None else max(1.0, limit - (time.monotonic() - began))
        how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": left}
        try:
            done = subprocess.run(words, env=os.environ | environ, **how)
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
        for done in as_completed([pool.submit(one, number) for number in chosen]):
            name, found = done.result()
            if found is not None:
                # Atomically: the other processes read it.
                files.write(FILE, json.dumps(_known() | {name: found}, indent=1) + "\n")


def _compiled(number: int) -> dict[str, Any]:
    from windlass.planning import compiler, targets
    from windlass.starting import origin

    case, known = TPU[number], _known()
    layers, target = origin.load(case.recipe, []), targets.find(case.on)
    program = compiler.key(layers, target)
    if program == known.get(case.name, {}).get("program"):
        return known[case.name]
    found = compiler.find(layers, target)
    assert isinstance(found, compiler.CompilerReport), found.why
    return {
        "program": program,
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
    known = _known()
    (tpu, of_tpu), (gpu, of_gpu), (states, of_states) = _tpu(known), _gpu(known), _states()
    ranks, of_ranks = _ranked(known)
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
    errors, small, times, by, named, wrong, compiled = [], [], [], set(), [], [], 0
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
        by.add(found["by"])
        compiled += "memory_by" in found
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
        f"plan: {'; '.join(named)}. By {', '.join(sorted(by))}, as in benchmarks/gpu.json; memory "
        f"of {compiled}, which is less than when they ran, by XLA for such a GPU that is not here."
    )
    found = {"cases": len(errors), "ran_out_of_memory": named, "false_fits": wrong}
    found |= {"memory_median_error": median(memories), "memory_worst_error": max(memories)}
    found |= {"time_median_error": median(seconds), "time_worst_error": max(seconds)}
    return "\n".join([said, "", *lines]), found


def _ranked(known: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The settings that a search looks at for one run, the recipe's own first."""
    lines = ["| on | settings | ms planned | Mcycles |", "|---|---|---|---|"]
    rows = list(_rows([one for one in TPU if one._replace(train=()) in SAME], known))
    for case, _, _, taken, found in rows:
        told = case.settings.removeprefix(f"{SAME[0].settings}").removeprefix(", ")
        lines.append(
            f"| {case.on} | {told or 'its own'} | {1e3 * taken.seconds:.0f} "
            f"| {found['cycles'] / 1e6:.0f} |"
        )
    by_plan = min(rows, key=lambda row: row[3].seconds)
    own = next(row for row in rows if not row[0].train)
    best = {
        own[0].on: {
            "planned": by_plan[0].settings,
            "no_slower_than_its_own": by_plan[4]["cycles"] <= own[4]["cycles"],
        }
    }
    said = (
        "## Settings of one run, by plans and by the TPU compiler\n\n"
        "Those of `legal-cot-sft`, its own and others that compute the same. `windlass plan "
        "legal-cot-sft --on v5e-8 --best` keeps its own. Cycles are what the TPU compiler "
        "estimates, without the attention kernels and the interconnect."
    )
    return "\n".join([said, "", *lines]), best


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
