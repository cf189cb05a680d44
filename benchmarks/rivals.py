"""Training steps in transformers, PyTorch and peft, as people run them and tuned."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy

RATE, BETAS, DECAY, CLIP = 1e-4, (0.9, 0.95), 0.1, 1.0
CHUNK = 4096  # tokens whose logits are there at a time, of the tuned side
LOW = torch.bfloat16


class Begin(NamedTuple):
    """A model to be trained, with its first weights."""

    config: dict[str, Any]  # config.json
    tensors: dict[str, np.ndarray]
    rank: int | None  # of LoRA; None: all weights are trained
    accumulation: int


def side(begin: Begin, *, is_tuned: bool) -> tuple[Callable, Callable, Callable]:
    """Step, wait and peak memory of a model in PyTorch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _model(begin).to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=1e-8, fused=True)
    loss_of = _tuned_loss(model, begin.rank) if is_tuned else _loss(model)

    def step(tokens: np.ndarray) -> torch.Tensor:
        rows = torch.from_numpy(tokens.astype(np.int64)).to(device, non_blocking=True)
        total = torch.zeros((), device=device)
        for part in rows.chunk(begin.accumulation):
            with torch.autocast(device, LOW):
                loss = loss_of(part) / begin.accumulation
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    return step, wait, lambda: torch.cuda.max_memory_allocated() if device == "cuda" else 0


def _model(begin: Begin) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**begin.config, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    state = {name: torch.from_numpy(tensor.copy()) for name, tensor in begin.tensors.items()}
    model.load_state_dict(state, strict=False)  # a tied head is the embedding
    if begin.rank is None:
        return model
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=begin.rank, lora_alpha=2 * begin.rank, target_modules="all-linear")
    adapted: Any = get_peft_model(model.to(LOW), lora)
    return adapted


def _loss(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Cross-entropy of all logits in float32, as in the model's own loss, compiled."""

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=rows[:, :-1]).logits
        return cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    return torch.compile(loss_of)


def _tuned_loss(model: torch.nn.Module, rank: int | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The loss by a chunked head behind the compiled body."""
    whole: Any = model if rank is None else model.get_submodule("base_model.model")
    body = torch.compile(whole.model)

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        hidden = body(input_ids=rows[:, :-1]).last_hidden_state.flatten(0, 1)
        found = _ChunkedHead.apply(hidden, whole.lm_head.weight, rows[:, 1:].flatten())
        assert isinstance(found, torch.Tensor)
        return found

    return loss_of


@torch.compile
def _chunk(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, count: int):
    """Loss of some tokens, and the gradient of their logits."""
    logits = (hidden @ weight.T).float()
    sums = torch.logsumexp(logits, dim=-1)
    loss = (sums - logits.gather(1, targets[:, None])[:, 0]).sum() / count
    gradient = torch.exp(logits - sums[:, None])
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return loss, ((gradient - is_target.float()) / count).to(hidden.dtype)


class _ChunkedHead(torch.autograd.Function):
    """Linear cross-entropy in chunks of tokens, with gradients computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor):
        ctx.dtype = hidden.dtype
        rows, low = hidden.to(LOW), weight.to(LOW)
        of_hidden = torch.empty_like(rows)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        total = torch.zeros((), device=hidden.device)
        for first in range(0, len(rows), CHUNK):
            here = slice(first, first + CHUNK)
            loss, gradient = _chunk(rows[here], low, targets[here], len(rows))
            total += loss
            of_hidden[here] = gradient @ low
            if of_weight is not None:
                of_weight += (gradient.T @ rows[here]).float()
        ctx.save_for_backward(of_hidden, of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor):
        (scale,) = outputs
        of_hidden, of_weight = ctx.saved_tensors
        own = None if of_weight is None else of_weight * scale
        return (of_hidden * scale.to(LOW)).to(ctx.dtype), own, None
