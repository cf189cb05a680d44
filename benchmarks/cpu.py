"""Steps of the same small model here and in transformers + PyTorch, interleaved in one run.

    make bench

Prints the ratio of tokens a second; times of a noisy machine mean little by themselves.
"""

import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

LAYERS, EMBED, MLP, HEADS, KV_HEADS, VOCAB = 6, 256, 768, 8, 4, 4096
ROWS, LENGTH, ROUNDS = 8, 256, 8


def batches():
    random = np.random.default_rng(0)
    while True:
        yield random.integers(VOCAB, size=(ROWS, LENGTH + 1)).astype(np.int32)


def ours():
    """A function that takes one training step in Windlass."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from windlass.layers.stack import arrange
    from windlass.models.qwen3 import Config
    from windlass.objectives import Carry
    from windlass.objectives.next_token import Objective
    from windlass.optim.adamw import Optimizer
    from windlass.training.step import Frozen, make_step, start

    config = Config(
        vocab=VOCAB,
        embed=EMBED,
        mlp=MLP,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=EMBED // HEADS,
        theta=1e4,
    )
    model = arrange(config.init(jax.random.key(0)), remat="none", unroll=LAYERS)
    weights, static = eqx.partition(model, eqx.is_array)
    optimizer = Optimizer(learning_rate=1e-3).build(1000)
    step = make_step(
        lambda weights, frozen: eqx.combine(weights, frozen, static),
        Objective(),
        optimizer,
        microbatches=1,
        skips=0,
    )
    compiled = jax.jit(step, donate_argnums=0)
    frozen = Frozen(eqx.filter(weights, lambda _: False), {})
    state = start(weights, optimizer, Carry(), key=jax.random.key(0))
    position = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (ROWS, LENGTH))

    def one(tokens: np.ndarray) -> float:
        nonlocal state
        batch = {
            "tokens": jnp.asarray(tokens[:, :-1]),
            "targets": jnp.asarray(tokens[:, 1:]),
            "weight": jnp.ones((ROWS, LENGTH)),
            "position": position,
            "document": jnp.zeros_like(position),
        }
        state, metrics = compiled(state, frozen, batch)
        return float(metrics["loss"])

    return one


def theirs():
    """A function that takes one training step in transformers, eager."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=EMBED,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=EMBED // HEADS,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def one(tokens: np.ndarray) -> float:
        rows = torch.from_numpy(tokens.astype(np.int64))
        logits = model(input_ids=rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return one


def main() -> None:
    sides = {"windlass": ours(), "transformers": theirs()}
    rows = batches()
    for one in sides.values():
        one(next(rows))  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        tokens = next(rows)
        for name, one in sides.items():
            began = time.perf_counter()
            one(tokens)
            seconds[name].append(time.perf_counter() - began)
    speed = {name: ROWS * LENGTH / statistics.median(times) for name, times in seconds.items()}
    for name, rate in speed.items():
        print(f"{name:<14}{rate:8,.0f} tokens/s")
    print(f"{'ratio':<14}{speed['windlass'] / speed['transformers']:8.2f}")


if __name__ == "__main__":
    main()
