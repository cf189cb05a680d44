"""Parity check of a GGUF file: read back by gguf's reader and by transformers."""

import math
from importlib import metadata
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from windlass.config import listing
from windlass.devices.axes import placements
from windlass.evaluation.finished_run import FinishedRun
from windlass.hub import config as configs
from windlass.hub.names import placed
from windlass.release import check, gguf_model, gguf_types, merge
from windlass.release.check import LogitDifference
from windlass.release.gguf_file import GgufFile

# Keys that transformers does not read from a GGUF file, though llama.cpp does or knows them.
UNREAD = (
    *("head_dim", "attention_bias", "mlp_bias", "query_pre_attn_scalar", "layer_types"),
    *("sliding_window", "partial_rotary_factor", "pad_token_id"),
)
ROUNDED = 1e-6  # relative, of a number that is kept in float32


def compare(
    folder: Path, file: GgufFile, source: FinishedRun, config: dict[str, Any]
) -> LogitDifference:
    """Logits of transformers, beside those of the run's model with the numbers of the file.

    `config` is the config.json of the same model.
    """
    read, problems = _read(folder / file.name, file)
    window = getattr(source.run.model, "window", None) if _has_no_window(source) else None
    tokens = check.random_tokens(source.run.model.vocab)[:, :window]
    ours = check.logits(_filled(source, read), tokens)
    theirs, wrong = _their_logits(folder, file.name, source, config, tokens)
    names = [f"{name} {metadata.version(name)}" for name in ("gguf", "transformers")]
    return LogitDifference(
        difference=float(np.abs(ours - theirs).max()),
        scale=float(np.abs(ours).max()),
        made_with=listing(names, "and"),
        problems=[*problems, *wrong],
    )


def _read(path: Path, file: GgufFile) -> tuple[dict[str, np.ndarray], list[str]]:
    """Numbers of each tensor, and which are not those that were to be kept."""
    from gguf import GGUFReader

    found, problems = {}, []
    for tensor in GGUFReader(path).tensors:
        numbers = gguf_types.dequantized(tensor.data, tensor.tensor_type.name)
        found[tensor.name] = numbers.reshape(tensor.shape.tolist()[::-1])
    for tensor in file.tensors:
        is_kept = tensor.on_grid or tensor.kind == "F32"
        if is_kept and not np.array_equal(found[tensor.name], tensor.read()):
            problems.append(f"{tensor.name} is not bit by bit what was trained")
    return found, problems


def _filled(source: FinishedRun, read: dict[str, np.ndarray]) -> Any:
    """The run's model, its adapters merged, with the numbers of a file."""
    shapes, static = eqx.partition(merge.abstract(source.abstract), _is_shape)
    shapes = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=place),
        shapes,
        placements(shapes, source.built.mesh),
    )
    tensors = gguf_model.read_back(source, read)
    arrays = placed(eqx.combine(shapes, static), source.names, tensors, "the file")
    values = jax.tree.structure(shapes).unflatten(list(arrays.values()))
    return eqx.combine(values, static)


def _their_logits(
    folder: Path, file: str, source: FinishedRun, config: dict[str, Any], tokens: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    read: Any = AutoConfig.from_pretrained(folder, gguf_file=file)
    keys = configs.families()[gguf_model.family(source)].fields.values()
    wrong = [
        f"{key} is {getattr(read, key)} there, not {config[key]}"
        for key in keys
        if key not in UNREAD and not _is_close(getattr(read, key), config[key])
    ]
    theta = _theta(read.rope_parameters)
    if not _is_close(theta, _theta(config["rope_parameters"])):
        wrong.append(f"rope_theta is {theta} there, not {_theta(config['rope_parameters'])}")
    for key in (*UNREAD, "rope_parameters"):
        if key in config and not (key == "sliding_window" and _has_no_window(source)):
            setattr(read, key, config[key])
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, config=read, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens).long()).logits.float().numpy(), wrong


def _theta(parameters: dict[str, Any]) -> float:
    return parameters.get("full_attention", parameters)["rope_theta"]


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=ROUNDED)
    return one == other


def _has_no_window(source: FinishedRun) -> bool:
    return gguf_model.architecture(source) in gguf_model.WITHOUT_WINDOW


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)
