"""Experts in adapter_config.json, which PEFT adapts as parameters of several matrices each.

PEFT takes names of modules for those of fused parameters in the families that it has a table for:
Mixtral and Qwen3-MoE, not Qwen3.5 with experts, whose shared expert has modules of the same names.
There the parameters are named, and the rank of gate and up together is twice that of each.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from windlass.hub.fused_experts import PARTS

PARAMETERS = "target_parameters"
GATE_UP = r".*\.experts\.gate_up_proj"  # as a key of rank_pattern and alpha_pattern
PATTERNS = ("rank_pattern", "alpha_pattern")
EXPERT = ".{expert}."
OF_EXPERT = re.compile(r"\.experts\.\d+\.")
TARGET = re.compile(r"(?:(?:experts\.\d+|shared_expert)\.)?\w+$")


def parameters(adapted: Collection[str], table: Mapping[str, str]) -> dict[str, str]:
    """target_parameters by our names of maps, in a family with a shared expert; else none."""
    experts = {_word(one) for one in table.values() if EXPERT in one}
    if not any(_word(one) in experts for one in table.values() if EXPERT not in one):
        return {}
    found = {}
    for own in adapted:
        stem, _, part = table[own].rpartition("{layer}.")[2].partition(EXPERT)
        if part:
            found[own] = f"{stem}.{PARTS[part][0]}"
        elif own.endswith(".router"):
            found[own] = f"{stem}.weight"
    return found


def written(settings: Mapping[str, Any], parameters: Iterable[str]) -> dict[str, Any]:
    """Settings of LoRA with these parameters among its targets."""
    names = sorted({*parameters})
    if not any(one.endswith(".gate_up_proj") for one in names):
        return {**settings, PARAMETERS: names}
    # The product of the two has the scale of each: α / r, or α / √r.
    factor = math.sqrt(2) if settings["use_rslora"] else 2
    own = 2 * settings["r"], factor * settings["lora_alpha"]
    patterns = {key: {**settings[key], GATE_UP: x} for key, x in zip(PATTERNS, own, strict=True)}
    return {**settings, **patterns, PARAMETERS: names}


def read(about: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, Any]:
    """An adapter_config.json without what `written` added, where experts have tensors each."""
    if not any(map(OF_EXPERT.search, tensors)):
        return dict(about)
    kept = {key: value for key, value in about.items() if key != PARAMETERS}
    for key in PATTERNS:
        if isinstance(pattern := kept.get(key), Mapping):
            kept[key] = {match: value for match, value in pattern.items() if match != GATE_UP}
    return kept


def target(module: str) -> str:
    """The shortest name of a map, `q_proj`, with that of its expert in front, if it is of one."""
    match = TARGET.search(module)
    return re.sub(r"\.\d+\.", EXPERT, module if match is None else match[0])


def _word(name: str) -> str:
    return name.rpartition(".")[2]
