"""MXFP4 tensors of experts are read as the numbers that `transformers` makes of them."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests import tiny
from windlass.errors import UserError
from windlass.hub import config as configs
from windlass.hub import mxfp4, weights
from windlass.hub.names import to_tensors
from windlass.models.gpt_oss import NAMES

EXPERTS = "model.layers.{}.mlp.experts.{}"


def packed(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks and scales of experts [experts, read, written]."""
    experts, read, written = shape
    rng = np.random.default_rng(read)
    blocks = rng.integers(256, size=(experts, written, read // 32, 16), dtype=np.uint8)
    return blocks, rng.integers(118, 128, size=blocks.shape[:3], dtype=np.uint8)


def test_numbers_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = packed((3, 64, 6))
    found = mxfp4.Mxfp4Slice(blocks, scales)
    expected = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    assert found.shape == tuple(expected.shape) == (3, 64, 6)
    assert np.array_equal(found[:].astype(np.float32), expected.float().numpy())
    part = (slice(1, 3), slice(5, 40), slice(2, 4))
    assert np.array_equal(found[part].astype(np.float32), expected.float().numpy()[part])


def test_a_checkpoint_in_mxfp4_is_loaded_on_a_mesh(tmp_path):
    config = dataclasses.replace(tiny.config("gpt_oss"), mlp=32, layers=2)
    tensors = to_tensors(tiny.made(config), NAMES)
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            full = EXPERTS.format(layer, name)
            blocks, scales = packed(tensors.pop(full).shape)
            tensors |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    with tiny.on((1, 2, 2), 2) as mesh:
        empty = tiny.placed_shapes(tiny.abstract(config), mesh)
        found = weights.load(tmp_path, empty, NAMES)
    path = next(one for one in found if one.endswith("kinds.1.mlp.experts.down.weight"))
    blocks, scales = packed((8, 32, 32))
    expected = mxfp4.dequantized(blocks, scales).swapaxes(1, 2).astype(np.float32)
    assert np.array_equal(np.asarray(found[path])[0], expected)


def test_blocks_without_their_scales_are_refused():
    blocks, scales = packed((3, 64, 6))
    with pytest.raises(UserError) as refusal:
        mxfp4.unpacked({"one_blocks": blocks, "one_scales": scales[..., :1]}, "the weights")
    assert str(refusal.value) == (
        "the weights: one_blocks is [3, 6, 2, 16] and one_scales is [3, 6, 1]; MXFP4 has bytes in "
        "blocks of 16, and a scale of each"
    )


def test_the_method_is_read_and_not_written():
    config = tiny.config("gpt_oss")
    like = {"quantization_config": {"quant_method": "mxfp4"}, "bos_token_id": 3}
    written = configs.written(config, length=14, dtype="bfloat16", like=like)
    assert "quantization_config" not in written and written["bos_token_id"] == 3
    assert configs.read(written | like, "there")["family"] == "gpt_oss"
    with pytest.raises(UserError, match='is "fp8"; GptOssForCausalLM is computed here with null'):
        configs.read(written | {"quantization_config": {"quant_method": "fp8"}}, "there")
