"""Fine-tuning steps by LoRA in Windlass and in transformers + peft, in turns, on one NVIDIA GPU.

    .venv/bin/python benchmarks/lora.py

The shape and the same random weights of Qwen2.5-0.5B in bfloat16, LoRA of rank 16 on all seven
maps in float32, AdamW, rows of 1024 tokens without padding. At the first step both adapters add
nothing, so that the losses must agree; then each takes a step in turn. The figure is the ratio of
speeds.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

SIZES: dict[str, Any] = dict(
    vocab=151_936, embed=896, mlp=4864, layers=24, heads=14, kv_heads=2, head_dim=64
)
THETA, EPS, RANK, RATE, CLIP = 1e6, 1e-6, 16, 2e-4, 1.0
ROWS, LENGTH = 16, 1024
WITHIN = 0.02  # nats, between first losses in bfloat16
WARM, ROUNDS = 3, 20

Step = Callable[[np.ndarray], float]


def ours() -> tuple[Step, dict[str, np.ndarray]]:
    """A step as `windlass train` compiles it, and the base by its names elsewhere."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from windlass.adapters import own
    from windlass.adapters.lora import Adapter
    from windlass.devices import mesh
    from windlass.devices.axes import cast
    from windlass.hub.names import to_tensors
    from windlass.layers.stack import arrange
    from windlass.models import qwen2
    from windlass.objectives import Carry
    from windlass.objectives.next_token import Objective
    from windlass.optim import Schedule
    from windlass.optim.adamw import Optimizer
    from windlass.program.step import Frozen, make_step, start

    jax.set_mesh(mesh.build(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1]))
    config = qwen2.Config(**SIZES, theta=THETA, eps=EPS, tied=True)
    model = eqx.filter_jit(lambda key: cast(config.init(key), "bfloat16"))(jax.random.key(0))
    tensors = {
        name: tensor.astype(np.float32) for name, tensor in to_tensors(model, qwen2.NAMES).items()
    }
    adapted = eqx.filter_jit(
        lambda model: Adapter(rank=RANK).adapt(model, names=qwen2.NAMES, key=jax.random.key(1))
    )(model)
    arrays, static = eqx.partition(arrange(adapted, remat="saved", unroll=1), eqx.is_array)
    weights, frozen = eqx.partition(arrays, own(arrays))
    optimizer = Optimizer(
        learning_rate=RATE, clip_norm=CLIP, weight_decay=0.0, schedule=Schedule(shape="constant")
    ).build(1000, weights)
    step = make_step(
        lambda weights, frozen: cast(eqx.combine(weights, frozen, static), "bfloat16"),
        Objective(),
        optimizer,
        steps=1000,
        microbatches=1,
        skips=0,
    )
    compiled = jax.jit(step, donate_argnums=0)
    state = start(weights, optimizer, Carry(), key=jax.random.key(2))
    position = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))

    def one(tokens: np.ndarray) -> float:
        nonlocal state
        batch = {
            "tokens": jnp.asarray(tokens[:, :-1]),
            "targets": jnp.asarray(tokens[:, 1:]),
            "weight": jnp.ones((ROWS, LENGTH)),
            "position": jnp.asarray(position),
            "document": jnp.zeros((ROWS, LENGTH), jnp.int32),
        }
        state, metrics = compiled(state, Frozen(frozen, {}), batch)
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return one, tensors


def theirs(tensors: dict[str, np.ndarray]) -> Step:
    """A step in transformers and peft, from the same base."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=SIZES["vocab"],
        hidden_size=SIZES["embed"],
        intermediate_size=SIZES["mlp"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"],
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        use_cache=False,
    )
    model: Any = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa")
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    model.load_state_dict(state, strict=False)  # the head is the embedding
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    model = get_peft_model(model.to("cuda", torch.bfloat16), lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)

    def one(tokens: np.ndarray) -> float:
        rows = torch.from_numpy(tokens.astype(np.int64)).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(input_ids=rows[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        return float(loss.detach())

    return one


def main() -> None:
    windlass, tensors = ours()
    sides = {"windlass": windlass, "transformers + peft": theirs(tensors)}
    random = np.random.default_rng(0)

    def rows() -> np.ndarray:
        return random.integers(SIZES["vocab"], size=(ROWS, LENGTH + 1)).astype(np.int32)

    first = rows()
    losses = {name: one(first) for name, one in sides.items()}
    print("step 1  " + "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
    apart = max(losses.values()) - min(losses.values())
    if not apart < WITHIN:
        sys.exit(f"the first losses are {apart:.2g} apart, more than {WITHIN}: not the same model")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(WARM + ROUNDS):
        tokens = rows()
        for name, one in sides.items():
            began = time.perf_counter()
            one(tokens)
            if number >= WARM:
                seconds[name].append(time.perf_counter() - began)
    for name, times in seconds.items():
        middle = statistics.median(times)
        print(f"{name:<20}{1000 * middle:>7,.0f} ms {ROWS * LENGTH / middle:>10,.0f} tokens/s")
    ours_, theirs_ = seconds.values()
    ratios = [b / a for a, b in zip(ours_, theirs_, strict=True)]
    spread = f"rounds from {min(ratios):.2f} to {max(ratios):.2f}"
    print(f"\nwindlass to transformers + peft: {statistics.median(ratios):.2f} ({spread})")


if __name__ == "__main__":
    main()
