"""Claimed speeds and prices, compared with the planner."""

import functools
import json
from typing import Any, NamedTuple

from windlass.analysis.fusion import Amount
from windlass.planning import prices, targets, traced
from windlass.planning.targets import Target
from windlass.planning.time import by_table, model_flops

REGION = "us-central1"
BATCH = 64  # where the claim has none, or it changes nothing
HALF = dict(embed=896, mlp=4864, layers=24, heads=14, kv_heads=2, head_dim=64)
HALF |= dict(family="qwen2", vocab=151_936, theta=1e6, tied=True)  # Qwen2.5-0.5B
THREE = HALF | dict(embed=2048, mlp=11_008, layers=36, heads=16, head_dim=128)  # Qwen2.5-3B
# Plain decoders with as many weights as recursive ones are claimed to have, each used once.
PLAIN = {
    "50M": dict(embed=512, mlp=2048, layers=12),
    "200M": dict(embed=1024, mlp=4096, layers=12),
    "330M": dict(embed=1024, mlp=4096, layers=19),
}
# Batch and steps per second, of a recursive model's guide: on one core of a v3, on a v3-8.
V3 = {"50M": (32, 2.5, 256, 16), "200M": (16, 1.0, 128, 8), "330M": (8, 0.5, 64, 4)}


class Needed(NamedTuple):
    """Compute that a claimed speed needs, and the peak of the devices."""

    flops: Amount  # per second
    peak: Amount  # of all devices together

    @property
    def share(self) -> Amount:
        """Share of the peak; above 1 it is impossible."""
        return self.flops / self.peak


def recipe(model: dict[str, Any], batch: int, length: int) -> dict[str, Any]:
    return {
        "model": model,
        "tokenizer": {"kind": "byte"},
        "data": {"source": {"kind": "stories"}, "length": length},
        "optim": {"kind": "adamw", "learning_rate": 1e-3},
        "train": {"steps": 100_000, "batch": batch, "remat": "full"},
    }


def needed(of: dict[str, Any], target: Target, rate: Amount) -> Needed:
    """Compute to train a recipe on this many sequences per second, without recomputation."""
    compute = traced.described(of, target).compute
    peak = target.chip.peak[compute] * target.devices
    return Needed(_sequence_flops(json.dumps(of)) * rate, peak)


@functools.cache
def _sequence_flops(of: str) -> Amount:
    """Model FLOPs of one sequence, the same on all chips."""
    described = traced.described(json.loads(of), targets.find("h200"))
    return model_flops(described) / described.batches.rows


def planned(of: dict[str, Any], target: Target) -> Amount:
    """Throughput in sequences per second, by the planner."""
    step = by_table(traced.trace(traced.described(of, target), target))
    return of["train"]["batch"] / step.seconds


def page() -> str:
    """Page of documentation that compares claims with the planner."""
    return "\n".join([ABOUT, *_speeds(), "", *_core(), "", *_rents(), "", *_length()]) + "\n"


ABOUT = """\
# Claims in public guides, compared with the planner

Written by `make docs` from what `windlass plan` computes with; nothing here was typed in but the
claims. The share is of the peak of all chips together, for the FLOPs that a model needs,
without recomputation: above 100% a speed is impossible, and above about 75% nobody has shown one.
"""


def _speeds() -> list[str]:
    small, three = recipe(HALF, 32, 1000), recipe(THREE, 32, 2048)
    lines = [
        "## Speeds",
        "",
        "| claim | needs | share of the peak | verdict |",
        "|---|---|---|---|",
    ]

    def row(claim: str, of: dict[str, Any], on: str, rate: Amount) -> None:
        need = needed(of, targets.find(on), rate)
        figures = f"{_two(need.flops / 1e12)} of {_two(need.peak / 1e12)} TFLOP/s"
        lines.append(f"| {claim} | {figures} | {need.share:.0%} | {_verdict(need.share)} |")

    row("Qwen2.5-0.5B on v5e-8, 320 sequences of 1,000 tokens per second", small, "v5e-8", 320)
    row("the same guide: an epoch of 2,054 sequences in 10 minutes", small, "v5e-8", 2054 / 600)
    row("Qwen2.5-0.5B on two T4, 110 sequences of 1,000 tokens per second", small, "2xt4", 110)
    for on in ("v6e-1", "v6e-4", "v6e-8"):
        row(f"a model of 3B at 50,000 tokens per second on {on}", three, on, 50_000 / 2048)
    large = recipe(_plain("330M"), BATCH, 512)
    row("330M weights on an A100, 15 steps of 32 sequences per second", large, "a100", 15 * 32)
    row("330M weights on v4-8, 8 steps of 128 sequences per second", large, "v4-8", 8 * 128)
    at_once = planned(small, targets.find("v5e-8"))
    return [
        *lines,
        "",
        f"A plan for the first has {_two(at_once)} sequences per second, at 4 per chip. The two "
        f"claims of that guide differ by a factor of {_two(320 * 600 / 2054)}. T4 have no units "
        "for bfloat16: the peak is that of float16.",
    ]


def _two(value: Amount) -> str:
    """Number in two digits."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def _verdict(share: Amount) -> str:
    if share > 1:
        return "impossible"
    if share > 0.75:
        return "more than anybody has shown"
    return "at the edge of the best" if share > 0.6 else "possible"


def _plain(name: str) -> dict[str, Any]:
    sizes = dict(heads=8, kv_heads=8, head_dim=PLAIN[name]["embed"] // 8, vocab=1024)
    return dict(family="llama", theta=1e4, **PLAIN[name], **sizes)


def _core() -> list[str]:
    whole = targets.find("v3-8")
    head = "| weights | one core | v3-8 | speed-up | of 8 cores | share of the peak of v3-8 |"
    lines = ["## Eight cores of a v3 beside one", "", head, "|---|---|---|---|---|---|"]
    for name, (batch, steps, more, faster) in V3.items():
        one, eight = batch * steps, more * faster
        share = needed(recipe(_plain(name), BATCH, 512), whole, eight).share
        lines.append(
            f"| {name} | batch {batch}, {steps:g}/s | batch {more}, {faster}/s | "
            f"{eight / one:.0f}x | {eight / one / whole.devices:.1f}x each | {share:.0%} |"
        )
    return [
        *lines,
        "",
        "Eight cores are at most eight times as fast as one. The shares are of sequences of 512 "
        "tokens and each weight used once; the recursion of that model, 35 passes, comes on top.",
    ]


def _rents() -> list[str]:
    known = prices.read(prices.SHIPPED)
    head = "| slice | claimed, an hour | on demand | spot |"
    lines = [f"## Prices ({REGION}, {known.date})", "", head, "|---|---|---|---|"]
    for on, claimed in (
        ("v5e-8", "$4.80 on demand, $1.20 preemptible"),
        ("v6e-4", "$5 to 6 on demand, $1 to 2 preemptible"),
    ):
        demand, spot = (_rent(on, kind) for kind in ("on_demand", "spot"))
        lines.append(f"| {on} | {claimed} | ${demand:.2f} | ${spot:.2f} |")
    one = _rent("v5e-8", "on_demand") / 8
    return [*lines, "", f"${one:.2f} is what one chip of a v5e costs on demand."]


def _rent(on: str, kind: str) -> Amount:
    """USD per hour of a whole slice."""
    target = targets.find(on)
    offers = prices.read(prices.SHIPPED).find(target.chip.slug, hosts=target.hosts)
    price = prices.cheapest(offers, kind, REGION)
    assert price is not None
    return getattr(price, kind) * target.chips


def _length() -> list[str]:
    claim = 'A model of 3B, "100K steps, 6 to 14 days, $700 to 1600", at 50,000 tokens per second:'
    lines = [
        "## A run",
        "",
        claim,
        "",
        "| step | tokens | days | v6e-4 | v6e-8 |",
        "|---|---|---|---|---|",
    ]
    for size, length in ((32, 2048), (256, 4096)):
        tokens = 100_000 * size * length
        hours = tokens / 50_000 / 3600
        rents = [f"${_rent(on, 'on_demand') * hours:,.0f}" for on in ("v6e-4", "v6e-8")]
        lines.append(
            f"| {size} x {length} | {tokens / 1e9:.1f}e9 | {hours / 24:.1f} | {' | '.join(rents)} |"
        )
    days = [f"${_rent('v6e-4', 'on_demand') * 24 * count:,.0f}" for count in (6, 14)]
    return [
        *lines,
        "",
        f"No row has both the days and the money of the claim. 6 to 14 days of a v6e-4 are "
        f"{days[0]} to {days[1]} on demand.",
    ]
