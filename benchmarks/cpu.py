"""Training steps of one model in Windlass and in transformers + PyTorch, in turns, in one run.

    python benchmarks/cpu.py

The same weights, tokens, AdamW and number of threads, in float32. First the losses of all must
agree; then each takes a step in turn, so that whatever else the machine does falls on all alike.
The figure is the ratio of speeds: times of a machine that others use mean little by themselves.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import table  # noqa: E402
from benchmarks.table import Line  # noqa: E402

# Layers, width, heads and length of nanoGPT's small example, with a vocabulary of words.
VOCAB, EMBED, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 8192, 384, 1024, 6, 6, 2, 64
THETA, EPS = 1e4, 1e-6
ROWS, LENGTH = 4, 256
RATE, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0
AGREE, WITHIN = 4, 1e-3  # steps whose losses must agree, and how closely
ROUNDS, SECONDS = 15, 180  # so many, or as many as fit into the time; at least three
GOAL = 1.2

Step = Callable[[np.ndarray], float]  # from rows of tokens to the loss before the update


def batches() -> Iterator[np.ndarray]:
    """Rows with something to learn: half of their tokens follow from the one before."""
    random = np.random.default_rng(0)
    follows = random.permutation(VOCAB)
    while True:
        rows = random.integers(VOCAB, size=(ROWS, LENGTH + 1))
        for place in range(1, LENGTH + 1):
            known = random.random(ROWS) < 0.5
            rows[known, place] = follows[rows[known, place - 1]]
        yield rows.astype(np.int32)


def ours() -> tuple[Step, dict[str, np.ndarray], int]:
    """A step as `windlass train` compiles it, the first weights by their names elsewhere, and how
    many there are."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from windlass.devices import mesh
    from windlass.hub.names import to_tensors
    from windlass.layers.stack import arrange
    from windlass.models import qwen3
    from windlass.objectives import Carry
    from windlass.objectives.next_token import Objective
    from windlass.optim import Schedule
    from windlass.optim.adamw import Optimizer
    from windlass.program.step import Frozen, make_step, start

    jax.config.update("jax_platforms", "cpu")
    jax.set_mesh(mesh.build(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1]))
    config = qwen3.Config(
        vocab=VOCAB,
        embed=EMBED,
        mlp=MLP,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        theta=THETA,
        eps=EPS,
        tied=True,
    )
    model = eqx.filter_jit(config.init)(jax.random.key(0))
    model = arrange(model, remat="saved", unroll=1)  # as they are where a recipe is silent
    tensors = to_tensors(model, qwen3.NAMES)
    weights, static = eqx.partition(model, eqx.is_array)
    optimizer = Optimizer(
        learning_rate=RATE,
        beta1=BETAS[0],
        beta2=BETAS[1],
        weight_decay=DECAY,
        clip_norm=CLIP,
        schedule=Schedule(shape="constant"),
    ).build(1000, weights)
    step = make_step(
        lambda weights, frozen: eqx.combine(weights, frozen, static),
        Objective(),
        optimizer,
        steps=1000,
        microbatches=1,
        skips=0,
    )
    compiled = jax.jit(step, donate_argnums=0)
    frozen = Frozen(eqx.filter(weights, lambda _: False), {})
    state = start(weights, optimizer, Carry(), key=jax.random.key(0))
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
        state, metrics = compiled(state, frozen, batch)
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return one, tensors, sum(x.size for x in jax.tree.leaves(weights))


def theirs(tensors: dict[str, np.ndarray], *, compiled: bool) -> Step:
    """A step in transformers, from the same weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=EMBED,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = Qwen3ForCausalLM(config)
    state = {name: torch.from_numpy(tensor.copy()) for name, tensor in tensors.items()}
    model.load_state_dict(state, strict=False)  # the head is the embedding
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=RATE, betas=BETAS, eps=1e-8, weight_decay=DECAY, fused=True
    )

    def loss_of(rows):
        logits = model(input_ids=rows[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    function = torch.compile(loss_of) if compiled else loss_of

    def one(tokens: np.ndarray) -> float:
        loss = function(torch.from_numpy(tokens.astype(np.int64)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return float(loss.detach())

    return one


def check(sides: dict[str, Step], rows: Iterator[np.ndarray]) -> None:
    """The first steps, which compile too: the losses must be the same."""
    for number in range(1, AGREE + 1):
        tokens = next(rows)
        losses = {name: one(tokens) for name, one in sides.items()}
        apart = max(losses.values()) - min(losses.values())
        print(f"step {number}  " + "  ".join(f"{name} {x:.5f}" for name, x in losses.items()))
        if not apart < WITHIN:
            sys.exit(f"the losses are {apart:.2g} apart, more than {WITHIN:g}: not the same model")


def main() -> None:
    asked = table.parser(__doc__).parse_args()
    windlass, tensors, parameters = ours()
    eager, compiled = theirs(tensors, compiled=False), theirs(tensors, compiled=True)
    sides = {"windlass": windlass, "torch eager": eager, "torch compiled": compiled}
    print(
        f"{parameters / 1e6:.1f}M parameters, {LAYERS} layers of {EMBED}, batches of "
        f"{ROWS} × {LENGTH} tokens, float32, {len(os.sched_getaffinity(0))} threads"
    )
    rows = batches()
    check(sides, rows)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    start = time.perf_counter()
    for number in range(ROUNDS):
        if number >= 3 and time.perf_counter() - start > SECONDS:
            break
        tokens = next(rows)
        for name, one in sides.items():
            began = time.perf_counter()
            one(tokens)
            seconds[name].append(time.perf_counter() - began)
    print(f"\n{'':<16}{'median':>10}{'fastest':>10}{'slowest':>10}{'tokens/s':>10}")
    for name, times in seconds.items():
        middle = statistics.median(times)
        shown = "".join(f"{1000 * x:>7,.0f} ms" for x in (middle, min(times), max(times)))
        print(f"{name:<16}{shown}{ROWS * LENGTH / middle:>10,.0f}")
    best = min(list(sides)[1:], key=lambda name: statistics.median(seconds[name]))
    # Round by round, so that a slow moment of the machine is divided by one just as slow.
    ratios = [a / b for a, b in zip(seconds[best], seconds["windlass"], strict=True)]
    spread = f"rounds from {min(ratios):.2f} to {max(ratios):.2f}"
    print(f"\nwindlass to {best}: {statistics.median(ratios):.2f} ({spread}; the goal is {GOAL})")
    speeds = {name: ROWS * LENGTH / statistics.median(times) for name, times in seconds.items()}
    line = Line(
        f"training step, {parameters / 1e6:.1f}M parameters on a CPU",
        f"{speeds['windlass']:,.0f} tokens/s",
        f"{speeds[best]:,.0f} tokens/s {best}",
        statistics.median(ratios),
    )
    table.finish([line], asked.to)


if __name__ == "__main__":
    main()
