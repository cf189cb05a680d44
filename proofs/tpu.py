"""The TPU compiler, without a TPU, takes the splash kernel and whole training steps that use it:
of all weights, with layers that see a window, and of an adapter beside a frozen model.

It needs libtpu, which there is for x86-64 hosts: `pip install 'windlass[tpu]'`.
"""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import NamedSharding

from windlass.adapters import own
from windlass.adapters.lora import Adapter
from windlass.devices.axes import cast, layout, placements
from windlass.devices.chips import find
from windlass.layers.stack import arrange
from windlass.models import gemma, llama, qwen2, qwen3
from windlass.objectives.next_token import Objective
from windlass.training.step import Frozen, make_step, start

LENGTH = 1024
MODELS = {
    "Qwen3-0.6B": qwen3.Config(
        vocab=151_936,
        embed=1024,
        mlp=3072,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        theta=1e6,
    ),
    "Qwen2.5-0.5B": qwen2.Config(
        vocab=151_936,
        embed=896,
        mlp=4864,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        theta=1e6,
        tied=True,
    ),
    "Llama-3.1-8B": llama.Config(
        vocab=128_256,
        embed=4096,
        mlp=14_336,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        theta=5e5,
    ),
    "Gemma-3-1B": gemma.Config(
        vocab=262_144,
        embed=1152,
        mlp=6912,
        layers=26,
        heads=4,
        kv_heads=1,
        head_dim=256,
        theta=1e6,
        local_theta=1e4,
        window=512,
    ),
}
CASES = [
    # model, rank of the adapter, topology, data × fsdp × tensor, rows
    ("Qwen3-0.6B", None, "v5e:2x4", (1, 8, 1), 32),
    ("Qwen3-0.6B", None, "v5e:2x4", (2, 2, 2), 32),
    ("Qwen3-0.6B", None, "v6e:1x1", (1, 1, 1), 4),
    ("Gemma-3-1B", None, "v5e:2x4", (1, 8, 1), 16),
    ("Qwen2.5-0.5B", 32, "v5e:2x4", (8, 1, 1), 64),
    ("Llama-3.1-8B", 16, "v5e:2x4", (1, 8, 1), 8),
]


def prove() -> dict:
    cases = [compiled(*case) for case in CASES]
    return {"holds": all(case["fits"] and case["kernels"] > 0 for case in cases), "cases": cases}


def compiled(
    name: str, rank: int | None, topology: str, sizes: tuple[int, int, int], rows: int
) -> dict:
    chips = {"chips_per_host_bounds": (1, 1, 1)} if topology.endswith("1x1") else {}
    devices = topologies.get_topology_desc(topology, "tpu", **chips).devices
    mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor"), devices=devices)
    began = time.time()

    def made():
        model = MODELS[name].init(jax.random.key(0))
        if rank is None:
            return model
        adapter = Adapter(rank=rank, dropout=0.05)
        return adapter.adapt(cast(model, "bfloat16"), names={}, key=jax.random.key(1))

    with jax.set_mesh(mesh):
        model = arrange(eqx.filter_eval_shape(made), remat="saved", unroll=1)
        arrays, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
        arrays = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            arrays,
            placements(arrays, mesh),
        )
        trained = jax.tree.map(lambda x: True, arrays) if rank is None else own(arrays)
        weights, frozen = eqx.partition(arrays, trained)
        optimizer, objective = optax.adamw(1e-3), Objective()

        def joined(weights, frozen):
            return cast(eqx.combine(weights, frozen, static), "bfloat16")

        step = make_step(joined, objective, optimizer, microbatches=1, skips=0)
        batch = _batch(mesh, rows)
        carry = objective.start(None, batch)
        state = jax.eval_shape(
            lambda weights: start(weights, optimizer, carry, key=jax.random.key(0)), weights
        )
        state = jax.tree.map(lambda x: _placed(x, mesh), state)
        done = jax.jit(step, donate_argnums=0).lower(state, Frozen(frozen, {}), batch).compile()
    memory = done.memory_analysis()
    used = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    chip = find(devices[0].device_kind)
    assert chip is not None
    return {
        "model": name,
        "trained": "all weights" if rank is None else f"LoRA of rank {rank}",
        "topology": topology,
        "mesh": "x".join(map(str, sizes)),
        "batch": f"{rows} x {LENGTH}",
        "kernels": done.as_text().count('custom_call_target="tpu_custom_call"'),
        "gib_a_chip": round(used / 2**30, 2),
        "fits": used < chip.memory_bytes,
        "seconds_to_compile": round(time.time() - began, 1),
    }


def _batch(mesh, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (rows, LENGTH)
    place = NamedSharding(mesh, layout(("batch", ""), shape, mesh))
    whole = dict.fromkeys(("tokens", "targets", "position", "document"), jnp.int32)
    kinds = whole | {"weight": jnp.float32}
    return {name: jax.ShapeDtypeStruct(shape, kind, sharding=place) for name, kind in kinds.items()}


def _placed(x, mesh):
    spec = jax.sharding.PartitionSpec() if x.sharding is None else x.sharding.spec
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
