"""config.json to a family's section and back, by the table that each family has."""

import importlib
import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from windlass import models
from windlass.config.reading import Problem, attempt, listing, report, show
from windlass.errors import UserError
from windlass.files import parse_json
from windlass.hub import quantized, rope
from windlass.models import HuggingFace

TEXT = "text_config"  # the key of the language model's config, in that of a multimodal model
TIED = "tie_word_embeddings"
FILE = "config.json"
OWN = "windlass"  # the key of sections that say all of a model that only Windlass computes
# Keys that an export does not have; what was quantized is written as the numbers it was read as.
DROPPED = ("auto_map", "_name_or_path", quantized.KEY, OWN)
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
}


class Period(NamedTuple):
    """Layers of two kinds in turn, of which every n-th is of the first."""

    field: str  # n, of a family's section
    interval: str  # the key for n
    types: str  # the key for the kinds of all layers, one by one
    kinds: tuple[Any, Any]

    def listed(self, layers: int, every: int) -> list:
        return [self.kinds[(layer + 1) % every != 0] for layer in range(layers)]


PERIODS = (
    Period(
        field="global_every",
        interval="sliding_window_pattern",
        types="layer_types",
        kinds=("full_attention", "sliding_attention"),
    ),
    Period(
        field="attention_every",
        interval="full_attention_interval",
        types="layer_types",
        kinds=("full_attention", "linear_attention"),
    ),
    Period(
        field="no_rope_every",
        interval="no_rope_layer_interval",
        types="no_rope_layers",
        kinds=(0, 1),
    ),
)


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
    config = language(config)
    section = importlib.import_module(f"{models.__name__}.{name}").Config
    own = {field.name for field in fields(section)}
    config = {table.also.get(key, key): value for key, value in config.items()}
    spelled: list[Problem] = []
    if table.spelling is not None:
        config, spelled = table.spelling.read(config)
    config |= {key: x for key, x in rope.kept(config, table.rope).items() if key in table.absent}
    problems = [*spelled, *_fixed(config, table)]
    if quantized.KEY not in table.fixed:
        problems += quantized.read(config)[1]
    values: dict[str, Any] = {}
    for field, key in table.fields.items():
        if key in config or key in table.absent:
            values[field] = config.get(key, table.absent.get(key))
        elif field not in skip:
            problems.append((key, "is missing"))
    _derive(values)
    kinds = rope.WORDS if "scaling" in own else ()
    has_share = "rotary_share" in own
    positions, wrong = rope.read(
        config, "full_attention", kinds=kinds, has_share=has_share, more=table.rope
    )
    share = positions.pop("share", None)
    values |= {key: x for key, x in positions.items() if key in own}
    if share is not None:
        values["rotary_share"] = share
    problems += [] if "theta" in skip else wrong
    if table.by_layer:
        near, wrong = rope.read(config, "sliding_attention")
        if "local_theta" in own:
            values["local_theta"] = near["theta"]
        else:
            wrong = _one_base(near["theta"], positions["theta"], table)
        if near["scaling"] is not None:
            kind = show(near["scaling"]["kind"])
            what = f"is {kind}; positions in layers that see a window are not scaled here"
            wrong.append(("rope_parameters.sliding_attention.rope_type", what))
        problems += [] if "local_theta" in skip else wrong
    periods = [period for period in PERIODS if period.field in own]
    for period in periods:
        values[period.field] = _every(config, period, table, problems)
    if all(period.types != "layer_types" for period in periods) and any(
        one != "full_attention" for one in _listed(config.get("layer_types"))
    ):
        problems.append(("layer_types", "has layers that see a window; here every layer sees all"))
    if not problems and not skip:  # else what is wrong is found in the whole section, later
        wrong = attempt(section, values)[1]
        problems = [(table.fields.get(key, key), what) for key, what in wrong]
    if problems:
        raise UserError(report(problems, origin))
    return {"family": name, **values}


def written(
    config: Any,
    *,
    length: int,
    dtype: str,
    like: Mapping[str, Any] | None = None,
    scores: int = 0,
) -> dict[str, Any]:
    """The config.json of a family's section, such that transformers 4 and 5 read the same.

    `like` is the one that the model came with: its other keys are kept. Without it, `length` is
    how many positions the model was trained on; `dtype` is the type of the numbers in its files.
    """
    name = type(config).__module__.rpartition(".")[2]
    table = families().get(name)
    if table is None:
        raise UserError(f"Hugging Face has no models like {name}; it has {_known()}")
    if like is not None and TEXT in like:
        return _put_back(like, written(config, length=length, dtype=dtype, like=language(like)))
    ours: dict[str, Any] = {"architectures": [table.architecture], "model_type": table.model_type}
    came = like or {}
    ours |= {
        key: came[key] if key in came and came[key] in values else values[0]
        for key, values in table.fixed.items()
    }
    ours |= {key: getattr(config, field) for field, key in table.fields.items()}
    if getattr(config, "query_width", 0) is None:
        ours[table.fields["query_width"]] = config.head_dim
    local = getattr(config, "local_theta", None)
    if table.by_layer and local is None:
        local = config.theta
    scaling = getattr(config, "scaling", None)
    ours |= rope.written(config.theta, scaling, local)
    share = getattr(config, "rotary_share", None)
    if share is not None and not table.by_layer:
        ours["rope_parameters"][rope.SHARE] = share
    for period in PERIODS:
        if (every := getattr(config, period.field, None)) is not None:
            ours |= {period.interval: every, period.types: period.listed(config.layers, every)}
    own = rope.kept(came, table.rope)
    own |= {key: ours[key] for key in table.rope if key in ours}
    for at in ("rope_scaling", "rope_parameters"):
        ours[at] = ours[at] and ours[at] | own
    ours |= {"dtype": dtype, "torch_dtype": dtype}
    if scores:
        ours |= {"architectures": [table.classifier], **_labels(scores)}
    ours.pop(quantized.KEY, None)
    dropped = (*DROPPED, *table.also)
    if table.spelling is not None:
        ours |= table.spelling.written(config)
        dropped += table.spelling.former
        ours = {key: x for key, x in ours.items() if key not in table.spelling.former}
    theirs = {key: x for key, x in came.items() if key not in dropped}
    if scaling is not None and scaling.original_length is not None:
        # Some releases take the factor from these two lengths.
        length = round(scaling.factor * scaling.original_length)
        original = rope.read(theirs, "full_attention", more=table.rope)[0]["scaling"]
        if original is None or original.get("factor") != scaling.factor:
            theirs.pop("max_position_embeddings", None)
    # Without the key some families pad with a token that smaller vocabularies have not.
    return {"max_position_embeddings": length, "pad_token_id": None, **theirs, **ours}


def language(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a language model, of that of a multimodal model which it is a part of."""
    if not isinstance(text := config.get(TEXT), Mapping):
        return dict(config)
    return {**text, TIED: config.get(TIED, text.get(TIED, False))}


def _put_back(whole: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a multimodal model with another one of its language model."""
    inner = {key: x for key, x in text.items() if key != "architectures"}
    outer = {key: text[key] for key in (TIED, "dtype", "torch_dtype") if key in text}
    theirs = {key: x for key, x in whole.items() if key not in DROPPED}
    return {**theirs, TEXT: inner, **outer}


def table_of(config: Mapping[str, Any]) -> HuggingFace | None:
    """The table of a config.json's family; None where that is of none that is known here."""
    found = _found(config)
    return None if found is None else found[1]


def _one_base(near: Any, far: Any, table: HuggingFace) -> list[Problem]:
    if near in (None, far):
        return []
    what = f"is {show(near)}; {table.architecture} is computed here with one base, {show(far)}"
    return [("rope_parameters.sliding_attention.rope_theta", what)]


def _found(config: Mapping[str, Any]) -> tuple[str, HuggingFace] | None:
    kind, architectures = config.get("model_type"), _listed(config.get("architectures"))
    for name, table in families().items():
        if kind == table.model_type and architectures in _architectures(table):
            return name, table
        whole = table.multimodal
        if whole and kind == whole.model_type and architectures in ([], [whole.architecture]):
            return name, table
    return None


def _labels(scores: int) -> dict[str, Any]:
    """Labels of a classifier, as many as it has scores."""
    names = {f"{number}": f"LABEL_{number}" for number in range(scores)}
    return {"id2label": names, "label2id": {name: int(key) for key, name in names.items()}}


def _family(config: Mapping[str, Any], origin: str) -> tuple[str, HuggingFace]:
    kind, architectures = config.get("model_type"), _listed(config.get("architectures"))
    if (found := _found(config)) is not None:
        return found
    what = f"model_type {show(kind)}"
    if architectures:
        what = f"architectures {listing(architectures, 'and')} with {what}"
    raise UserError(f"{origin} has {what}, which is not known here; there are {_known()}")


def _architectures(table: HuggingFace) -> tuple[list[str], ...]:
    """Values of `architectures` that a family computes."""
    return [], [table.architecture], [table.classifier]


def _listed(value: Any) -> list:
    return value if isinstance(value, list) else [] if value is None else [value]


def _known() -> str:
    return listing(
        [
            f"{one.architecture} with {one.model_type} ({name})"
            for name, table in families().items()
            for one in filter(None, (table, table.multimodal))
        ],
        "and",
    )


def _fixed(config: Mapping[str, Any], table: HuggingFace) -> list[Problem]:
    computed = {key: x for key, x in NEUTRAL.items() if key not in table.fields.values()}

    def what(key: str, values: tuple) -> str:
        shown, known = show(_kind(config[key])), listing(map(show, values))
        return f"is {shown}; {table.architecture} is computed here with {known}"

    return [
        (key, what(key, values))
        for key, values in (computed | dict(table.fixed)).items()
        if config.get(key) is not None and _kind(config[key]) not in values
    ]


def _kind(value: Any) -> Any:
    """The method of a quantization, which is a mapping; other values as they are."""
    return value.get("quant_method", value) if isinstance(value, Mapping) else value


def _derive(sizes: dict[str, Any]) -> None:
    """Fill in sizes that follow from the others where a config.json leaves them null."""
    heads, embed = sizes.get("heads"), sizes.get("embed")
    if sizes.get("kv_heads", 0) is None:
        sizes["kv_heads"] = heads
    if sizes.get("head_dim", 0) is None and isinstance(heads, int) and isinstance(embed, int):
        sizes["head_dim"] = embed // max(1, heads)


def _every(
    config: Mapping[str, Any], period: Period, table: HuggingFace, problems: list[Problem]
) -> int:
    """Period of the layers of two kinds, from its key or from the list of all of them."""
    usual = table.absent[period.interval]
    # Under an underscore in files of some releases.
    interval = config.get(period.interval) or config.get(f"_{period.interval}")
    types = config.get(period.types)
    if not isinstance(interval, int | None) or isinstance(interval, bool):
        what = f"is {show(interval)}; it must be a whole number"
        problems.append((period.interval, what))
        return usual
    if not types:
        return interval or usual
    layers = config.get("num_hidden_layers")
    if not isinstance(types, list) or (isinstance(layers, int) and len(types) != layers):
        has = f"has {len(types):,}" if isinstance(types, list) else f"is {show(types)}"
        what = f"{has}; it must be a list of one for each of num_hidden_layers ({show(layers)})"
        problems.append((period.types, what))
        return usual
    if period.kinds[0] in types:
        every = types.index(period.kinds[0]) + 1
    else:
        every = max(interval or usual, len(types) + 1)
    if types != period.listed(len(types), every):
        what = f"is not one {period.kinds[0]} in every {every}, as the first of them has it"
        problems.append((period.types, what))
    return every
