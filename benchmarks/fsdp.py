"""The memory of a device, as the compiler of a CPU counts it, when weights are in 1 to 8 pieces.

    python benchmarks/fsdp.py

Qwen3-0.6B as it is, its own training step, a row of 1,024 tokens on each device; no array is made.
Prints the table and writes it to benchmarks/fsdp.md.
"""

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
os.environ["JAX_PLATFORMS"] = "cpu"
# Nothing runs, so the code need not be fast, only be laid out.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)
sys.path.insert(0, str(HERE.parent))

from windlass.devices import chips  # noqa: E402
from windlass.devices.mesh_choice import Rows  # noqa: E402
from windlass.planning import compiler  # noqa: E402
from windlass.program.built import Built  # noqa: E402
from windlass.program.footprint import footprint  # noqa: E402
from windlass.starting.describe import describe  # noqa: E402

PIECES = (1, 2, 4, 8)
LENGTH = 1024
RECIPE = {
    "model": {
        "family": "qwen3",
        **dict(vocab=151_936, embed=1024, mlp=3072, layers=28, heads=16, kv_heads=8, head_dim=128),
        "theta": 1e6,
    },
    "tokenizer": {"kind": "byte"},
    "data": {"source": {"kind": "stories"}, "length": LENGTH},
    "optim": {"kind": "adamw", "learning_rate": 1e-3},
    "train": {"steps": compiler.STEPS, "batch_per_device": 1},
    "mesh": {"data": 1, "tensor": 1},
}
HEAD = (
    "| fsdp | weights and optimiser | 12 bytes × parameters / fsdp | in all | expected in all |\n"
    "|---|---|---|---|---|"
)
ABOUT = """# Memory of a device by the fsdp axis

Qwen3-0.6B, all weights trained by AdamW in float32, one row of {length:,} tokens on each device.
GiB on each device, as XLA counts them for CPUs in the compiled step of `windlass train`: what goes
in (weights, two moments and the row), and all that there is at once.

{table}

*Expected in all* is what `windlass` estimates from shapes to choose a mesh: weights, moments and
gradient divided by fsdp; the matrix of words, whole while it is used; a layer's weights, whole
while they are; what each layer keeps of a row, and the row's logits. From 1 to 8 pieces it falls
by {fall} GiB, and what was measured by {fell}. The
compiler for CPUs sums gradients whole before it cuts them, that of the matrix of words (0.58 GiB)
twice, which the estimate leaves out.

`python benchmarks/fsdp.py` with {cores} cores of {machine}, JAX {jax} and Python {python}; no array
is made.
"""


def measured(pieces: int) -> tuple[float, float, float, float]:
    """GiB of weights and optimiser, as they should be, of all, and as that should be."""
    described = describe(RECIPE, ["device=cpu", f"device.count={pieces}", f"mesh.fsdp={pieces}"])
    found = compiler.compiled(described)
    memory = found.program.memory_analysis()
    assert memory is not None
    # The estimate is for some chip; what it needs does not depend on which.
    chip = chips.find("NVIDIA H200")
    assert chip is not None
    split = dict(described.mesh.shape)
    expected = footprint(described.run, chip, described.compute).needs(split, Rows(None, 1))
    with described.scope():
        parameters = Built(described).trainable.total
    held, state = memory.argument_size_in_bytes, 12 * parameters / pieces
    return held / 2**30, state / 2**30, found.peak_bytes / 2**30, expected / 2**30


def main() -> None:
    print(HEAD)
    lines, peaks, estimates = [], [], []
    for pieces in PIECES:
        held, state, peak, estimate = measured(pieces)
        peaks.append(peak)
        estimates.append(estimate)
        lines.append(f"| {pieces} | {held:.2f} | {state:.2f} | {peak:.2f} | {estimate:.2f} |")
        print(lines[-1], flush=True)
    text = ABOUT.format(
        length=LENGTH,
        table="\n".join([HEAD, *lines]),
        fall=f"{estimates[0] - estimates[-1]:.2f}",
        fell=f"{peaks[0] - peaks[-1]:.2f}",
        cores=os.cpu_count(),
        machine=platform.machine(),
        jax=version("jax"),
        python=platform.python_version(),
    )
    (HERE / "fsdp.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
