"""The TPU compiler, without a TPU, takes whole training steps with the Pallas kernel in them, and
lets chips say to each other only what the design names.

It needs libtpu, which there is for x86-64 hosts: `pip install 'windlass-lm[tpu]'`.
"""

from collections import Counter

from benchmarks.tpu_compile import CASES, Case, measure
from tests.collectives import collectives

MIB = 2**20
# Weights are gathered over fsdp, gradients summed over all that have rows of their own, what a
# layer adds to the stream over tensor; the edges of pieces that are no whole tiles go to the next
# chip. Less than a MiB may be anything: norms, losses, counts.
NAMED = {
    "all-gather": [("fsdp",)],
    "reduce-scatter": [("fsdp",)],
    "collective-permute": [("fsdp",)],
    "all-reduce": [("data",), ("fsdp",), ("data", "fsdp"), ("tensor",)],
}


def prove() -> dict:
    cases = [found(case) for case in CASES]
    holds = [case["fits"] and case["kernels"] > 0 and not case["unnamed"] for case in cases]
    return {"holds": all(holds), "cases": cases}


def found(case: Case) -> dict:
    """What became of a case, and what its chips say to each other in a step."""
    facts, described, text = measure(case)
    moved: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for one in collectives(text, described.mesh.shape):
        moved[one.kind, one.axes] += one.bytes * one.count
    large = {said: size for said, size in moved.items() if size >= MIB}
    unnamed = [said for said in large if said[1] not in NAMED.get(said[0], [])]
    return facts | {
        "mib_moved": {
            f"{kind} over {' × '.join(axes)}": round(size / MIB, 1)
            for (kind, axes), size in large.items()
        },
        "unnamed": [f"{kind} over {' × '.join(axes)}" for kind, axes in unnamed],
    }
