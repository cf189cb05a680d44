"""Folders of tiny models as transformers writes them: live, or made from what was recorded of it.

`python -m tests.hub.folders` records the config.json of each anew, where torch is installed.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.models import reference

RECORD = Path(__file__).parents[1] / "fixtures" / "configs.json"
CASES = (
    *("llama", "llama, untied", "mistral", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe"),
    *("gemma", "gemma4", "gpt_oss", "granite", "mixtral", "olmo2", "olmo3", "phi3"),
    *("qwen3_moe", "smollm3"),
)


def write(case: str, folder: Path, dtype: str = "float32", *, shard_bytes: int = 20_000) -> Path:
    """The model of a case, in several files where it is larger than one may be."""
    folder.mkdir(parents=True, exist_ok=True)
    if reference.HAS_TORCH:
        model = module(case, dtype)
        model.save_pretrained(folder, max_shard_size=shard_bytes)
    else:
        (folder / "config.json").write_text(json.dumps(recorded()[case] | {"dtype": dtype}))
        _write(tensors(case, dtype), folder, shard_bytes)
    return folder


def module(case: str, dtype: str = "float32") -> Any:
    """The same as a model of transformers."""
    import torch

    return reference.module(case).to(getattr(torch, dtype))


def tensors(case: str, dtype: str = "float32") -> dict[str, np.ndarray]:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return {name: x.astype(kind) for name, x in reference.tensors(reference.config(case)).items()}


def contents(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of the files of a folder."""
    files = folder.glob("*.safetensors")
    return {name: x for file in files for name, x in load_file(file).items()}


def recorded() -> dict[str, dict[str, Any]]:
    return json.loads(RECORD.read_text())


def record() -> None:
    configs = {case: json.loads(module(case).config.to_json_string()) for case in CASES}
    RECORD.write_text(json.dumps(configs, indent=1, sort_keys=True) + "\n")


def _write(tensors: dict[str, np.ndarray], folder: Path, shard_bytes: int) -> None:
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, value in tensors.items():
        if shards[-1] and sum(x.nbytes for x in shards[-1].values()) + value.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = value
    if len(shards) == 1:
        return save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    record()
