"""Adapters as PEFT keeps them: a folder of two files, the tensors and what they are."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from windlass import adapters
from windlass.adapters.lora import Adapter, Lora
from windlass.config import listing
from windlass.config.reading import report, show
from windlass.errors import UserError
from windlass.hub.config import mapping
from windlass.hub.names import placed, to_tensors
from windlass.layers.names import name

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
BEFORE = "base_model.model."  # what PEFT puts in front of a name

# What our parts of an adapter are called there, behind the name of the map.
PARTS = {"down": "lora_A", "up": "lora_B", "magnitude": "lora_magnitude_vector"}

# What PEFT may say of an adapter that changes nothing of what its tensors mean; the rest must be
# absent, or as good as that.
SAID = (
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules"),
    *("peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode"),
    *("auto_mapping", "peft_version", "exclude_modules", "layers_pattern", "init_lora_weights"),
    *("megatron_core", "qalora_group_size", "eva_config", "runtime_config"),
)
ABSENT = (None, False, "none", {}, [])
# How an adapter may have begun; the others change the weights it is added to as well.
BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


class Stored(NamedTuple):
    """What the folder of an adapter says of it."""

    folder: Path
    settings: dict[str, Any]  # fields of `adapters.lora.Adapter`
    base: str | None  # the model that it was made for


def names(model: Any, table: Mapping[str, str]) -> dict[str, str]:
    """From our names of an adapter's arrays to those of PEFT; `table` is the family's own."""
    found = {}
    for path, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_lora):
        if _is_lora(node):
            own = name(path)
            if own not in table:
                raise UserError(f"{own} has no name elsewhere, so that PEFT has no adapter for it")
            found |= {f"{own}.{ours}": f"{BEFORE}{table[own]}.{x}" for ours, x in PARTS.items()}
    return found


def own(model: Any) -> Any:
    """The arrays that belong to a model's adapters."""
    return eqx.filter(model, adapters.own(model))


def described(model: Any, adapter: Adapter, table: Mapping[str, str], base: str | None) -> dict:
    """What adapter_config.json holds."""
    alpha = 2 * adapter.rank if adapter.alpha is None else adapter.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.scaling == "rslora",
        "use_dora": adapter.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": "gaussian" if adapter.init == "normal" else True,
        "target_modules": _targets(model, table),
    }


def write(
    folder: Path, model: Any, adapter: Adapter, table: Mapping[str, str], base: str | None
) -> None:
    """The adapter of a model in a folder that `PeftModel.from_pretrained` takes."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(to_tensors(own(model), names(model, table)), folder / TENSORS, {"format": "pt"})
    text = json.dumps(described(model, adapter, table, base), indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def read(folder: Path) -> Stored:
    """What a folder says of its adapter, or a refusal of what cannot be had here."""
    about = _config(folder)
    tensors = _tensors(folder)
    problems = []
    if (kind := about.get("peft_type")) != "LORA":
        problems.append(("peft_type", f"is {show(kind)}; only LORA can be read"))
    if (begun := about.get("init_lora_weights")) not in BEGINNINGS:
        what = "it changes the weights of the model too, which are not here"
        problems.append(("init_lora_weights", f"is {show(begun)}; {what}"))
    if not isinstance(about.get("r"), int):
        problems.append(("r", f"is {show(about.get('r'))}; it must be a whole number"))
    problems += [
        (key, f"is {show(value)}; an adapter with it cannot be read")
        for key, value in about.items()
        if key not in SAID and value not in ABSENT
    ]
    targets = {_target(one) for one in tensors if f".{PARTS['down']}." in one}
    if not targets:
        problems.append(
            (TENSORS, f"holds no {PARTS['down']}; it has {listing(tensors[:3], 'and')}")
        )
    if problems:
        raise UserError(report(problems, f"the adapter in {folder}"))
    settings = {
        "rank": about["r"],
        "alpha": float(about.get("lora_alpha", 8)),
        "scaling": "rslora" if about.get("use_rslora") else "plain",
        "dropout": float(about.get("lora_dropout", 0.0)),
        "targets": sorted(targets),
        "dora": bool(about.get("use_dora")),
    }
    return Stored(folder, settings, about.get("base_model_name_or_path"))


def load(
    stored: Stored, model: PyTree, table: Mapping[str, str], base: str | None
) -> dict[str, Array]:
    """The arrays of an adapter, by their paths in an abstract model that is adapted alike."""
    from safetensors import safe_open

    made = f"made for {stored.base or 'a model it does not name'}"
    origin = f"the adapter in {stored.folder}, {made}, beside {base or 'the model of this run'}"
    with safe_open(stored.folder / TENSORS, framework="numpy") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    return placed(own(model), names(model, table), tensors, origin)


def _targets(model: Any, table: Mapping[str, str]) -> list[str]:
    """The shortest names that choose the maps that are adapted, and no other."""
    adapted = [name[: -len(".down")] for name in names(model, table) if name.endswith(".down")]
    others = {table[one] for one in table if one not in adapted}

    def short(full: str) -> str:
        words = full.rpartition("{layer}.")[2].split(".")
        tails = (".".join(words[-n:]) for n in range(1, len(words) + 1))
        return next(t for t in tails if not any(other.endswith(f".{t}") for other in others))

    return sorted({short(table[one]) for one in adapted})


def _target(tensor: str) -> str:
    """The name of a map without what is in front of it, such as `q_proj`."""
    return tensor.rpartition(f".{PARTS['down']}.")[0].rpartition(".")[2]


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"adapter.path is {folder}; a PEFT adapter is a folder with {CONFIG}")
    return mapping(path)


def _tensors(folder: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    path = folder / TENSORS
    if not path.is_file():
        pickled = (folder / PICKLE).is_file()
        why = f"; {PICKLE} is not read, since to read it is to run it" if pickled else ""
        raise UserError(f"adapter.path is {folder}, which has no {TENSORS}{why}")
    try:
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _is_lora(node: Any) -> bool:
    return isinstance(node, Lora)
