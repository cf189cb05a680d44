"""Tiny multimodal models as transformers writes them: towers, and the language model of a case."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.hub import folders
from tests.models import reference
from windlass.hub.multimodal import name_there

VISION = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    in_channels=3,
    patch_size=2,
    temporal_patch_size=1,
    spatial_merge_size=2,
    num_position_embeddings=16,
)


GEMMA_VISION = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    patch_size=2,
    position_embedding_size=16,
)
GEMMA_AUDIO = dict(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    output_proj_dims=16,
    subsampling_conv_channels=[4, 2],
)


def write_gemma4(folder: Path) -> Path:
    """The folder of a Gemma 4, with tensors for keys that its last layer shares, as published."""
    model = gemma4()
    keys = {f"model.language_model.layers.3.self_attn.{one}_proj.weight" for one in "kv"}
    state = model.state_dict() | {name: model.lm_head.weight[:3].clone() for name in keys}
    model.save_pretrained(folder, state_dict=state, max_shard_size=40_000)
    return folder


def gemma4() -> Any:
    import torch
    import transformers

    config = transformers.Gemma4Config(
        text_config=reference.module("gemma4").config.to_dict(),
        vision_config=GEMMA_VISION,
        audio_config=GEMMA_AUDIO,
    )
    torch.manual_seed(0)
    return _filled(transformers.Gemma4ForConditionalGeneration(config), "gemma4", "gemma4")


def write(folder: Path, case: str = "qwen3_5", **changes: Any) -> Path:
    """The folder of a model with weights of a case, and a tensor of multi-token prediction.

    Experts of a layer are one tensor, as in the files that are published.
    """
    model = module(case, **changes)
    model.save_pretrained(folder, max_shard_size=40_000)
    if any(".experts." in name for name in model.state_dict()):
        _fuse(folder)
    index = folder / "model.safetensors.index.json"
    extra = {"mtp.fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    save_file(extra, folder / "model-extra.safetensors", {"format": "pt"})
    text = index.read_text()
    place = '"mtp.fc.weight": "model-extra.safetensors",'
    index.write_text(text.replace('"weight_map": {', f'"weight_map": {{{place}'))
    (folder / "preprocessor_config.json").write_text('{"patch_size": 2}')
    return folder


def _fuse(folder: Path) -> None:
    tensors, file = reference.fused(folders.contents(folder)), "model-fused.safetensors"
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    save_file(tensors, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def module(case: str, **changes: Any) -> Any:
    import torch
    import transformers

    inner = reference.module(case).config
    text, kind = inner.to_dict() | changes, inner.model_type.removesuffix("_text")
    stem = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[kind]
    config = getattr(transformers, f"{stem}Config")(
        text_config=text,
        vision_config=VISION | {"out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{stem}ForConditionalGeneration")(config)
    return model if changes else _filled(model, case, kind)


def _filled(model: Any, case: str, kind: str) -> Any:
    import torch

    like = {"model_type": kind, "text_config": {}}
    weights = reference.fused(reference.tensors(reference.config(case)))
    state = {name_there(name, like): torch.from_numpy(x) for name, x in weights.items()}
    _, unknown = model.load_state_dict(state, strict=False)
    assert not unknown
    return model
