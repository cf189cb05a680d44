"""What `peft` computes for adapters of tiny models: live, and as recorded.

`python -m tests.hub.peers` records it anew, where torch and peft are installed.
"""

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from tests import published, tiny
from tests.models import reference
from windlass import adapters
from windlass.adapters.lora import Adapter
from windlass.config import tree
from windlass.hub import peft
from windlass.hub.names import to_tensors

RECORD = Path(__file__).parents[1] / "fixtures" / "peft.npz"
HAS_PEFT = reference.HAS_TORCH and importlib.util.find_spec("peft") is not None
# Of a family with two kinds of blocks, of one with norms in a head, and of one with biases; pairs
# are interleaved here, and half-split there. Of DeltaNet, whose heads stand in another order there.
# Of layers in several stacks, some of which have no keys and values.
CASES: dict[str, tuple[str, Adapter]] = {
    "plain": ("gemma", Adapter(rank=3, alpha=5.0, targets=("q_proj", "blocks.mlp.*"))),
    "rslora": ("qwen3", Adapter(rank=4, alpha=2.5, scaling="rslora", init="normal")),
    "dora": ("qwen2", Adapter(rank=2, dora=True)),
    "deltanet": ("qwen3_5", Adapter(rank=3, alpha=4.0, dora=True)),
    "shared keys": ("gemma4", Adapter(rank=3, alpha=1.5)),
}


def config(case: str) -> Any:
    return reference.config(CASES[case][0])


def table(case: str) -> dict[str, str]:
    return importlib.import_module(type(config(case)).__module__).NAMES


def base(case: str) -> Any:
    """The model without its adapter, with the weights that the reference has."""
    return tiny.filled(tiny.abstract(config(case)), table(case), reference.tensors(config(case)))


def adapted(case: str) -> Any:
    """The model with an adapter that is not at its start."""
    made = eqx.filter_jit(CASES[case][1].adapt)(
        base(case), names=table(case), key=jax.random.key(3)
    )
    rng = np.random.default_rng(4)
    own, rest = eqx.partition(made, adapters.own(made))
    rough = jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), own)
    return eqx.combine(rough, rest)


def texts(case: str) -> list[np.ndarray]:
    """Three documents, that fit in one row."""
    return reference.texts(config(case).vocab)[:3]


def batch(case: str) -> dict[str, jax.Array]:
    """The three in one row, of one row."""
    return tiny.packed([texts(case)], length=26)


def tensors(case: str, model: Any) -> dict[str, np.ndarray]:
    """The adapter of a model, or its gradient, as PEFT names it."""
    return to_tensors(peft.own(model), peft.names(model, CASES[case][1], table(case)))


def module(case: str, folder: Path) -> Any:
    """The reference's model with the adapter of a folder."""
    import peft as theirs

    made = reference.module(CASES[case][0])
    return theirs.PeftModel.from_pretrained(made, folder, is_trainable=True)


def answers(model: Any, documents: list[np.ndarray]) -> tuple[float, reference.Answers]:
    """The mean loss of documents, one after the other, their logits, the adapter's gradient."""
    import torch

    logits, total = [], torch.zeros(())
    for text in documents:
        tokens = torch.from_numpy(text).long()
        seen = model(tokens[None, :-1]).logits[0]
        logits.append(seen.detach().numpy())
        total = total + torch.nn.functional.cross_entropy(seen, tokens[1:], reduction="sum")
    mean = total / sum(len(text) - 1 for text in documents)
    mean.backward()
    gradients = {
        name.replace(".default", "").removesuffix(".weight" if "magnitude" in name else ""): x
        for name, x in ((n, p.grad.numpy()) for n, p in model.named_parameters() if p.requires_grad)
    }
    return mean.item(), reference.Answers(np.concatenate(logits), gradients)


def computed(case: str) -> tuple[float, reference.Answers]:
    with tempfile.TemporaryDirectory() as folder:
        published.save_adapter(Path(folder), adapted(case), CASES[case][1], table(case), None)
        return answers(module(case, Path(folder)), texts(case))


def recorded(case: str) -> tuple[float, reference.Answers]:
    with np.load(RECORD) as held:
        assert json.loads(str(held[case])) == json.loads(_written(case)), (
            "run python -m tests.hub.peers"
        )
        names = sorted(tensors(case, adapted(case)))
        gradients = dict(zip(names, held[f"{case}/gradients"], strict=True))
        return float(held[f"{case}/loss"]), reference.Answers(held[f"{case}/logits"], gradients)


def record() -> None:
    held = {}
    for case in CASES:
        loss, found = computed(case)
        found = reference.sketched(found)
        names = sorted(found.gradients)
        held |= {case: np.array(_written(case)), f"{case}/loss": np.float32(loss)}
        held[f"{case}/logits"] = found.logits
        held[f"{case}/gradients"] = np.stack([found.gradients[name] for name in names])
    np.savez_compressed(RECORD, **held)


def _written(case: str) -> str:
    return json.dumps([tree(config(case)), tree(CASES[case][1])])


if __name__ == "__main__":
    record()
