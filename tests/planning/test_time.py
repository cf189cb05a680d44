"""How long steps take, against measured ones and against arithmetic."""

import math

import pytest

import windlass
from windlass.analysis.work import AttentionCall, Collective, Matmul
from windlass.devices.chips import Chip
from windlass.errors import UserError
from windlass.layers.pattern import Pattern
from windlass.planning import efficiency, targets, traced
from windlass.planning.efficiency import attention_seconds, matmul_seconds, rates
from windlass.planning.plan import Plan
from windlass.planning.time import by_table, collective_seconds
from windlass.planning.topology import Reach


def product(m, n, k, dtype="bfloat16") -> Matmul:
    return Matmul(m, n, k, 1, dtype, 2 * (m * k + k * n + m * n), 1, "matmuls")


def of(name):
    return rates(targets.find(name).chip)


def share(name, *shape) -> float:
    """Of the peak."""
    one = product(*shape)
    return one.flops / matmul_seconds(one, of(name)) / of(name).peak["bfloat16"]


# By a microbenchmark on one H200, in the best of three layouts of the factors.
@pytest.mark.parametrize(
    ("shape", "teraflops"),
    [
        ((32768, 4864, 896), 865),
        ((32768, 2048, 2048), 870),
        ((16384, 3072, 1024), 779),
        ((16384, 14336, 4096), 884),
        ((32768, 6144, 2048), 918),
    ],
)
def test_products_on_an_h200_reach_in_a_long_run_a_little_less_than_measured_in_a_short_one(
    shape, teraflops
):
    assert 0.7 < share("h200", *shape) * 989 / teraflops < 1


def test_products_on_a_tpu_lose_what_fills_up_its_matrix_units():
    assert share("v6e-1", 8192, 8192, 8192) == pytest.approx(827 / 918, rel=0.02)  # as measured
    for name, left in ("v6e-1", 1152 / 1280), ("v5e-1", 1):
        shares = [share(name, 65536, 8192, k) for k in (1152, 1280)]
        assert shares[0] / shares[1] == pytest.approx(left, rel=0.01)


def test_a_product_with_a_thin_matrix_takes_as_long_as_memory_does():
    thin = product(32768, 16, 2048)
    stream = of("h200").bandwidth * efficiency.find(targets.find("h200").chip).memory
    assert matmul_seconds(thin, of("h200")) == pytest.approx(thin.moved / stream, rel=0.2)


def test_float32_takes_six_products_of_bfloat16_where_it_has_no_units():
    slow, fast = (
        matmul_seconds(product(8192, 8192, 8192, dtype), of("v5e-1"))
        for dtype in ("float32", "bfloat16")
    )
    assert slow / fast == pytest.approx(6, rel=0.01)


@pytest.mark.parametrize(
    ("heads", "forward", "both"), [(40, 3.2e-3, 15.2e-3), (72, 5.5e-3, 26.2e-3)]
)
def test_attention_on_a_v5p_takes_what_axlearn_measured(heads, forward, both):
    call = AttentionCall(2, 8192, 8192, heads, heads, 128, Pattern(window=4096), "bfloat16", 1)
    there = attention_seconds(call, of("v5p-8"))
    backward = call._replace(pattern=call.pattern._replace(is_backward=True))
    back = attention_seconds(backward, of("v5p-8"))
    assert there == pytest.approx(forward, rel=0.1)
    assert there + back == pytest.approx(both, rel=0.1)


def test_heads_of_half_the_width_of_the_matrix_units_use_half_of_them():
    wide = AttentionCall(8, 4096, 4096, 16, 16, 128, Pattern(), "bfloat16", 1)
    narrow = wide._replace(dim=64)
    vector = wide.pairs * 5 / efficiency.find(targets.find("v5e-1").chip).vector
    times = [attention_seconds(call, of("v5e-1")) - vector for call in (wide, narrow)]
    assert times[0] == pytest.approx(times[1], rel=0.01)


def test_a_sum_goes_round_twice_and_between_groups_only_their_pieces():
    links = Reach(8, 1, 100e9, False, None)
    table = efficiency.find(targets.find("v5e-8").chip)
    gathered = Collective("all-gather", ("fsdp",), 8e9, 1, "elementwise")
    seconds = collective_seconds(gathered, links, table)
    assert seconds == pytest.approx(7e9 / (100e9 * table.links))
    summed = gathered._replace(kind="all-reduce")
    assert collective_seconds(summed, links, table) == pytest.approx(2 * seconds)
    far = links._replace(groups=2, network=10e9)
    network = 2 * 1e9 * (1 / 2) / (10e9 * table.links)
    assert collective_seconds(summed, far, table) == pytest.approx(2 * seconds + network)


def recipe(embed, mlp, layers, heads, kv_heads, head_dim, batch, family="qwen3", **train):
    return {
        "model": dict(
            family=family, vocab=151_936, embed=embed, mlp=mlp, layers=layers, heads=heads,
            kv_heads=kv_heads, head_dim=head_dim, theta=1e6, tied=True,
        ),
        "tokenizer": {"kind": "byte"},
        "data": {"source": {"kind": "stories"}, "length": 1024},
        "optim": {"kind": "adamw", "learning_rate": 1e-3},
        "train": {"steps": 10, "batch": batch} | train,
    }  # fmt: skip


def test_a_step_takes_on_an_h200_what_it_was_measured_to():
    target = targets.find("h200")
    half = recipe(896, 4864, 24, 14, 2, 64, batch=32, family="qwen2")
    found = by_table(traced.trace(traced.described(half, target), target))
    assert abs(found.seconds * 1e3 / 212.6 - 1) < found.error  # benchmarks/gpu.json
    assert found.bound == "compute"
    assert math.isclose(sum(found.parts.values()), found.seconds)
    assert list(found.parts) == [
        "matmuls",
        "attention",
        "head",
        "elementwise",
        "loops",
        "optimiser",
    ]


def test_a_chip_without_a_peak_has_no_time():
    with pytest.raises(UserError) as refused:
        rates(Chip("slide rule", "gpu", {}, 2**30, ("slide rule",)))
    assert str(refused.value) == (
        "no speed estimate for slide rules: their peak is not in the catalogue"
    )


def recurrent(length, state=512, layers=4) -> dict:
    return {
        "model": dict(family="gru", vocab=1024, embed=512, state=state, layers=layers),
        "tokenizer": {"kind": "byte"},
        "data": {"source": {"kind": "stories"}, "length": length},
        "optim": {"kind": "adamw", "learning_rate": 1e-3},
        "train": {"steps": 10, "batch": 8, "remat": "none", "layers_per_loop": 1},
    }


@pytest.mark.parametrize("on", ["h200", "v5e-1"])
def test_a_loop_over_time_takes_a_latency_a_round(on):
    target = targets.find(on)
    short, long = (
        by_table(traced.trace(traced.described(recurrent(length), target), target))
        for length in (1024, 2048)
    )
    table = efficiency.find(target.chip)
    assert long.loops is not None and short.loops is not None
    rounds, matmuls = long.loops.rounds - short.loops.rounds, 3 * 4 * 1024
    assert rounds >= 2 * 4 * 1024  # of each layer, forward and backward
    assert long.parts["loops"] - short.parts["loops"] == pytest.approx(rounds * table.loop_round)
    assert long.seconds - short.seconds > rounds * table.loop_round + matmuls * table.start
    assert long.bound == {"h200": "latency", "v5e-1": "memory"}[on]


def test_the_latency_of_a_loop_has_its_source_beside_it_where_it_bounds_the_step():
    plan = windlass.plan(recurrent(1024), on="h200")
    assert isinstance(plan, Plan) and plan.time is not None
    each = plan.as_dict()["time"]["loops"]
    table = efficiency.find(targets.find("h200").chip)
    assert (each["latency_seconds"], each["source"]) == (
        table.loop_round,
        "GRUs measured on an H200",
    )
    assert plan.time.parts["loops"] == pytest.approx(each["rounds"] * table.loop_round)
    rounds = f"{each['rounds']:,.0f} rounds of loops a step"
    assert f"{rounds}, at 5.00 µs each: GRUs measured on an H200" in plan.notes
    on_tpus = efficiency.find(targets.find("v5e-1").chip)
    assert on_tpus.loop_source == "assumed: no loop was measured on a TPU"


@pytest.mark.parametrize(
    ("units", "rows", "forward", "both"),
    [(512, 8, 7.1, 25.7), (512, 64, 8.1, 29.0), (1024, 32, 8.3, 32.0)],
)
def test_a_round_of_a_gru_takes_on_an_h200_what_it_was_measured_to(units, rows, forward, both):
    table = of("h200")
    step = matmul_seconds(product(rows, 3 * units, units), table)
    back = matmul_seconds(product(rows, units, 3 * units), table)
    gradient = matmul_seconds(product(units, 3 * units, rows), table)
    latency = table.efficiency.loop_round
    assert 1e6 * (step + latency) == pytest.approx(forward, rel=0.4)
    assert 1e6 * (step + back + gradient + 2 * latency) == pytest.approx(both, rel=0.4)
