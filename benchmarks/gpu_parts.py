"""Parts of a training step alone, on the NVIDIA GPU that is here: ours beside plain XLA or a mask.

    python benchmarks/gpu_parts.py

Values and gradients of each part are computed both ways; printed are milliseconds of both, their
ratio, and how far they are apart where it matters (padding is left out). Attention is over rows of
one document, of several, and of several with padding behind them.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from windlass.columns import DocumentsInRows  # noqa: E402
from windlass.devices import mesh  # noqa: E402
from windlass.layers import kernels, softmax  # noqa: E402

ROUNDS, CALLS = 3, 10
VOCAB, TILE = 151_936, (1, 32, 128)
# Rows, positions, heads, key heads, head dim: Qwen2.5-0.5B, long too, Qwen3-1.7B and Phi-3-mini.
SHAPES = [
    (32, 1024, 14, 2, 64),
    (4, 8192, 14, 2, 64),
    (16, 1024, 16, 8, 128),
    (8, 1024, 32, 32, 96),
]
DOCUMENTS = (1, 2, 5, 8, 15)


class Part(NamedTuple):
    """A part of a step in two forms, of the same arguments."""

    name: str
    plain: Callable[..., Any]
    ours: Callable[..., Any]
    arguments: tuple[jax.Array, ...]
    counts: jax.Array | None = None  # of attention's queries, those that are no padding


def parts() -> Iterator[Part]:
    logits = 3 * jax.random.normal(jax.random.key(0), (*TILE, VOCAB), jnp.bfloat16)
    targets = jax.random.randint(jax.random.key(1), TILE, 0, VOCAB)

    def of_head(statistics: Callable) -> Callable:
        def loss(logits):
            z, target, highest = statistics(logits)
            return jnp.mean(z - target), highest

        def both(logits):
            d, highest = jax.grad(loss, has_aux=True)(logits.astype(jnp.float32))
            return d.astype(jnp.bfloat16), highest

        return both

    plain = of_head(lambda x: softmax.statistics(x, targets, jnp.float32))
    ours = of_head(lambda x: softmax.statistics(x, targets, jnp.bfloat16))
    yield Part(f"softmax of 4,096 × {VOCAB:,} logits", plain, ours, (logits,))
    for shape in SHAPES:
        for documents in DOCUMENTS:
            for padding in (0, 100) if documents > 1 else (0,):
                yield _attention(shape, documents, padding)


def _attention(shape: tuple[int, ...], documents: int, padding: int) -> Part:
    rows, length, heads, key_heads, dim = shape
    random = np.random.default_rng(documents)
    ids = np.sort(random.integers(0, documents, (rows, length)), axis=1).astype(np.int32)
    ids[:, length - padding :] = -1
    document = jnp.asarray(ids)

    def mixed(known: DocumentsInRows | None) -> Callable:
        def both(q, k, v, d):
            def attend(q, k, v):
                return kernels.attend(q, k, v, document=document, slots=document, first=0)

            with kernels.rows_of(known):
                out, back = jax.vjp(attend, q, k, v)
                return out, back(jax.sharding.reshard(d, jax.typeof(out).sharding.spec))

        return both

    keys = jax.random.split(jax.random.key(documents), 4)
    sizes = (heads, key_heads, key_heads, heads)
    arrays = [
        jax.random.normal(key, (rows, length, size, dim), jnp.bfloat16)
        for key, size in zip(keys, sizes, strict=True)
    ]
    counts = (document >= 0)[..., None, None]
    arrays[-1] = jnp.where(counts, arrays[-1], 0)  # padding has no gradient
    name = f"attention {rows} × {length}, {heads}/{key_heads} heads of {dim}, {documents} documents"
    name += f", {padding} of padding" if padding else ""
    return Part(
        name, mixed(None), mixed("one" if documents == 1 else "several"), tuple(arrays), counts
    )


def measured(function: Callable, arguments: tuple[jax.Array, ...]) -> tuple[Any, float]:
    """What it gives, and milliseconds of a call, in the best round."""
    compiled = jax.jit(function)
    result = jax.block_until_ready(compiled(*arguments))
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            result = compiled(*arguments)
        jax.block_until_ready(result)
        rounds.append((time.perf_counter() - began) / CALLS)
    return result, 1000 * min(rounds)


def apart(plain: Any, ours: Any, counts: jax.Array | None) -> float:
    """Largest difference, as a share of the largest value of the array."""
    found = []
    for want, got in zip(jax.tree.leaves(plain), jax.tree.leaves(ours), strict=True):
        want, got = (x.astype(jnp.float32) for x in (want, got))
        difference = jnp.abs(want - got)
        if counts is not None:
            difference = jnp.where(counts, difference, 0)
        found.append(float(jnp.max(difference) / jnp.max(jnp.abs(want))))
    return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    here = jax.devices()[0]
    if here.platform not in ("gpu", "cuda"):
        sys.exit(f"this needs an NVIDIA GPU; here is {here.device_kind}")
    jax.set_mesh(mesh.build(dict(data=1, fsdp=1, tensor=1), [here]))
    print(f"{here.device_kind}, JAX {jax.__version__}\n")
    print("| part | plain, ms | ours, ms | ratio | apart |\n|---|---|---|---|---|")
    for part in parts():
        (plain, before), (ours, after) = (
            measured(function, part.arguments) for function in (part.plain, part.ours)
        )
        far = apart(plain, ours, part.counts)
        print(f"| {part.name} | {before:.3f} | {after:.3f} | {before / after:.2f} | {far:.1e} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
