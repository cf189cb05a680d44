"""Sizes of the blocks of our kernels, and threads for each, tried on the NVIDIA GPU that is here.

    python benchmarks/gpu_blocks.py [KERNEL ...] [--to FILE]

A kernel reads its block from constants of its layer's module; each line is a kernel at one shape
under some values of them, the first line of a shape those that ship. Times are of the kernel alone,
by JAX's profiler; `apart` is how far results are from those of the first line, as a share of the
largest number.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu_profile, sft  # noqa: E402
from benchmarks.gpu_parts import apart  # noqa: E402
from windlass.devices import mesh  # noqa: E402
from windlass.layers import attention, document_attention, kernels, low_rank, mlp, norm  # noqa: E402

CALLS = 10
COMPILING = 12  # programs at once

Values = Mapping[str, Any]  # of constants


class Kernel(NamedTuple):
    """A kernel at one shape, and what is tried of the constants of its module."""

    shape: str
    module: Any
    names: tuple[str, ...]  # of kernels that are timed
    function: Callable[..., Any]
    arguments: Sequence[Any]  # arrays, and trees of them
    tried: Sequence[Values]


def heads() -> Iterator[Kernel]:
    sizes = [(32, 4), (64, 4), (16, 4), (32, 2), (32, 8)]
    tried = [dict(TOKENS=tokens, WARPS=warps) for tokens, warps in sizes]
    for name, counts, dim, eps, kind in (
        ("1.7B with LoRA", (16, 8, 8), 128, (1e-6, 1e-6, None), "inner"),
        ("1.7B", (16, 8, 8), 128, (1e-6, 1e-6, None), "scale"),
        ("0.5B", (14, 2, 2), 64, (None, None, None), "bias"),
    ):
        split = attention.HeadSplit(counts, dim, eps)
        rows, width = (16 if dim == 128 else 32), sum(counts) * dim
        x = normal(0, rows, 1024, width)
        more: dict[str, Any] = {"scale": jnp.ones((rows, 1024, 1), jnp.bfloat16)}
        if kind == "inner":
            more = dict(inner=normal(1, rows, 1024, 64), up=normal(2, 16, width))
        if kind == "bias":
            more |= {"bias": normal(3, width).astype(jnp.float32)}
        cos, sin = normal(4, rows, 1024, dim // 2), normal(5, rows, 1024, dim // 2)
        factors = jnp.ones((3, dim))
        d = [normal(6 + i, rows, 1024, count, dim) for i, count in enumerate(counts)]

        def both(x, more, cos, sin, factors, d, split=split):
            def forward(x, factors):
                own = attention.Joint(x, **more)
                return attention.split_heads(split, own, cos, sin, factors)

            out, back = jax.vjp(forward, x, factors)
            return out, back(tuple(d))

        names = "split_heads", "split_heads_gradient"
        yield Kernel(name, attention, names, both, (x, more, cos, sin, factors, d), tried)


def norms() -> Iterator[Kernel]:
    sizes = [(16, 2048, 8), (16, 2048, 4), (32, 2048, 4), (32, 2048, 8), (64, 2048, 4)]
    sizes += [(32, 4096, 4), (32, 4096, 8), (32, 8192, 8), (8, 2048, 4)]
    tried = [dict(TOKENS=a, TOGETHER=b, WARPS=c) for a, b, c in sizes]
    for name, rows, size, reads in (("1.7B, two", 16, 2048, 1), ("1.7B, three", 16, 2048, 2)):
        x, *d = (normal(i, rows, 1024, size) for i in range(2 + reads))

        def both(x, factor, d):
            return norm.stream_gradient(1e-6, x, factor, d)

        yield Kernel(name, norm, ("norm_gradient",), both, (x, jnp.ones(size), d), tried)


def products() -> Iterator[Kernel]:
    sizes = [(64, 128, 4), (64, 128, 8), (32, 128, 4), (128, 128, 8), (32, 256, 4), (64, 256, 8)]
    sizes += [(64, 64, 4), (32, 64, 2), (16, 256, 4)]
    tried = [dict(ROWS=a, COLUMNS=b, WARPS=c) for a, b, c in sizes]
    for bases in (1, 2):
        each = [normal(i, 16, 1024, 2048) for i in range(bases)]
        inner, up = normal(8, 16, 1024, 16), normal(9, 16, 2048)
        given = each, inner, up
        yield Kernel(f"{bases} bases", low_rank, ("low_rank",), low_rank.add_product, given, tried)


def gates() -> Iterator[Kernel]:
    sizes = [(32, 1024, 4, 4), (32, 1024, 8, 4), (64, 1024, 8, 3), (32, 2048, 4, 4)]
    sizes += [(32, 512, 4, 4), (32, 1024, 4, 3), (16, 1024, 4, 4), (16, 1024, 2, 4)]
    tried = [dict(SHORT=a, LONG=b, WARPS=c, STAGES=d) for a, b, c, d in sizes]
    gate, up, d = (normal(i, 16, 1024, 6144) for i in range(3))
    of_gate, of_up, d_inner = (normal(3 + i, 16, 1024, 16) for i in range(3))
    low = mlp.LowRankFactors(
        of_gate, of_up, normal(6, 16, 6144), normal(7, 16, 6144), normal(8, 6144, 16)
    )

    def both(gate, up, low, d, d_inner):
        out, back = jax.vjp(lambda *x: mlp._in_kernels(*x), gate, up, low)
        return out, back((d, d_inner))

    names = "swiglu_low_rank", "swiglu_low_rank_gradient"
    yield Kernel("1.7B, rank 16", mlp, names, both, (gate, up, low, d, d_inner), tried)


def documents() -> Iterator[Kernel]:
    sizes = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (32, 64, 4, 3), (128, 64, 4, 2)]
    sizes += [(128, 64, 8, 3), (128, 32, 4, 3), (64, 128, 8, 2), (128, 128, 8, 2)]
    blocks = [document_attention.AttentionBlock(*one) for one in sizes]
    tried = [
        {"BLOCKS": {document_attention.WIDEST: document_attention.AttentionBlocks(*[one] * 3)}}
        for one in blocks
    ]
    names = "document_attention", "document_queries", "document_keys"
    rows = next(rows for rows in sft.documents(sft.CASE) if 88 <= sum(map(len, rows)) <= 96)
    document = jnp.asarray(sft.packed(rows, sft.CASE.length)["document"])
    for name, heads, kv_heads, dim in (("0.5B", 14, 2, 64), ("1.7B", 16, 8, 128)):
        q, k, v, d = (
            normal(i, *document.shape, count, dim)
            for i, count in enumerate((heads, kv_heads, kv_heads, heads))
        )

        def both(q, k, v, d, scale=dim**-0.5):
            def mixed(q, k, v):
                return document_attention.attend(
                    q, k, v, document, scale=scale, saved_as=kernels.MIXED
                )

            out, back = jax.vjp(mixed, q, k, v)
            return out, back(d)

        yield Kernel(name, document_attention, names, both, (q, k, v, d), tried)


KERNELS = {one.__name__: one for one in (heads, norms, products, gates, documents)}


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


@contextmanager
def constants(module: Any, values: Values) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def lowered(kernel: Kernel, values: Values) -> Any:
    jax.clear_caches()  # of what was traced with other constants
    with constants(kernel.module, values):
        return jax.jit(lambda *x: kernel.function(*x)).lower(*kernel.arguments)


def times(call: Callable[[], Any], names: Sequence[str]) -> list[float]:
    """Microseconds of each kernel, of a call."""
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                found = call()
            jax.block_until_ready(found)
        (file,) = Path(folder).rglob("*.xplane.pb")
        total: Counter[str] = Counter()
        for event in gpu_profile.kernels_of(jax.profiler.ProfileData.from_file(str(file))):
            total[event.name] += event.duration_ns
    return [round(total[name] / CALLS / 1e3, 1) for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help=", ".join(KERNELS))
    parser.add_argument("--to", type=Path, help="a file for the lines, as JSON")
    asked = parser.parse_args()
    if unknown := set(asked.kernels) - set(KERNELS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(KERNELS)}")
    here = jax.devices()[0]
    if here.platform not in ("gpu", "cuda"):
        sys.exit(f"this needs an NVIDIA GPU; here is {here.device_kind}")
    jax.set_mesh(mesh.build(dict(data=1, fsdp=1, tensor=1), [here]))
    print(f"{here.device_kind}, JAX {jax.__version__}\n")
    print("| kernel | shape | constants | µs | apart |\n|---|---|---|---|---|")
    lines = []
    for name in asked.kernels or KERNELS:
        for kernel in KERNELS[name]():
            with ThreadPoolExecutor(COMPILING) as pool:
                programs = [pool.submit(lowered(kernel, values).compile) for values in kernel.tried]
            expected = None
            for values, program in zip(kernel.tried, programs, strict=True):
                said = ", ".join(f"{key} {value}" for key, value in values.items())
                if problem := program.exception():  # more shared memory than there is
                    print(f"| {name} | {kernel.shape} | {said} | {str(problem)[:80]} | |")
                    continue
                compiled = program.result()
                found = compiled(*kernel.arguments)
                expected = found if expected is None else expected
                far = apart(expected, found, None)
                taken = times(lambda run=compiled, k=kernel: run(*k.arguments), kernel.names)
                each = " + ".join(map(str, taken))
                print(f"| {name} | {kernel.shape} | {said} | {each} | {far:.1e} |", flush=True)
                lines.append(dict(kernel=name, shape=kernel.shape, us=taken, apart=far, **values))
    if asked.to:
        asked.to.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
