"""PEFT adapters: a folder of two files, the tensors and their config. Which kinds: see adapters."""

import importlib
import pkgutil
import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, PyTree

from windlass import adapters
from windlass.adapters import Adapted, Peft
from windlass.config import listing
from windlass.config.reading import report, show
from windlass.errors import UserError
from windlass.hub import fused, peft_experts, weights
from windlass.hub.config import mapping
from windlass.hub.names import EMBEDDING, arrays, placed
from windlass.hub.shards import ShardTensor
from windlass.layers.embedding import TokenRows
from windlass.layers.names import first_match, name, refuse_idle
from windlass.models import HEAD
from windlass.residuals import SCORE

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
LAYER = re.compile(r"(?P<stem>.*?)\.(?P<layer>\d+)\.(?P<tail>.*)")  # of a map's full name
BEFORE = "base_model.model."  # what PEFT puts in front of a name

# Keys of any PEFT adapter that change nothing of what its tensors mean; beside those that the kind
# reads, the rest must be absent, or as good as that.
NEUTRAL = (
    *("target_modules", "exclude_modules", "peft_type", "task_type", "base_model_name_or_path"),
    *("revision", "inference_mode", "auto_mapping", "peft_version", "runtime_config"),
    *("modules_to_save", "ensure_weight_tying"),
)
ABSENT = (None, False, "none", {}, [])
TIED = "ensure_weight_tying"
ROWS = "token_adapter.trainable_tokens_delta"  # behind the name of a module
RANK_AXES = {"lora_A": 0, "lora_B": 1}


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
        if (whole := fused.whole(table[own])) != table[own]:
            name = whole.rpartition(".")[2]
            raise UserError(
                f"{own} is a part of {name} elsewhere, of which PEFT adapts the whole; "
                "--as merged writes a model with the adapter in it"
            )
        parts = adapter.peft_parts.items()
        theirs |= {f"{own}.{ours}": f"{BEFORE}{table[own]}.{x}" for ours, x in parts}
    return theirs


def own(model: Any, whole: Collection[str] = ()) -> Any:
    """Arrays of the outermost adapter, which was applied last, and those that it has whole."""

    def visit(path, node):
        if isinstance(node, TokenRows):
            return jax.tree.map(lambda _: True, node)
        if not isinstance(node, Adapted):
            return name(path) in whole
        mine = jax.tree.map(lambda _: True, node)
        for field in ("base", *node.fixed):  # what is fixed follows from the settings
            other = jax.tree.map(lambda _: False, getattr(node, field))
            here = lambda one, field=field: getattr(one, field)  # noqa: E731
            mine = eqx.tree_at(here, mine, other, is_leaf=lambda x: x is None)
        return mine

    is_apart = lambda node: isinstance(node, Adapted | TokenRows)  # noqa: E731
    return eqx.filter(model, jax.tree_util.tree_map_with_path(visit, model, is_leaf=is_apart))


def whole_arrays(model: Any, patterns: Sequence[str], table: Mapping[str, str]) -> list[str]:
    """Names of the arrays that patterns choose to be trained whole, all of a module together.

    A pattern is of our names, or the end of a module's name elsewhere.
    """
    if not patterns:
        return []
    modules = _modules(model, table)
    words = {ours: [ours, theirs, *_tails(theirs)] for ours, theirs in modules.items()}
    if _is_tied(modules, table):
        words[EMBEDDING] += _tails(table[HEAD].rpartition(".")[0])
    refuse_idle("adapter.whole", patterns, [x for each in words.values() for x in each], "weight")
    chosen = [
        one
        for one, each in words.items()
        if any(first_match(word, patterns) is not None for word in each)
    ]
    together = {modules[one] for one in chosen}
    return [one for one, module in modules.items() if module in together]


def _is_tied(arrays: Container[str], table: Mapping[str, str]) -> bool:
    """Test that the head of a model is its embedding."""
    return EMBEDDING in arrays and HEAD not in arrays and HEAD in table


def saved_modules(model: Any, whole: Collection[str], table: Mapping[str, str]) -> list[str]:
    """modules_to_save: the shortest ends of names that choose these arrays' modules alone."""
    modules = _modules(model, table)
    others = {module for one, module in modules.items() if one not in whole}
    others |= {table[one] for one in _adapted(model)}

    def short(module: str) -> str:
        return next(x for x in _tails(module) if not any(one.endswith(x) for one in others))

    return sorted({short(modules[one]) for one in whole})


def is_saved(model: Any, array: str, table: Mapping[str, str]) -> bool:
    """Test that PEFT can keep an array whole, beside an adapter."""
    return array in _modules(model, table)


def _modules(model: Any, table: Mapping[str, str]) -> dict[str, str]:
    """Module elsewhere of each array that no adapter is at, with `{layer}` where it is stacked."""
    is_apart = lambda node: isinstance(node, Adapted | TokenRows)  # noqa: E731
    plain = jax.tree.map(lambda x: None if is_apart(x) else x, model, is_leaf=is_apart)
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(plain, _is_array))
    theirs = (one.name.rpartition(".")[0] for one in arrays(plain, table))
    return {name(path): module for (path, _), module in zip(leaves, theirs, strict=True)}


def _tails(module: str) -> list[str]:
    words = module.rpartition("{layer}.")[2].split(".")
    return [".".join(words[-n:]) for n in range(1, len(words) + 1)]


def tensors(
    model: Any, adapter: Peft, table: Mapping[str, str], whole: Collection[str] = ()
) -> list[ShardTensor]:
    """Tensors of an adapter, each of the rank that its map has in its layer."""
    every = weights.tensors(own(model, whole), _all_names(model, adapter, table))
    if EMBEDDING in whole and _is_tied(_modules(model, table), table):
        # PEFT reads the head too, though it is the same.
        tied = next(one for one in every if one.name == f"{BEFORE}{table[EMBEDDING]}")
        every.append(tied._replace(name=f"{BEFORE}{table[HEAD]}"))
    ranks = _ranks(model, adapter, table)
    return [cut for one in every if (cut := _cut(one, ranks.get(_module(one.name)))) is not None]


def _all_names(model: Any, adapter: Peft, table: Mapping[str, str]) -> dict[str, str]:
    """PEFT names of an adapter's arrays, and of the model's own."""
    plain = {ours: f"{BEFORE}{theirs}" for ours, theirs in table.items()}
    rows = {
        f"{ours.removesuffix('weight')}tuned.rows": f"{table[ours].removesuffix('weight')}{ROWS}"
        for ours in (EMBEDDING, HEAD)
        if ours in table
    }
    plain |= {ours: f"{BEFORE}{theirs}" for ours, theirs in rows.items()}
    return plain | names(model, adapter, table)


def _ranks(model: Any, adapter: Peft, table: Mapping[str, str]) -> dict[str, int | None]:
    """Rank of each adapted map of each layer, by its full name elsewhere."""
    return {site.called[-1]: adapter.rank_of(site.called) for site in _sites(model, table)}


def _sites(model: Any, table: Mapping[str, str]) -> list[adapters.Site]:
    every = adapters.sites(model, [*_adapted(model)], table)
    return [site for each in every.values() for site in each]


def _cut(tensor: ShardTensor, rank: int | None) -> ShardTensor | None:
    """The tensor with its own rank alone; None where that is 0."""
    if not rank:
        return tensor if rank is None else None
    if (axis := _rank_axis(tensor.name)) is None:
        return tensor
    shape = (*tensor.shape[:axis], rank, *tensor.shape[axis + 1 :])
    read = lambda: np.ascontiguousarray(tensor.read().take(range(rank), axis=axis))  # noqa: E731
    return tensor._replace(shape=shape, read=read)


def _widened(name: str, shape: tuple[int, ...], tensors: Mapping[str, Any], rank: int | None):
    """A tensor of a layer's own rank, or of none, in the shape that all layers have here."""
    axis = _rank_axis(name)
    if rank is None or (axis is None and rank) or (rank and name not in tensors):
        return tensors.get(name)
    if not rank:
        # The norms of DoRA are of no effect there either.
        return tensors.get(name, np.ones(shape, np.float32) * (axis is None))
    found = tensors[name]
    if axis is None or found.shape[axis] != rank:
        return found
    padding = [(0, shape[i] - rank if i == axis else 0) for i in range(found.ndim)]
    return np.pad(found, padding)


def _rank_axis(tensor: str) -> int | None:
    """Axis of a tensor that is its rank."""
    return next((axis for word, axis in RANK_AXES.items() if f".{word}." in tensor), None)


def _module(tensor: str) -> str:
    """Full name of the map that a tensor of PEFT's belongs to."""
    return tensor.removeprefix(BEFORE).partition(".lora_")[0]


def described(
    model: Any,
    adapter: Peft,
    table: Mapping[str, str],
    base: str | None,
    whole: Collection[str] = (),
) -> dict:
    """Contents of adapter_config.json."""
    excluded, saved = _excluded(model, adapter, table), saved_modules(model, whole, table)
    settings, adapted = adapter.to_peft(_sites(model, table)), [*_adapted(model)]
    if parameters := peft_experts.parameters(adapted, table):
        settings = peft_experts.written(settings, parameters.values())
    is_tied = EMBEDDING in whole and _is_tied(_modules(model, table), table)
    return {
        "peft_type": adapter.peft_type,
        "task_type": "SEQ_CLS" if table.get(HEAD) == SCORE else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        **settings,
        "target_modules": _targets([x for x in adapted if x not in parameters], adapted, table),
        **({"exclude_modules": excluded} if excluded else {}),
        **({"modules_to_save": saved} if saved else {}),
        **({"ensure_weight_tying": True} if is_tied else {}),
    }


def read(folder: Path) -> StoredAdapter:
    """Read the settings of the adapter in a folder, or refuse what cannot be had here."""
    about, tensors = _config(folder), _tensors(folder)
    about = peft_experts.read(about, tensors)
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
    modules = (one.rpartition(f".{part}.")[0] for one in tensors if f".{part}." in one)
    targets = {peft_experts.target(one) for one in modules}
    if not targets:
        problems.append((TENSORS, f"holds no {part}; it has {listing(tensors[:3], 'and')}"))
    if problems:
        raise UserError(report(problems, f"the adapter in {folder}"))
    settings |= {"targets": sorted(targets)} | _places(about, tensors, part)
    if not any(one.endswith(f"lm_head.{ROWS}") for one in tensors):
        settings.pop("head_tokens", None)  # those of a tied head are the embedding's
    if whole := _whole(about, tensors):
        settings["whole"] = whole
    return StoredAdapter(folder, kind, settings, about.get("base_model_name_or_path"))


def load(
    stored: StoredAdapter, model: PyTree, adapter: Peft, table: Mapping[str, str], base: str | None
) -> dict[str, Array]:
    """Arrays of an adapter, by their paths in an abstract model that is adapted alike."""
    from safetensors import safe_open

    made_for = f"made for {stored.base or 'a model it does not name'}"
    origin = f"the adapter in {stored.folder}, {made_for}, beside {base or 'the model of this run'}"
    with safe_open(stored.folder / TENSORS, framework="numpy") as file:
        stored_tensors = {key: file.get_tensor(key) for key in file.keys()}
    whole = whole_arrays(model, adapter.whole, table)
    part, theirs = own(model, whole), _all_names(model, adapter, table)
    if _is_tied(_modules(model, table), table):
        _untie(stored_tensors, _config(stored.folder).get(TIED), table, origin)
    widened, ranks = dict(stored_tensors), _ranks(model, adapter, table)
    for array in arrays(part, theirs):
        for one in array.names():
            found = _widened(one, array.shape, stored_tensors, ranks.get(_module(one)))
            widened |= {} if found is None else {one: found}
    return placed(part, theirs, widened, origin)


def _untie(
    tensors: dict[str, np.ndarray], is_tied: bool | None, table: Mapping[str, str], origin: str
) -> None:
    """Drop the head of a model whose head is its embedding; refuse one that is another there."""
    head, embedding = (f"{BEFORE}{table[one]}" for one in (HEAD, EMBEDDING))
    kept, other = tensors.pop(head, None), tensors.get(embedding)
    if is_tied or (kept is None and other is None):
        return
    if kept is None or other is None or not np.array_equal(kept, other):
        what = "is another than embed_tokens, and the head of this model is its embedding (tied)"
        raise UserError(report([(head, what)], origin))


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def _adapted(model: Any) -> Iterator[str]:
    """Names of the adapted maps."""
    is_adapted = lambda node: isinstance(node, Adapted)  # noqa: E731
    for path, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_adapted):
        if is_adapted(node):
            yield name(path)


def _whole(about: Mapping[str, Any], tensors: Sequence[str]) -> list[str]:
    """Modules that an adapter has whole, by the tensors of them, as far as names go."""
    if about.get("modules_to_save") in ABSENT:
        return []
    plain = [x.removeprefix(BEFORE) for x in tensors if ".lora_" not in x and ROWS not in x]
    modules = {
        one.rpartition(".")[0] for one in plain if one != weights.LM_HEAD or not about.get(TIED)
    }
    parts = {one: LAYER.fullmatch(one) for one in modules}
    return sorted({found["tail"] if found else one for one, found in parts.items()})


def _places(about: Mapping[str, Any], tensors: Sequence[str], part: str) -> dict[str, Any]:
    """Layers and exclusions, where a config has any: as they came out in the tensors."""
    chooses = ("layers_to_transform", "exclude_modules")
    is_pattern = isinstance(about.get("target_modules"), str)
    if not is_pattern and all(about.get(key) in ABSENT for key in chooses):
        return {}
    modules = {_module(one) for one in tensors if f".{part}." in one}
    parts = {one: LAYER.fullmatch(one) for one in modules}
    layers = sorted({int(found["layer"]) for found in parts.values() if found})
    tails = sorted({found["tail"] for found in parts.values() if found})
    stems = sorted({found["stem"] for found in parts.values() if found})
    grid = (f"{stem}.{layer}.{tail}" for stem in stems for layer in layers for tail in tails)
    absent = [one for one in grid if one not in modules]
    return {"layers": layers} | ({"exclude": absent} if absent else {})


def _excluded(model: Any, adapter: Peft, table: Mapping[str, str]) -> list[str]:
    """Full names of maps that are left out in some layers, though not all of a layer is."""
    layers, adapted = getattr(adapter, "layers", ()), [*_adapted(model)]
    found = [site for site in _sites(model, table) if adapter.rank_of(site.called) == 0]
    # Maps of other stacks, which have one name with these elsewhere.
    alike = {table[one] for one in adapted}
    others = [one for one in table if table[one] in alike and one not in adapted]
    found += [site for each in adapters.sites(model, others, table).values() for site in each]
    return [site.called[-1] for site in found if not layers or site.layer in layers]


def _targets(modules: Sequence[str], adapted: Sequence[str], table: Mapping[str, str]) -> list[str]:
    """target_modules: the shortest names that choose these maps, and none that is not adapted."""
    others = {*table.values()} - {table[one] for one in adapted}

    def short(full: str) -> str:
        words = full.rpartition("{layer}.")[2].split(".")
        tails = (".".join(words[-n:]) for n in range(1, len(words) + 1))
        return next(t for t in tails if not any(other.endswith(f".{t}") for other in others))

    return sorted({short(table[one]) for one in modules})


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
