"""Plain residuals, HC, mHC and mHC-lite in one decoder: loss at equal steps, at equal time, speed.

    python benchmarks/residuals.py [--seconds 300] [--only NAME] [--small]
    python benchmarks/residuals.py --table    # of what was found before

A decoder of llama's blocks, 6 layers of 512, on sequences of 1,024 bytes; the same first weights,
batches and AdamW for all. A variant trains for so many seconds without counting the compiler;
`--only` runs one of them, and results are merged into benchmarks/residuals.json.

The data are the Python files of this environment, by bytes: hundreds of megabytes of text that
people wrote, of which 5 minutes on a large GPU read about one epoch. Built-in stories would not do:
a grammar of few words is learned in the first minute, and all variants end at its entropy.
The loss is the mean over the last steps, in nats a byte, of bytes that were not seen before.
"""

import argparse
import hashlib
import json
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

RESULTS = Path(__file__).with_suffix(".json")
VARIANTS = ("plain", "hc", "mhc", "mhc_lite")
SIZES = dict(vocab=256, embed=512, mlp=1536, layers=6, heads=8, kv_heads=8, head_dim=64)
SMALL = dict(vocab=256, embed=64, mlp=128, layers=2, heads=2, kv_heads=2, head_dim=32)
RATE, WARMUP, DECAY, CLIP = 1e-3, 200, 0.1, 1.0
MOST_BYTES = 400_000_000
AVERAGED = 1000  # steps, of which the mean is a loss: the same batches for all variants
WARM = 5  # steps before the clock starts


def corpus(most: int) -> np.ndarray:
    """Bytes of all Python files here, in the order of a hash of their paths."""
    folders = {sysconfig.get_paths()["stdlib"], *site.getsitepackages()}
    files = {file for folder in folders for file in Path(folder).rglob("*.py")}
    order = sorted(files, key=lambda file: hashlib.sha256(str(file).encode()).digest())
    parts, size = [], 0
    for file in order:
        parts.append(np.frombuffer(file.read_bytes() + b"\0", np.uint8))
        size += len(parts[-1])
        if size > most:
            break
    return np.concatenate(parts)


def batches(text: np.ndarray, rows: int, length: int) -> Iterator[np.ndarray]:
    """Sequences from anywhere in the text, none of them twice until all were read."""
    random = np.random.default_rng(0)
    starts = np.arange(0, len(text) - length - 1, length)
    while True:
        random.shuffle(starts)
        for first in range(0, len(starts) - rows + 1, rows):
            yield np.stack([text[s : s + length + 1] for s in starts[first : first + rows]])


def trainer(kind: str, sizes: dict, rows: int, length: int) -> tuple[Callable, int]:
    """A step as `windlass train` compiles it, and the number of parameters."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from windlass.devices import mesh
    from windlass.devices.axes import cast
    from windlass.layers.stack import arrange
    from windlass.models import llama
    from windlass.objectives import Carry
    from windlass.objectives.next_token import Objective
    from windlass.optim import Schedule
    from windlass.optim.adamw import Optimizer
    from windlass.program.step import Frozen, make_step, start
    from windlass.residuals import Architecture
    from windlass.run import RESIDUALS

    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    jax.set_mesh(mesh.build(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1]))
    config: Any = llama.Config(**sizes, theta=1e4, tied=True)
    architecture = Architecture(config, RESIDUALS.load(kind)())
    model = eqx.filter_jit(architecture.init)(jax.random.key(0))
    weights, static = eqx.partition(arrange(model, remat="saved", unroll=1), eqx.is_array)
    schedule = Schedule(shape="constant", warmup_steps=WARMUP)
    optimizer = Optimizer(
        learning_rate=RATE, weight_decay=DECAY, clip_norm=CLIP, schedule=schedule
    ).build(1_000_000, weights)
    step = make_step(
        lambda weights, frozen: cast(eqx.combine(weights, frozen, static), dtype),
        Objective(),
        optimizer,
        steps=1_000_000,
        microbatches=1,
        skips=0,
    )
    compiled = jax.jit(step, donate_argnums=0)
    state = start(weights, optimizer, Carry(), key=jax.random.key(1))
    frozen = Frozen(eqx.filter(weights, lambda _: False), {})
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))

    def one(text: np.ndarray) -> dict:
        nonlocal state
        tokens = jnp.asarray(text.astype(np.int32))
        batch = {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weight": jnp.ones((rows, length)),
            "position": position,
            "document": jnp.zeros((rows, length), jnp.int32),
        }
        state, metrics = compiled(state, frozen, batch)
        return metrics

    return one, sum(x.size for x in jax.tree.leaves(weights))


def train(kind: str, seconds: float, text: np.ndarray, sizes: dict, rows: int, length: int) -> dict:
    """All losses of a variant, its speed and the gain of its streams."""
    import jax

    step, parameters = trainer(kind, sizes, rows, length)
    source, losses, times = batches(text, rows, length), [], []
    metrics = {}
    for _ in range(WARM):
        metrics = step(next(source))
        losses.append(metrics["loss"])
    jax.block_until_ready(metrics)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        metrics = step(next(source))
        losses.append(metrics["loss"])
        if len(losses) % 10 == 0:  # so that no more than some steps are under way
            jax.block_until_ready(metrics)
            times.append((len(losses), time.perf_counter() - began))
    jax.block_until_ready(metrics)
    elapsed = time.perf_counter() - began
    gains = {name: float(metrics[name]) for name in metrics if "residual_gain" in name}
    return {
        "parameters": parameters,
        "steps": len(losses),
        "step_ms": 1000 * elapsed / (len(losses) - WARM),
        "tokens_per_step": rows * length,
        "losses": [round(float(x), 4) for x in losses],
        **gains,
    }


def table(results: dict[str, dict]) -> str:
    """Losses at the step that all variants reached, at the end of the time, and times of a step."""
    common = min(one["steps"] for one in results.values())
    plain = results.get("plain")
    lines = [
        f"| residual | parameters | steps | loss at step {common:,} | below plain | at the end "
        "| step, ms | to plain | gain |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def loss(one: dict, steps: int) -> float:
        return float(np.mean(one["losses"][max(steps - AVERAGED, 0) : steps]))

    for name, one in results.items():
        at, end = loss(one, common), loss(one, one["steps"])
        below = f"{loss(plain, common) - at:+.4f}" if plain else ""
        ratio = f"{one['step_ms'] / plain['step_ms']:.3f}" if plain else ""
        gain = f"{one['residual_gain_forward']:.2f}" if "residual_gain_forward" in one else ""
        lines.append(
            f"| {name} | {one['parameters']:,} | {one['steps']:,} | {at:.4f} | {below} | {end:.4f} "
            f"| {one['step_ms']:.2f} | {ratio} | {gain} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--only", choices=VARIANTS)
    parser.add_argument("--small", action="store_true", help="a tiny shape, to try it on a CPU")
    parser.add_argument("--to", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the figures there are")
    asked = parser.parse_args()
    if asked.table:
        print(table(json.loads(asked.to.read_text())["variants"]))
        return
    sizes, rows, length = (SMALL, 4, 64) if asked.small else (SIZES, 32, 1024)
    import jax

    text = corpus(1_000_000 if asked.small else MOST_BYTES)
    setting = {
        "device": jax.devices()[0].device_kind,
        "seconds": asked.seconds,
        "sizes": sizes,
        "rows": rows,
        "length": length,
        "corpus_bytes": len(text),
        "corpus_sha256": hashlib.sha256(text.tobytes()).hexdigest(),
    }
    held = json.loads(asked.to.read_text()) if asked.to.exists() else {}
    # Variants are compared on the same machine and text alone.
    results = held.get("variants", {}) if held.get("setting") == setting else {}
    for kind in (asked.only,) if asked.only else VARIANTS:
        results[kind] = train(kind, asked.seconds, text, sizes, rows, length)
        ordered = {name: results[name] for name in VARIANTS if name in results}
        asked.to.write_text(json.dumps({"setting": setting, "variants": ordered}) + "\n")
        print(table(ordered), flush=True)


if __name__ == "__main__":
    main()
