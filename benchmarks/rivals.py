"""Training steps in transformers, PyTorch and peft, as people run them and tuned."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy

RATE, BETAS, DECAY, CLIP = 1e-4, (0.9, 0.95), 0.1, 1.0
CHUNK = 4096  # tokens whose logits are there at a time, of the tuned side
LOW = torch.bfloat16
IGNORED = -100  # target of a position that is not trained on
LONGEST = 2048  # tokens of a document at most


class Begin(NamedTuple):
    """A model to be trained, with its first weights."""

    config: dict[str, Any]  # config.json
    tensors: dict[str, np.ndarray]
    rank: int | None  # of LoRA; None: all weights are trained
    accumulation: int


def side(begin: Begin, *, is_tuned: bool) -> tuple[Callable, Callable, Callable]:
    """Step, wait and peak memory of a model in PyTorch, of rows of tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _model(begin, device)
    loss_of = _tuned_loss(model, begin.rank) if is_tuned else _loss(model)

    def parts(tokens: np.ndarray) -> Iterator[torch.Tensor]:
        rows = torch.from_numpy(tokens.astype(np.int64)).to(device, non_blocking=True)
        for part in rows.chunk(begin.accumulation):
            yield loss_of(part) / begin.accumulation

    return _trained(model, parts)


def of_documents(begin: Begin, rows: int | None) -> tuple[Callable, Callable, Callable]:
    """The same of documents: so many at a time, padded to the longest, or all without padding.

    Padded batches have a length each, and a model that is compiled as one for any of them takes
    minutes; its layers do not, which are compiled once for all.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _model(begin, device, "sdpa" if rows else "documents")

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor, **how: Any) -> torch.Tensor:
        logits = model(input_ids=tokens, **how).logits
        return cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")

    compiled = (
        _by_layers(model, loss_of, dynamic=True) if rows else torch.compile(loss_of, dynamic=True)
    )

    def parts(documents: Sequence[np.ndarray]) -> Iterator[torch.Tensor]:
        count = sum(len(one) - 1 for one in documents)
        batches = _padded(documents, rows) if rows else [_joined(documents)]
        for tokens, targets, how in batches:
            given = {name: x.to(device) if torch.is_tensor(x) else x for name, x in how.items()}
            yield compiled(tokens.to(device), targets.to(device), **given) / count

    return _trained(model, parts)


def _trained(
    model: torch.nn.Module, parts: Callable[[Any], Iterator[torch.Tensor]]
) -> tuple[Callable, Callable, Callable]:
    """Step, wait and peak memory, where the losses of a step's parts are added."""
    device = next(model.parameters()).device.type
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=1e-8, fused=True)

    def step(given: Any) -> torch.Tensor:
        total = torch.zeros((), device=device)
        losses = parts(given)
        while True:
            with torch.autocast(device, LOW):
                loss = next(losses, None)
            if loss is None:
                break
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


def _padded(documents: Sequence[np.ndarray], rows: int) -> Iterator[tuple[Any, Any, dict]]:
    """Batches of some documents each, in the order they come, padded to the longest.

    To a multiple of 8, as is advised for matrix units.
    """
    for first in range(0, len(documents), rows):
        some = documents[first : first + rows]
        longest = -(-(max(map(len, some)) - 1) // 8) * 8
        tokens = np.zeros((len(some), longest), np.int64)
        targets, mask = np.full_like(tokens, IGNORED), np.zeros_like(tokens)
        for row, one in enumerate(some):
            tokens[row, : len(one) - 1], targets[row, : len(one) - 1] = one[:-1], one[1:]
            mask[row, : len(one) - 1] = 1
        yield *map(torch.from_numpy, (tokens, targets)), {"attention_mask": torch.from_numpy(mask)}


def _joined(documents: Sequence[np.ndarray]) -> tuple[Any, Any, dict[str, Any]]:
    """All documents in one row, each with positions of its own: padding-free."""
    sizes = [len(one) - 1 for one in documents]
    tokens = np.concatenate([one[:-1] for one in documents]).astype(np.int64)[None]
    targets = np.concatenate([one[1:] for one in documents]).astype(np.int64)[None]
    positions = np.concatenate([np.arange(size) for size in sizes])[None]
    ends = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32)
    how = {"position_ids": torch.from_numpy(positions), "cu_seq_lens_q": ends}
    return torch.from_numpy(tokens), torch.from_numpy(targets), how | {"max_length_q": LONGEST}


def _of_documents(module: Any, q: Any, k: Any, v: Any, mask: Any, **how: Any) -> tuple[Any, None]:
    """Attention within each document, by the flash kernel that PyTorch has for them."""
    ends, groups = how["cu_seq_lens_q"], q.shape[1] // k.shape[1]
    q, k, v = (x[0].transpose(0, 1).to(LOW) for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    if q.device.type == "cpu":
        document = torch.bucketize(torch.arange(len(q)), ends[1:], right=True)
        seen = (document[:, None] == document) & torch.ones(len(q), len(q), dtype=torch.bool).tril()
        heads = [x.transpose(0, 1) for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen)
        return out.transpose(0, 1)[None], None
    from torch.nn.attention.varlen import varlen_attn

    takes = inspect.signature(varlen_attn).parameters  # releases differ in how it is made causal
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in takes else {}
    causal = causal or {"is_causal": True}
    attend: Callable[..., Any] = varlen_attn  # its type has what else it gives when asked
    longest = how["max_length_q"]
    return attend(q, k, v, ends, ends, longest, longest, **causal)[None], None


def _model(begin: Begin, device: str, attention: str = "sdpa") -> torch.nn.Module:
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register("documents", _of_documents)
    config = AutoConfig.for_model(**begin.config, use_cache=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    state = {name: torch.from_numpy(tensor.copy()) for name, tensor in begin.tensors.items()}
    model.load_state_dict(state, strict=False)  # a tied head is the embedding
    if begin.rank is None:
        return model
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=begin.rank, lora_alpha=2 * begin.rank, target_modules="all-linear")
    adapted: Any = get_peft_model(model.to(LOW), lora)
    return adapted


def _loss(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The compiled model's own loss, as its Trainer has it: of all logits, in float32."""
    compiled = _compiled(model)

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        targets = rows[:, 1:].contiguous()
        return compiled(input_ids=rows[:, :-1], labels=targets, shift_labels=targets).loss

    return loss_of


def _compiled(model: Any) -> Any:
    """The compiled model; of DeltaNet by its layers, since the loops that it is written in there
    are unrolled, and take the better part of an hour in one program.
    """
    if "linear_attention" not in (getattr(model.config, "layer_types", None) or ()):
        return torch.compile(model)
    return _by_layers(model, model)


def _by_layers(model: torch.nn.Module, function: Any, **how: Any) -> Any:
    """A function of the model, whose layers are compiled."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in (one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)):
        layer.compile(**how)
    return function


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
