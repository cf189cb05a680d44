"""What the TPU compiler makes of training steps, without a TPU: memory a chip, time to compile.

It needs libtpu, which there is for x86-64 hosts: `pip install 'windlass-lm[tpu]'`. Then

TPU_SKIP_MDS_QUERY=1 python benchmarks/tpu_compile.py

prints the table, and writes it to benchmarks/tpu_compile.md.
"""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for what little is computed and not compiled
sys.path.insert(0, str(HERE.parent))

import jax  # noqa: E402

from benchmarks.plan_cases import MODELS  # noqa: E402
from windlass.planning import compiler  # noqa: E402
from windlass.program.described import Described  # noqa: E402

KERNEL = 'custom_call_target="tpu_custom_call"'  # how a program calls one that Pallas wrote
LENGTH = 1024


class Case(NamedTuple):
    """A model on a slice."""

    model: str
    topology: str  # as the compiler calls it
    mesh: tuple[int, int, int] | None  # data × fsdp × tensor; None: as windlass chooses
    rows: int
    rank: int | None = None  # of LoRA; None: all weights are trained
    slices: int = 1


CASES = [
    Case("Qwen2.5-0.5B", "v5e:2x4", (1, 8, 1), 32),
    Case("Qwen2.5-0.5B", "v5e:2x4", (2, 2, 2), 32),
    Case("Qwen2.5-0.5B", "v6e:2x2", (1, 4, 1), 32),
    Case("Qwen2.5-0.5B", "v6e:2x4", (1, 8, 1), 32),
    Case("Qwen2.5-0.5B", "v5p:2x2x1", (1, 4, 1), 32),
    Case("Qwen3-0.6B", "v6e:2x4", (1, 8, 1), 32),
    Case("Qwen3-0.6B", "v6e:1x1", (1, 1, 1), 4),
    Case("Qwen2.5-3B", "v6e:2x4", (1, 8, 1), 32),
    Case("Gemma-3-1B", "v5e:2x4", (1, 8, 1), 16),
    Case("Qwen2.5-0.5B", "v5e:2x4", None, 64, rank=32),
    Case("Llama-3.1-8B", "v5e:2x4", None, 8, rank=16),
    Case("Qwen2.5-0.5B", "v6e:4x4", None, 64, slices=2),
]


def recipe(case: Case) -> dict[str, Any]:
    """The run of a case, whose data is never read."""
    given = case.mesh and dict(zip(("data", "fsdp", "tensor"), case.mesh, strict=True))
    return {
        "model": MODELS[case.model],
        **({"mesh": given} if given else {}),
        **({"adapter": {"kind": "lora", "rank": case.rank, "dropout": 0.05}} if case.rank else {}),
        "tokenizer": {"kind": "byte"},
        "data": {"source": {"kind": "stories"}, "length": LENGTH},
        "optim": {"kind": "adamw", "learning_rate": 1e-3},
        "train": {"steps": compiler.STEPS, "batch": case.rows},
    }


def measure(case: Case) -> tuple[dict[str, Any], Described, str]:
    """What became of one case, the run, and the text of its program."""
    devices = compiler.topology(case.topology, case.slices)
    described = compiler.described(recipe(case), devices)
    found = compiler.compiled(described)
    assert described.chip is not None
    text = found.program.as_text() or ""
    return (
        {
            "model": case.model,
            "trained": "all weights" if case.rank is None else f"LoRA of rank {case.rank}",
            "slice": case.topology if case.slices == 1 else f"{case.slices} × {case.topology}",
            "mesh": " × ".join(str(size) for size in described.mesh.shape.values()),
            "rows": case.rows,
            "kernels": text.count(KERNEL),
            "gib_a_chip": round(found.peak_bytes / 2**30, 2),
            "fits": found.peak_bytes < described.chip.memory_bytes,
            "gib_of_chip": described.chip.memory_bytes / 2**30,
            "seconds": round(found.seconds, 1),
        },
        described,
        text,
    )


def main() -> None:
    lines = [
        "| model | trained | slice | data × fsdp × tensor | rows of 1,024 | GiB a chip | of | "
        "Pallas kernels | compiled in |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print(*lines, sep="\n")
    for case in CASES:
        found, _, _ = measure(case)
        lines.append(
            f"| {found['model']} | {found['trained']} | `{found['slice']}` | {found['mesh']} "
            f"| {found['rows']} | {found['gib_a_chip']:.2f} | {found['gib_of_chip']:.2f} "
            f"| {found['kernels']} | {found['seconds']:.1f} s |"
        )
        print(lines[-1], flush=True)
    made = f"JAX {jax.__version__}, libtpu {version('libtpu')}, {os.cpu_count()} cores, no TPU"
    (HERE / "tpu_compile.md").write_text(TEXT.format(made=made, table="\n".join(lines)))


TEXT = """# Training steps through the TPU compiler

    TPU_SKIP_MDS_QUERY=1 python benchmarks/tpu_compile.py

Each row is the step of a run, lowered from shapes alone and compiled for a slice that is not there
({made}): bfloat16 products, float32 weights and AdamW, rematerialisation `saved`.
GiB a chip is the compiler's peak of what is held at once: what goes into the step and comes out of
it, and what is needed between. Kernels are calls of attention written in Pallas,
forward and backward.

{table}
"""


if __name__ == "__main__":
    main()
