"""Where a training step's time goes on the GPU that is here, by kind of kernel.

    python benchmarks/gpu_profile.py [CASE ...] [--top 12] [--set train.layers_per_loop=24]

Cases are those of benchmarks/gpu.py, and that of benchmarks/sft.py: packed. The step that `windlass
train` compiles runs with JAX's profiler; each kernel is told by its name, and fusions by what the
compiled program says of them.
Matmuls stand beside the FLOP/s they reach, what only moves memory beside its bytes a second.
"""

import argparse
import itertools
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu, sft  # noqa: E402
from windlass.analysis.hlo import Instruction, Text  # noqa: E402

STEPS = 3
PACKED = "packed"
CASES = {**gpu.CASES, PACKED: sft.CASE}
HEAD = "head: softmax and its gradient"  # what reads logits, but matmuls
# Other kinds by parts of a kernel's name, the first that fits.
NAMES = {
    HEAD: ("softmax",),
    "attention": ("cudnn", "fmha", "sdpa", "document_"),
    "matmuls": ("nvjet", "gemm", "cutlass", "splitKreduce"),
    "copies": ("memcpy", "Memcpy", "Memset", "dynamic_update_slice", "loop_broadcast", "wrapped_"),
}
# Kinds of fusions by parts of the name of the operation that they are named after.
OPERATIONS = {
    "backward: norms, rotary, activations": ("transpose(jvp",),
    "forward: norms, rotary, activations": ("jit(microbatch)",),
    "update of the weights": ("jit(step)",),
}


class Kernel(NamedTuple):
    """A kernel of a step, however often it is launched."""

    name: str
    milliseconds: float  # a step
    launches: float  # a step
    kind: str
    shape: str  # of what it writes, if the program says


class Profile(NamedTuple):
    """A step's kernels and what they leave idle."""

    kernels: list[Kernel]
    busy: float  # milliseconds a step
    span: float  # from the first kernel to the last
    flops: int  # of matmuls, a step


def profile(name: str, settings: list[str]) -> Profile:
    import jax

    case = CASES[name]
    given: list[Any]
    if name == PACKED:
        own, given = sft.running(case, settings), [*itertools.islice(sft.documents(case), STEPS)]
    else:
        own = gpu.running(gpu.programs(case, is_adapted=True, settings=settings))
        given = list(itertools.islice(gpu.batches(case), STEPS))

    def run() -> None:
        for batch in given:
            own.side.step(batch)
        own.side.wait()

    run()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        traced = jax.profiler.ProfileData.from_file(str(file))
        return read(traced, Text(own.text), gpu.SHAPES[case.model]["vocab"])


def read(traced: Any, text: Text, vocab: int) -> Profile:
    """The kernels of a trace of `STEPS` steps of the program with this text."""
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    spans = []
    for event in kernels_of(traced):
        times[event.name] += event.duration_ns
        launches[event.name] += 1
        spans.append((event.start_ns, event.start_ns + event.duration_ns))
    spans.sort()
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    known = {
        operation.name: operation
        for operations in text.computations.values()
        for operation in operations
    }
    kernels = []
    for name, time in times.most_common():
        operation = known.get(name) or known.get(re.sub(r"_(\d+)$", r".\1", name))
        shapes = (
            [known[one].shape for one in operation.operands if one in known] if operation else []
        )
        is_of_logits = re.search(rf",{vocab}\]", " ".join(shapes)) is not None
        kind = HEAD if is_of_logits and "fusion" in name else _kind(name, operation)
        shape = operation.shape[:60] if operation else ""
        kernels.append(Kernel(name, time / STEPS / 1e6, launches[name] / STEPS, kind, shape))
    scale = STEPS * 1e6
    return Profile(kernels, busy / scale, (end - spans[0][0]) / scale, text.flops)


def kernels_of(traced: Any) -> Iterator[Any]:
    for plane in traced.planes:
        if "/device:GPU" in plane.name:
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    yield from line.events


def _kind(name: str, operation: Instruction | None) -> str:
    for kind, parts in NAMES.items():
        if any(part in name for part in parts):
            return kind
    if operation is None:
        return "other"
    named = re.search(r'op_name="([^"]*)"', operation.text)
    for kind, parts in OPERATIONS.items():
        if named and any(part in named[1] for part in parts):
            return kind
    return "other"


def table(found: Profile, peak: float | None, top: int) -> str:
    kinds: dict[str, float] = defaultdict(float, idle=found.span - found.busy)
    count: dict[str, float] = defaultdict(float)
    for kernel in found.kernels:
        kinds[kernel.kind] += kernel.milliseconds
        count[kernel.kind] += kernel.launches
    lines = ["| kind | ms | share | launches |", "|---|---|---|---|"]
    lines += [
        f"| {kind} | {time:.1f} | {time / found.span:.1%} | {count[kind]:.0f} |"
        for kind, time in sorted(kinds.items(), key=lambda one: -one[1])
    ]
    speed = found.flops / (kinds["matmuls"] / 1e3) if kinds["matmuls"] else 0.0
    of_peak = f", {speed / peak:.0%} of the peak" if peak else ""
    amount = f"{found.flops / 1e12:.1f} TFLOP at {speed / 1e12:.0f} TFLOP/s"
    lines += ["", f"Matmuls: {amount}{of_peak}."]
    lines += ["", "| kernel | writes | ms | launches |", "|---|---|---|---|"]
    lines += [
        f"| `{one.name[:56]}` | {one.shape} | {one.milliseconds:.2f} | {one.launches:.0f} |"
        for one in found.kernels[:top]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--top", type=int, default=12, help="kernels that are listed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    asked = parser.parse_args()
    if unknown := set(asked.cases) - set(CASES):
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    for name in asked.cases or ["full-0.5b"]:
        found = profile(name, asked.set)
        print(
            f"{name}: {found.span:.1f} ms a step\n\n{table(found, gpu.peak_flops(), asked.top)}\n"
        )


if __name__ == "__main__":
    main()
