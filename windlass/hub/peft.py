"""PEFT adapters: a folder of two files, the tensors and their config. Which kinds: see adapters."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from windlass import adapters
from windlass.adapters import Adapted, Peft
from windlass.config import listing
from windlass.config.reading import report, show
from windlass.errors import UserError
from windlass.hub.config import mapping
from windlass.hub.names import placed
from windlass.layers.names import name

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
BEFORE = "base_model.model."  # what PEFT puts in front of a name

# Keys of any PEFT adapter that change nothing of what its tensors mean; beside those that the kind
# reads, the rest must be absent, or as good as that.
NEUTRAL = (
    *("target_modules", "exclude_modules", "peft_type", "task_type", "base_model_name_or_path"),
    *("revision", "inference_mode", "auto_mapping", "peft_version", "runtime_config"),
)
ABSENT = (None, False, "none", {}, [])


class StoredAdapter(NamedTuple):
    """Settings in the folder of an adapter."""

    folder: Path
    kind: str  # of our adapters
    settings: dict[str, Any]  # fields of its section
    base: str | None  # the model that it was made for


def kinds() -> dict[str, type[Peft]]:
    """Adapter sections that PEFT has too, by our name."""
    sections = {}
    for module in pkgutil.iter_modules(adapters.__path__):
        section = importlib.import_module(f"{adapters.__name__}.{module.name}").Adapter
        if issubclass(section, Peft):
            sections[module.name] = section
    return dict(sorted(sections.items()))


def names(model: Any, adapter: Peft, table: Mapping[str, str]) -> dict[str, str]:
    """PEFT names of an adapter's arrays, by our names; `table` is the family's own."""
    theirs = {}
    for own in _adapted(model):
        if own not in table:
            raise UserError(f"{own} has no name elsewhere, so that PEFT has no adapter for it")
        parts = adapter.peft_parts.items()
        theirs |= {f"{own}.{ours}": f"{BEFORE}{table[own]}.{x}" for ours, x in parts}
    return theirs


def own(model: Any) -> Any:
    """Arrays of the outermost adapter, which is the one that was applied last."""

    def visit(node):
        if not isinstance(node, Adapted):
            return False
        mine = jax.tree.map(lambda _: True, node)
        return eqx.tree_at(lambda one: one.base, mine, jax.tree.map(lambda _: False, node.base))

    mask = jax.tree.map(visit, model, is_leaf=lambda node: isinstance(node, Adapted))
    return eqx.filter(model, mask)


def described(model: Any, adapter: Peft, table: Mapping[str, str], base: str | None) -> dict:
    """Contents of adapter_config.json."""
    return {
        "peft_type": adapter.peft_type,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        **adapter.to_peft(),
        "target_modules": _targets(model, table),
    }


def read(folder: Path) -> StoredAdapter:
    """Read the settings of the adapter in a folder, or refuse what cannot be had here."""
    about, tensors = _config(folder), _tensors(folder)
    known = {section.peft_type: (kind, section) for kind, section in kinds().items()}
    if (peft_type := about.get("peft_type")) not in known:
        problem = ("peft_type", f"is {show(peft_type)}; only {listing(known)} can be read")
        raise UserError(report([problem], f"the adapter in {folder}"))
    kind, section = known[peft_type]
    settings, problems = section.from_peft(about)
    problems += [
        (key, f"is {show(value)}; an adapter with it cannot be read")
        for key, value in about.items()
        if key not in (*NEUTRAL, *section.peft_keys) and value not in ABSENT
    ]
    part = next(iter(section.peft_parts.values()))
    targets = {_target(one, part) for one in tensors if f".{part}." in one}
    if not targets:
        problems.append((TENSORS, f"holds no {part}; it has {listing(tensors[:3], 'and')}"))
    if problems:
        raise UserError(report(problems, f"the adapter in {folder}"))
    settings |= {"targets": sorted(targets)}
    return StoredAdapter(folder, kind, settings, about.get("base_model_name_or_path"))


def load(
    stored: StoredAdapter, model: PyTree, adapter: Peft, table: Mapping[str, str], base: str | None
) -> dict[str, Array]:
    """Arrays of an adapter, by their paths in an abstract model that is adapted alike."""
    from safetensors import safe_open

    made_for = f"made for {stored.base or 'a model it does not name'}"
    origin = f"the adapter in {stored.folder}, {made_for}, beside {base or 'the model of this run'}"
    with safe_open(stored.folder / TENSORS, framework="numpy") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    return placed(own(model), names(model, adapter, table), tensors, origin)


def _adapted(model: Any) -> Iterator[str]:
    """Names of the adapted maps."""
    is_adapted = lambda node: isinstance(node, Adapted)  # noqa: E731
    for path, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_adapted):
        if is_adapted(node):
            yield name(path)


def _targets(model: Any, table: Mapping[str, str]) -> list[str]:
    """target_modules: the shortest names that choose the adapted maps, and no other."""
    adapted = list(_adapted(model))
    others = {table[one] for one in table if one not in adapted}

    def short(full: str) -> str:
        words = full.rpartition("{layer}.")[2].split(".")
        tails = (".".join(words[-n:]) for n in range(1, len(words) + 1))
        return next(t for t in tails if not any(other.endswith(f".{t}") for other in others))

    return sorted({short(table[one]) for one in adapted})


def _target(tensor: str, part: str) -> str:
    """The name of a map without what is in front of it, such as `q_proj`."""
    return tensor.rpartition(f".{part}.")[0].rpartition(".")[2]


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
