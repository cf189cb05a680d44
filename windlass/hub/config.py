"""config.json to a family's section and back, by the table that each family has."""

import importlib
import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from windlass import models
from windlass.config.reading import Problem, attempt, listing, report, show
from windlass.errors import UserError
from windlass.files import parse_json
from windlass.hub import rope
from windlass.models import HuggingFace

FILE = "config.json"
OWN = "windlass"  # the key of sections that say all of a model that only Windlass computes
# Keys that change what is computed, whatever the family, unless they have one of these values.
# Where a family has a field or a value of its own for one, that counts.
NEUTRAL: dict[str, tuple] = {
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "mlp_bias": (False,),
    "n_routed_experts": (None,),
    "num_experts": (None,),
    "num_local_experts": (None,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
}
EVERY = 6  # layers to each that sees the whole document, where a config.json does not say


def families() -> dict[str, HuggingFace]:
    """Families that Hugging Face has, with their names and keys there."""
    tables = {}
    for module in pkgutil.iter_modules(models.__path__):
        family = importlib.import_module(f"{models.__name__}.{module.name}")
        if hasattr(family, "HUGGING_FACE"):
            tables[module.name] = family.HUGGING_FACE
    return dict(sorted(tables.items()))


def load(folder: Path) -> dict[str, Any]:
    """config.json of a folder, as it is."""
    file = folder / FILE
    if not file.is_file():
        raise UserError(f"{folder} has no {FILE}; a model of Hugging Face has one in its folder")
    return mapping(file)


def mapping(file: Path) -> dict[str, Any]:
    """JSON object in the file of a model or an adapter."""
    try:
        value = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} holds {show(value)}; it must be a mapping")
    return value


def sections(config: Mapping[str, Any], origin: str, skip: Collection[str] = ()) -> dict[str, Any]:
    """Sections of a recipe for a config.json, but for the fields to `skip`."""
    if OWN not in config:
        return {"model": read(config, origin, skip)}
    own = config[OWN]
    if not isinstance(own, dict) or not isinstance(own.get("model"), dict):
        raise UserError(f"{origin} has {OWN} {show(own)}; it must be a mapping with model")
    return dict(own)


def written_own(sections: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config.json of a model that only Windlass computes: the sections of its recipe.

    Its model_type is known to nobody else, so that none computes another model from its tensors.
    """
    kind = f"{OWN}-{sections['model']['family']}"
    return {"model_type": kind, OWN: dict(sections), "dtype": dtype, "torch_dtype": dtype}


def read(config: Mapping[str, Any], origin: str, skip: Collection[str] = ()) -> dict[str, Any]:
    """`model` section of a recipe for a config.json, but for the fields to `skip`.

    What would change the model and cannot be computed here is refused, all in one error.
    """
    name, table = _family(config, origin)
    section = importlib.import_module(f"{models.__name__}.{name}").Config
    own = {field.name for field in fields(section)}
    problems = _fixed(config, table)
    values: dict[str, Any] = {}
    for field, key in table.fields.items():
        if key in config or key in table.absent:
            values[field] = config.get(key, table.absent.get(key))
        elif field not in skip:
            problems.append((key, "is missing"))
    _derive(values)
    positions, wrong = rope.read(config, "full_attention")
    values |= positions
    problems += [] if "theta" in skip else wrong
    if "local_theta" in own:
        near, wrong = rope.read(config, "sliding_attention")
        values["local_theta"] = near["theta"]
        if near["scaling"] is not None:
            kind = show(near["scaling"]["kind"])
            what = f"is {kind}; positions in layers that see a window are not scaled here"
            wrong.append(("rope_parameters.sliding_attention.rope_type", what))
        problems += [] if "local_theta" in skip else wrong
    if "global_every" in own:
        values["global_every"] = _pattern(config, problems)
    elif any(one != "full_attention" for one in _listed(config.get("layer_types"))):
        problems.append(("layer_types", "has layers that see a window; here every layer sees all"))
    if not problems and not skip:  # else what is wrong is found in the whole section, later
        wrong = attempt(section, values)[1]
        problems = [(table.fields.get(key, key), what) for key, what in wrong]
    if problems:
        raise UserError(report(problems, origin))
    return {"family": name, **values}


def written(
    config: Any, *, length: int, dtype: str, like: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of a family's section, such that transformers 4 and 5 read the same.

    `like` is the one that the model came with: its other keys are kept. Without it, `length` is
    how many positions the model was trained on; `dtype` is the type of the numbers in its files.
    """
    name = type(config).__module__.rpartition(".")[2]
    table = families().get(name)
    if table is None:
        raise UserError(f"Hugging Face has no models like {name}; it has {_known()}")
    ours: dict[str, Any] = {"architectures": [table.architecture], "model_type": table.model_type}
    ours |= {key: values[0] for key, values in table.fixed.items()}
    ours |= {key: getattr(config, field) for field, key in table.fields.items()}
    if getattr(config, "query_width", 0) is None:
        ours[table.fields["query_width"]] = config.head_dim
    ours |= rope.written(config.theta, config.scaling, getattr(config, "local_theta", None))
    if hasattr(config, "global_every"):
        ours["sliding_window_pattern"] = config.global_every
        ours["layer_types"] = _types(config.layers, config.global_every)
    ours |= {"dtype": dtype, "torch_dtype": dtype}
    dropped = ("auto_map", "_name_or_path", OWN)
    theirs = {key: x for key, x in (like or {}).items() if key not in dropped}
    if config.scaling is not None and config.scaling.original_length is not None:
        # Some releases take the factor from these two lengths.
        length = round(config.scaling.factor * config.scaling.original_length)
        original = rope.read(theirs, "full_attention")[0]["scaling"]
        if original is None or original.get("factor") != config.scaling.factor:
            theirs.pop("max_position_embeddings", None)
    return {"max_position_embeddings": length, **theirs, **ours}


def _family(config: Mapping[str, Any], origin: str) -> tuple[str, HuggingFace]:
    kind, architectures = config.get("model_type"), _listed(config.get("architectures"))
    for name, table in families().items():
        if kind == table.model_type and architectures in ([], [table.architecture]):
            return name, table
    what = f"model_type {show(kind)}"
    if architectures:
        what = f"architectures {listing(architectures, 'and')} with {what}"
    raise UserError(f"{origin} has {what}, which is not known here; there are {_known()}")


def _listed(value: Any) -> list:
    return value if isinstance(value, list) else [] if value is None else [value]


def _known() -> str:
    return listing(
        [f"{one.architecture} with {one.model_type} ({name})" for name, one in families().items()],
        "and",
    )


def _fixed(config: Mapping[str, Any], table: HuggingFace) -> list[Problem]:
    computed = {key: x for key, x in NEUTRAL.items() if key not in table.fields.values()}

    def what(key: str, values: tuple) -> str:
        shown, known = _shown(config[key]), listing(map(show, values))
        return f"is {shown}; {table.architecture} is computed here with {known}"

    return [
        (key, what(key, values))
        for key, values in (computed | dict(table.fixed)).items()
        if config.get(key) is not None and config[key] not in values
    ]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("quant_method", value)
    return show(value)


def _derive(sizes: dict[str, Any]) -> None:
    """Fill in sizes that follow from the others where a config.json leaves them null."""
    heads, embed = sizes.get("heads"), sizes.get("embed")
    if sizes.get("kv_heads", 0) is None:
        sizes["kv_heads"] = heads
    if sizes.get("head_dim", 0) is None and isinstance(heads, int) and isinstance(embed, int):
        sizes["head_dim"] = embed // max(1, heads)


def _pattern(config: Mapping[str, Any], problems: list[Problem]) -> int:
    """Period of global layers: one in how many sees the whole document."""
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    types = config.get("layer_types")
    if not isinstance(pattern, int | None) or isinstance(pattern, bool):
        what = f"is {show(pattern)}; it must be a whole number"
        problems.append(("sliding_window_pattern", what))
        return EVERY
    if not types:
        return pattern or EVERY
    layers = config.get("num_hidden_layers")
    if not isinstance(types, list) or (isinstance(layers, int) and len(types) != layers):
        has = f"has {len(types):,}" if isinstance(types, list) else f"is {show(types)}"
        what = f"{has}; it must be a list of one for each of num_hidden_layers ({show(layers)})"
        problems.append(("layer_types", what))
        return EVERY
    if "full_attention" in types:
        every = types.index("full_attention") + 1
    else:
        every = max(pattern or EVERY, len(types) + 1)
    if types != _types(len(types), every):
        what = f"is not one full_attention in every {every}, as the first of them has it"
        problems.append(("layer_types", what))
    return every


def _types(layers: int, every: int) -> list[str]:
    kinds = ("full_attention", "sliding_attention")
    return [kinds[(layer + 1) % every != 0] for layer in range(layers)]
