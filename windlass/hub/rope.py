"""RoPE parameters in a config.json, in both of its spellings.

The current one is `rope_parameters`, by kind of layer where there are two; the older one has
`rope_theta`, `rope_local_base_freq` and `rope_scaling`. Both are read, must agree where both are
there, and are written.
"""

import dataclasses
import math
from collections.abc import Collection, Container, Mapping
from typing import Any, Literal

from windlass.config.reading import Problem, listing, show
from windlass.layers.rotary import FAST, Scaling

Layer = Literal["full_attention", "sliding_attention"]

# From the fields of a scaling to their names there.
WORDS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "slow": "low_freq_factor",
        "fast": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "slow": "beta_slow",
        "fast": "beta_fast",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
    },
}
BASES: dict[Layer, str] = {
    "full_attention": "rope_theta",
    "sliding_attention": "rope_local_base_freq",
}
SHARE = "partial_rotary_factor"
KNOWN = {word for words in WORDS.values() for word in words.values()} | {
    *("rope_type", "type", "rope_theta", SHARE, "mscale", "mscale_all_dim")
}


def read(
    config: Mapping[str, Any],
    layer: Layer,
    *,
    kinds: Collection[str] = tuple(WORDS),
    has_share: bool = False,
    more: Container[str] = (),
) -> tuple[dict[str, Any], list[Problem]]:
    """RoPE base and scaling of one kind of layer, as a recipe has them, and what is wrong.

    `kinds` of scaling are those that the family has, and `more` are keys that it knows beside those
    that all have. One that may rotate a share of a head gets that, too, if it is there.
    """
    problems: list[Problem] = []
    at = "rope_parameters"
    current = _mapping(config.get(at), at, problems)
    if any(isinstance(value, Mapping) for value in current.values()):
        at = f"{at}.{layer}"
        current = _mapping(current.get(layer), at, problems)
    former = {}
    if layer == "full_attention":
        former = _mapping(config.get("rope_scaling"), "rope_scaling", problems)
    base = BASES[layer]
    bases = {
        f"{at}.rope_theta": current.get("rope_theta"),
        "rope_scaling.rope_theta": former.get("rope_theta"),
        base: config.get(base),
    }
    known = {key: value for key, value in bases.items() if value is not None}
    if wrong := {key: value for key, value in known.items() if not _is_number(value)}:
        what = "it must be a number"
        problems += [(key, f"is {show(value)}; {what}") for key, value in wrong.items()]
        return {"theta": None, "scaling": None}, problems
    if not known:
        own = "theta" if layer == "full_attention" else "local_theta"
        what = f"the RoPE base has no default; model.{own} sets it"
        problems.append((base, f"is missing: {what}"))
    elif len(set(known.values())) > 1:
        both = listing([f"{key} {show(value)}" for key, value in known.items()], "and")
        problems.append((base, f"is given twice, with different values: {both}"))
    one, other = (
        _scaling(parameters, where, config, kinds, problems, more)
        for parameters, where in ((current, at), (former, "rope_scaling"))
    )
    if current and former and one != other and not problems:
        problems.append(("rope_scaling", f"is another scaling than {at} has"))
    shares = {at: current.get(SHARE), "rope_scaling": former.get(SHARE)}
    wrong = [(where, x) for where, x in shares.items() if x not in (None, 1) and not has_share]
    problems += [(f"{where}.{SHARE}", f"is {x}; only 1 is computed here") for where, x in wrong]
    found = {"theta": next(iter(known.values()), None), "scaling": one or other}
    share = next((x for x in (*shares.values(), config.get(SHARE)) if x is not None), None)
    return found | ({"share": share} if has_share else {}), problems


def _mapping(value: Any, key: str, problems: list[Problem]) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        problems.append((key, f"is {show(value)}; it must be a mapping"))
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def kept(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """RoPE parameters of these keys, in either spelling."""
    found = {}
    for at in ("rope_scaling", "rope_parameters"):
        parameters = config.get(at)
        if isinstance(parameters, Mapping):
            found |= {key: parameters[key] for key in keys if key in parameters}
    return found


def _scaling(
    parameters: Mapping[str, Any],
    at: str,
    config: Mapping[str, Any],
    kinds: Collection[str],
    problems: list[Problem],
    more: Container[str],
) -> dict[str, Any] | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    strange = [key for key in parameters if key not in KNOWN and key not in more]
    if not isinstance(kind, str) or kind not in ("default", *kinds):
        there = f"there are {listing(['default', *kinds], 'and')}" if kinds else "only default is"
        what = f"is {show(kind)}; {there}" + ("" if kinds else " computed here")
        problems.append((f"{at}.rope_type", what))
        return None
    problems += [(f"{at}.{key}", f"is {show(parameters[key])}; it is not known") for key in strange]
    if kind == "default":
        return None
    numbers = {*WORDS[kind].values(), "mscale", "mscale_all_dim"} - {"truncate"}
    wrong = [
        (f"{at}.{word}", f"is {show(parameters[word])}; it must be a number above 0")
        for word in sorted(numbers & parameters.keys())
        if parameters[word] is not None
        and not (_is_number(parameters[word]) and parameters[word] > 0)
    ]
    lengths = ("max_position_embeddings", "original_max_position_embeddings")
    wrong += [
        (word, f"is {show(config[word])}; it must be a number above 0")
        for word in lengths
        if config.get(word) is not None and not (_is_number(config[word]) and config[word] > 0)
    ]
    if wrong:
        problems += wrong
        return None
    fields = {field: parameters.get(word) for field, word in WORDS[kind].items()}
    if "original_length" in fields:
        usual = fields["original_length"] or config.get("max_position_embeddings")
        fields["original_length"] = config.get("original_max_position_embeddings") or usual
    if kind == "yarn":
        if fields["factor"] is None and fields["original_length"]:
            longest = config.get("max_position_embeddings") or fields["original_length"]
            fields["factor"] = longest / fields["original_length"]
        one, all_of_it = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if fields["attention_factor"] is None and one and all_of_it and fields["factor"]:
            above, below = (0.1 * x * math.log(fields["factor"]) + 1 for x in (one, all_of_it))
            fields["attention_factor"] = above / below
    if fields["factor"] is None:
        problems.append((f"{at}.factor", f"is missing: {kind} scaling needs it"))
    return {"kind": kind, **{name: value for name, value in fields.items() if value is not None}}


def written(
    theta: float, scaling: Scaling | None, local_theta: float | None = None
) -> dict[str, Any]:
    """RoPE keys in both spellings; `local_theta` is that of layers that see a window."""
    scaled = None if scaling is None else _written(scaling)
    here: dict[str, Any] = {"rope_theta": theta, **(scaled or {"rope_type": "default"})}
    if local_theta is None:
        return {"rope_theta": theta, "rope_scaling": scaled, "rope_parameters": here}
    near = {"rope_theta": local_theta, "rope_type": "default"}
    return {
        "rope_theta": theta,
        "rope_local_base_freq": local_theta,
        "rope_scaling": scaled,
        "rope_parameters": {"full_attention": here, "sliding_attention": near},
    }


def _written(scaling: Scaling) -> dict[str, Any]:
    if scaling.kind in FAST:  # not everyone has the same usual values
        slow, fast = scaling.bounds
        scaling = dataclasses.replace(scaling, slow=slow, fast=fast)
    values = {word: getattr(scaling, field) for field, word in WORDS[scaling.kind].items()}
    return {"rope_type": scaling.kind, **{w: x for w, x in values.items() if x is not None}}
