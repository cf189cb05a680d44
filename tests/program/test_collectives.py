"""What devices say to each other in a training step: all of it is named here, with its bytes.

The compiler for CPUs never scatters a sum: gradients in pieces are summed whole and cut. So kinds
are not compared here, only which devices speak, whether they gather or sum, and how much.
"""

from typing import NamedTuple

import jax
import pytest

from tests import tiny
from tests.collectives import Collective, collectives
from tests.training.bench import Bench
from windlass.devices.axes import WEIGHTS, ArrayFacts, annotate
from windlass.devices.mesh import AXES

GATHERS = ("all-gather",)
SUMS = ("all-reduce", "reduce-scatter")
LENGTH, ROWS, WORD = 12, 16, 4  # of the bench's batch, in float32


class Share(NamedTuple):
    """Bytes that a step may move, from how many to how many."""

    least: int
    most: int


Table = dict[tuple[str, tuple[str, ...]], Share]


def named(sizes: dict[str, int], kv_heads: int = 2) -> Table:
    """What the design names on a mesh, from the shapes of the model and its batch."""
    config = tiny.wide("qwen3", kv_heads=kv_heads)
    model = tiny.made(config)
    rows = tuple(name for name in ("data", "fsdp") if sizes[name] > 1)

    def held(x: jax.Array, about: ArrayFacts) -> int:
        """A weight where it is used: gathered over fsdp, still in pieces over tensor."""
        shape = dict(zip(about.axes, x.shape[x.ndim - len(about.axes) :], strict=True))
        split = any(
            WEIGHTS.get(name) == "tensor" and size % sizes["tensor"] == 0
            for name, size in shape.items()
        )
        return WORD * x.size // (sizes["tensor"] if split else 1)

    def stored(x: jax.Array, about: ArrayFacts) -> int:
        return held(x, about) if "embed" in about.axes else 0

    def spread(x: jax.Array, about: ArrayFacts) -> int:
        return 0 if about.is_matrix else held(x, about)

    def by_token(x: jax.Array, about: ArrayFacts) -> int:
        return held(x, about) if "vocab" in about.axes else 0

    weights, in_pieces, vectors, tables = (
        sum(jax.tree.leaves(annotate(model, of))) for of in (held, stored, spread, by_token)
    )
    tokens = ROWS // (sizes["data"] * sizes["fsdp"]) * LENGTH
    stream = tokens * config.embed * WORD
    # Of a key head that several devices hold, each has a part of the gradient, of keys and values.
    surplus = kv_heads % sizes["tensor"] != 0
    keys = 2 * tokens * kv_heads * config.head_dim * WORD if surplus else 0
    # Loss, weight, norm and whether they are finite; the sum of squares of each array's pieces.
    figures = WORD * (2 * len(jax.tree.leaves(model)) + 16)
    table: Table = {}
    head = tables // 2  # and as much is the table of tokens
    if rows:
        # Every gradient once, over all devices with rows of their own.
        table["sum", rows] = Share(weights, weights + figures)
    if rows == ("fsdp",):
        table["sum", rows] = Share(weights - head, weights - head + figures)
    if len(rows) == 2:
        # The head's in two steps: the second sums what each device keeps of it, as of the tokens'.
        table["sum", rows] = Share(weights - tables, weights - tables + figures)
        for axis, size in (("fsdp", head), ("data", tables // sizes["fsdp"])):
            table["sum", (axis,)] = Share(size, size + figures)
    if sizes["fsdp"] > 1:
        # Gradients of tokens, of which each device gets the columns that it stores of the table.
        table["all-to-all", ("fsdp",)] = Share(stream, stream)
        # Every weight before it is used: forward, and again in the backward pass.
        table["gather", ("fsdp",)] = Share(in_pieces, 2 * in_pieces)
    if sizes["tensor"] > 1:
        # In each layer what attention and MLP add to the stream, and the gradients of what they
        # read: query, key, value, gate and up; but key and value are whole where heads are few.
        # Once the embedding, and the gradient at the head.
        layers, read = config.layers, 3 if surplus else 5
        least = (layers * (2 + 2) + 2) * stream
        # Of each token the largest logit, the sum over words and the target's logit, both ways.
        words = 6 * tokens * WORD
        most = (layers * (2 + read) + 2) * stream + layers * keys + words + vectors + figures
        table["sum", ("tensor",)] = Share(least, most)
    return table | {("figures", ()): Share(0, figures)}


def unnamed(found: list[Collective], table: Table) -> list[str]:
    """What a program moves that the table has not, or has less or more of."""
    moved: dict[tuple[str, tuple[str, ...]], int] = {}
    for kind, axes, size, count in found:
        motion = "gather" if kind in GATHERS else "sum" if kind in SUMS else kind
        # Sums of a few numbers may go over any devices.
        if motion == "sum" and (motion, axes) not in table:
            motion, axes = ("figures", ()) if size <= table["figures", ()].most else (motion, axes)
        moved[motion, axes] = moved.get((motion, axes), 0) + size * count
    wrong = []
    for place in moved | table:
        size, share = moved.get(place, 0), table.get(place, Share(0, 0))
        if not share.least <= size <= share.most:
            motion, axes = place
            wrong.append(f"{motion} over {' and '.join(axes)}: {size} bytes, not {share}")
    return wrong


def text(sizes: tuple[int, int, int]) -> str:
    bench = Bench("qwen3", sizes, 1)
    with jax.set_mesh(bench.mesh):
        lowered = bench.step.lower(bench.state, bench.frozen, bench.rows(0))
        return lowered.compile().as_text() or ""


@pytest.mark.parametrize(
    "sizes",
    [
        (2, 2, 2),
        *(pytest.param(one, marks=pytest.mark.long) for one in [(8, 1, 1), (1, 8, 1), (1, 1, 8)]),
    ],
    ids=str,
)
def test_a_step_gathers_and_sums_what_the_design_names_and_nothing_else(sizes):
    mesh = dict(zip(AXES, sizes, strict=True))
    assert unnamed(collectives(text(sizes), mesh), named(mesh)) == []


@pytest.mark.long
def test_a_layout_that_makes_devices_gather_what_they_share_is_found(monkeypatch):
    from windlass.devices import axes

    # As if somebody took the MLP out of one table and not out of the other.
    monkeypatch.delitem(axes.ACTIVATIONS, "mlp")
    sizes = {"data": 1, "fsdp": 1, "tensor": 8}
    found = unnamed(collectives(text((1, 1, 8)), sizes), named(sizes))
    assert any(wrong.startswith("gather over tensor: ") for wrong in found), found


LOOP = """HloModule step

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %x = f32[8] get-tuple-element(%p), index=1
  %sum = (bf16[4,2]{1,0}, f32[]) all-reduce(%x, %x), channel_id=1, GROUPS, to_apply=%add
  ROOT %t = (s32[], f32[8]) tuple(%x, %x)
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]) parameter(0)
  %n = s32[] constant(3)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

%begun (p: f32[2]) -> f32[4] {
  %p = f32[2] parameter(0)
  ROOT %g = f32[4] all-gather(%p), channel_id=2, replica_groups={{0,1},{2,3},{4,5},{6,7}}
}

%ended (p: f32[2]) -> f32[4] {
  %p = f32[2] parameter(0)
  ROOT %g = f32[4] all-gather(%p), channel_id=2, replica_groups={{0,1},{2,3},{4,5},{6,7}}
}

ENTRY %main (a: (s32[], f32[8])) -> f32[4] {
  %a = (s32[], f32[8]) parameter(0)
  %loop = (s32[], f32[8]) while(%a), condition=%condition, body=%bodyTRIPS
  %b = f32[2] get-tuple-element(%loop), index=1
  %start = f32[4] fusion(%b), kind=kCustom, calls=%begun
  %done = f32[4] fusion(%b), kind=kCustom, calls=%ended
  %s = (f32[2], f32[8]) all-gather-start(%b), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0)
  %d = f32[8] all-gather-done(%s)
  %r = f32[2] reduce-scatter(%d), channel_id=4, replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %o = f32[4] slice(%done)
}
"""


@pytest.mark.parametrize("trips", ["", ', backend_config={"known_trip_count":{"n":"3"}}'])
@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ("data",)),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}", ("fsdp",)),
        ("replica_groups=mesh['data'=2,'fsdp'=2,'tensor'=2] {'data','fsdp'}", ("data", "fsdp")),
        ("replica_groups={}", ("data", "fsdp", "tensor")),
    ],
)
def test_programs_of_all_compilers_are_read_with_their_loops_and_what_goes_on_beside(
    trips, groups, axes
):
    text = LOOP.replace("GROUPS", groups).replace("TRIPS", trips)
    assert collectives(text, {"data": 2, "fsdp": 2, "tensor": 2}) == [
        Collective("all-gather", ("data", "fsdp"), 32, 1),
        Collective("all-gather", ("tensor",), 16, 1),
        Collective("all-reduce", axes, 20, 3),
        Collective("reduce-scatter", ("data", "fsdp", "tensor"), 64, 1),
    ]
