"""Parts of a training step alone, on the NVIDIA GPU that is here: ours beside plain XLA or a mask.

    python benchmarks/gpu_parts.py
    python benchmarks/gpu_parts.py --packed    # attention alone, of the rows of benchmarks/sft.py

Values and gradients of each part are computed both ways; printed are milliseconds of both, their
ratio, and how far they are apart where it matters (padding is left out). Attention is over rows of
one document, of several, and of several with padding behind them. Of packed rows it is computed
with places for documents in several ways, whose constants in `windlass/layers/kernels.py` follow.
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

from windlass.columns import DocumentsPerRow  # noqa: E402
from windlass.devices import mesh  # noqa: E402
from windlass.layers import kernels, softmax  # noqa: E402
from windlass.layers.document_attention import attended  # noqa: E402
from windlass.layers.pattern import CAUSAL  # noqa: E402

ROUNDS, CALLS = 3, 10
VOCAB, TILE = 151_936, (1, 32, 128)
# Rows, positions, heads, key heads, head dim: Qwen2.5-0.5B and Qwen3-1.7B.
SHAPES = [(32, 1024, 14, 2, 64), (16, 1024, 16, 8, 128)]
DOCUMENTS = (1, 2, 5, 8, 15)
# Places, each with its positions, and rounds of the last of them.
PACKED = [
    ([(96, 2048)], 1),
    ([(128, 2048)], 1),
    ([(128, 2048)], 7),
    ([(160, 2048)], 1),
    ([(224, 2048)], 1),
    ([(32, 2048), (64, 1024)], 1),
    ([(32, 2048), (128, 1024)], 1),
    ([(64, 2048), (128, 512)], 1),
    ([(64, 2048), (192, 512)], 1),
    ([(32, 2048), (64, 1024), (128, 512)], 1),
]


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
    per_row = DocumentsPerRow(documents, float(documents))

    def mixed(known: DocumentsPerRow | None) -> Callable:
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
    return Part(name, mixed(None), mixed(per_row), tuple(arrays), counts)


def packed() -> None:
    """Attention of a batch of packed rows with its documents in each of these places."""
    from benchmarks import sft

    rows = next(rows for rows in sft.documents(sft.CASE) if 88 <= sum(map(len, rows)) <= 96)
    document = jnp.asarray(sft.packed(rows, sft.CASE.length)["document"])
    _, _, heads, key_heads, dim = SHAPES[0]
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [
        jax.random.normal(key, (*document.shape, size, dim), jnp.bfloat16)
        for key, size in zip(keys, (heads, key_heads, key_heads, heads), strict=True)
    ]
    counts = (document >= 0)[..., None, None]
    arrays[-1] = jnp.where(counts, arrays[-1], 0)
    scale = dim**-0.5

    def of(mix: Callable, *, is_spread: bool = False) -> tuple[Callable, Callable]:
        def forward(q, k, v, d):
            if is_spread:  # keys and values for each head of queries, whose sum XLA computes
                k, v = (jnp.repeat(x, heads // key_heads, axis=2) for x in (k, v))
            return mix(q, k, v)

        def both(q, k, v, d):
            out, back = jax.vjp(lambda q, k, v: forward(q, k, v, d), q, k, v)
            return out, back(d)

        return forward, both

    def masked(q, k, v):
        return kernels.cudnn(q, k, v, document, document, 0, pattern=CAUSAL, scale=scale)

    def by_lengths(places: list[tuple[int, int]], rounds: int) -> Callable:
        calls = kernels.Calls(tuple(kernels.DocumentPlaces(*one) for one in places), rounds, scale)
        return lambda q, k, v: kernels._by_lengths(calls, q, k, v, document)

    ways = [("a mask", of(masked))]
    for places, rounds in PACKED:
        name = " + ".join(f"{count} × {span}" for count, span in places)
        name += f", {rounds} rounds" if rounds > 1 else ""
        for is_spread in (False, True):
            spread = ", heads spread" if is_spread else ""
            ways.append((name + spread, of(by_lengths(places, rounds), is_spread=is_spread)))
    ways.append(("our kernels", of(lambda q, k, v: attended(q, k, v, document, scale))))
    print(f"{sum(map(len, rows))} documents in {document.shape[0]} rows\n")
    print("| places | forward, ms | and backward, ms | apart |\n|---|---|---|---|")
    expected = None
    for name, (forward, both) in ways:
        _, first = measured(forward, tuple(arrays))
        found, all_ = measured(both, tuple(arrays))
        expected = found if expected is None else expected
        far = apart(expected, found, counts)
        print(f"| {name} | {first:.3f} | {all_:.3f} | {far:.1e} |", flush=True)


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
    parser.add_argument("--packed", action="store_true", help="attention of packed rows alone")
    asked = parser.parse_args()
    here = jax.devices()[0]
    if here.platform not in ("gpu", "cuda"):
        sys.exit(f"this needs an NVIDIA GPU; here is {here.device_kind}")
    jax.set_mesh(mesh.build(dict(data=1, fsdp=1, tensor=1), [here]))
    print(f"{here.device_kind}, JAX {jax.__version__}\n")
    if asked.packed:
        packed()
        return
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
