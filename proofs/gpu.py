"""On an NVIDIA GPU: cuDNN's attention and ours are XLA's, and losses are the CPU's."""

import os
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from proofs import program
from tests.training.campaign import RECIPE, Program
from windlass.layers import kernels
from windlass.layers.kernels import RowsOfStep
from windlass.layers.pattern import Pattern
from windlass.telemetry.metrics import read

# bfloat16 holds 8 bits: a rounding is off by up to 1/256, and neither kernel may be off by much
# more than a rounding of what float32 gives, in the root mean square.
TOLERANCE = 1 / 256

# RowsOfStep × length × heads × key heads × width of a head, and the window.
SHAPES = [
    (2, 512, 8, 2, 64, None),
    (2, 512, 8, 2, 64, 100),
    (4, 1024, 16, 8, 128, None),
    (1, 1024, 4, 1, 256, 512),
]
STORIES = RECIPE | {
    "model": RECIPE["model"] | {"vocab": 1024, "embed": 256, "mlp": 512, "head_dim": 64},
    "tokenizer": {"kind": "bpe", "vocab": 1024},
    "data": {"source": {"kind": "stories", "count": 4000}, "length": 256, "validation": 0.01},
    "train": {"steps": 40, "batch": 32, "accumulation": 2, "evaluate_every": 20},
}
STEPS = 20


def prove() -> dict:
    found = [agreement(*shape) for shape in SHAPES]
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= program.environment(folder)
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # several processes share the GPU
        losses = same_losses(Path(folder))
    return {
        "holds": all(each["agrees"] for each in found) and losses["worst_relative"] < 1e-3,
        "device": jax.devices()[0].device_kind,
        "attention": {"tolerance": TOLERANCE, "shapes": found},
        "losses_on_cpu_and_gpu": losses,
    }


def agreement(rows: int, length: int, heads: int, shared: int, dim: int, window: int | None):
    """How far kernels in bfloat16 are from XLA in float32, on rows of several documents."""
    rng = np.random.default_rng(0)
    q, k, v, weight = (
        jnp.array(rng.normal(size=(rows, length, each, dim)), jnp.bfloat16)
        for each in (heads, shared, shared, heads)
    )
    cuts = np.sort(rng.integers(1, length, size=(rows, 4)), axis=1)
    document = jnp.array((np.arange(length)[None, :, None] >= cuts[:, None]).sum(-1), jnp.int32)
    document = document.at[:, -length // 16 :].set(-1)
    is_padding = (document < 0)[..., None, None]

    def run(kernel, dtype, v=v):
        def total(q, k, v, document, weight):
            how = {"pattern": Pattern(window=window), "scale": dim**-0.5}
            mixed = kernel(q, k, v, document, document, 0, **how)
            mixed = jnp.where(is_padding, 0, mixed)  # which each computes as it likes
            return jnp.sum(mixed.astype(jnp.float32) * weight.astype(jnp.float32)), mixed

        of_each = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))
        inputs = [x.astype(dtype) for x in (q, k, v)]
        (dq, dk, dv), mixed = of_each(*inputs, document, weight)
        return {"mixed": mixed, "query": dq, "key": dk, "value": dv}

    with jax.default_matmul_precision("highest"):
        exact = run(kernels.xla, jnp.float32)
    flash = {"cudnn": kernels.cudnn, "ours": partial(kernels.cudnn, rows=RowsOfStep("several"))}
    found = {name: run(kernel, jnp.bfloat16) for name, kernel in flash.items()}
    every = found | {"xla": run(kernels.xla, jnp.bfloat16)}
    off = {
        name: {kernel: _apart(every[kernel][name], exact[name]) for kernel in every}
        for name in exact
    }
    # What is another document's may be anything.
    others = (document != document[:, :1])[..., None, None]
    leak = 0.0
    for name, kernel in flash.items():
        changed = run(kernel, jnp.bfloat16, jnp.where(others, 1000 * v, v))
        first = jnp.where(others, 0, changed["mixed"] - found[name]["mixed"])
        leak = max(leak, float(jnp.abs(first).max()))
    close = all(max(each.values()) < TOLERANCE for each in off.values())
    return {
        "shape": f"{rows} x {length}, {heads} heads of {dim}, {shared} of keys, window {window}",
        "relative_errors": off,
        "seen_of_other_documents": leak,
        "agrees": close and leak == 0,
    }


def same_losses(folder: Path) -> dict:
    curves = {}
    for device in ("cpu", "gpu"):
        run = Program(folder / device, STORIES)
        keys = [f"device={device}", "precision.compute=float32", f"train.steps={STEPS}"]
        ended = run.finish(*keys)
        assert ended.code == 0, ended.output
        records = read(run.run_dir / "metrics.jsonl")
        curves[device] = np.array([each["loss"] for each in records if "loss" in each])
    cpu, gpu = curves["cpu"], curves["gpu"]
    assert len(cpu) == len(gpu) == STEPS
    return {
        "steps": STEPS,
        "worst_relative": float(np.abs(gpu / cpu - 1).max()),
        "cpu": cpu.round(5).tolist(),
        "gpu": gpu.round(5).tolist(),
    }


def _apart(found: jax.Array, expected: jax.Array) -> float:
    gap = found.astype(jnp.float32) - expected
    return float(jnp.linalg.norm(gap) / jnp.linalg.norm(expected))
