"""LoRA over a base in 4 bits, beside `peft` over the same dequantised base."""

from dataclasses import replace
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

from tests import published, tiny
from tests.hub import peers
from windlass import adapters
from windlass.adapters.lora import Adapter
from windlass.config.start import FrozenBase
from windlass.hub import config as configs
from windlass.hub.names import to_tensors
from windlass.models import qwen3
from windlass.quantization.four_bit_linear import frozen
from windlass.release.check import logits

CONFIG = replace(qwen3.Config.tiny(), embed=64, mlp=128, head_dim=16, scaling=None)
LORA = Adapter(rank=3, alpha=5.0)
live = pytest.mark.skipif(not peers.HAS_PEFT, reason="peft is what it is compared with")


def over(base: FrozenBase):
    """A small model in 4 bits with an adapter that is not at its start."""

    @eqx.filter_jit
    def adapted(model):
        return LORA.adapt(frozen(model, base), names=qwen3.NAMES, key=jax.random.key(3))

    made = adapted(tiny.made(CONFIG))
    rng = np.random.default_rng(4)
    own, rest = eqx.partition(made, adapters.own(made))
    rough = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), own)
    return eqx.combine(rough, rest)


def theirs(model, folder: Path):
    """The adapter of a model, as PEFT loads it, on the matrices that its base stands for."""
    import peft
    import transformers

    plain = eqx.filter_jit(adapters.merged)(adapters.plain(model))
    (folder / "base").mkdir()
    published.save_weights(folder / "base", plain, qwen3.NAMES)
    about = configs.written(CONFIG, length=64, dtype="float32")
    published.write_json(folder / "base" / "config.json", about)
    published.save_adapter(folder / "adapter", model, LORA, qwen3.NAMES, None)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype="float32")
    return peft.PeftModel.from_pretrained(base, folder / "adapter").eval()


def seen(module, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return module(torch.from_numpy(tokens).long()).logits.numpy()


@live
@pytest.mark.parametrize("kind", ["nf4", "int4"])
def test_logits_are_those_of_peft_beside_the_base_and_merged_into_it(tmp_path, kind):
    model = over(FrozenBase(kind=kind))
    tokens = np.random.default_rng(1).integers(CONFIG.vocab, size=(2, 17)).astype(np.int32)
    module = theirs(model, tmp_path)
    expected = seen(module, tokens)
    assert np.abs(expected).max() > 1
    assert np.abs(logits(model, tokens) - expected).max() < 1e-5
    merged = eqx.filter_jit(adapters.merged)(model)
    module = module.merge_and_unload()
    assert np.abs(logits(merged, tokens) - seen(module, tokens)).max() < 1e-5
    matrices = {name: x.numpy() for name, x in module.state_dict().items()}
    ours = to_tensors(merged, qwen3.NAMES)
    assert max(np.abs(ours[name] - matrices[name]).max() for name in ours) < 1e-6
