"""The tokenizer of a GGUF file, from a tokenizer.json: tokens, their types, merges or scores.

llama.cpp has two kinds that these vocabularies are of. Byte-level BPE ("gpt2") is merges, and a
name for how a text is cut before. SentencePiece ("llama") merges the two neighbours whose token has
the highest score, whichever they are: as BPE with byte fallback does, where each token's merges are
all of its parts, and stand together in the order of the scores.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError

BEGINS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + r"[^\r\n\p{L}\p{N}]?\p{L}+|"
ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# What cuts a text before its parts are merged, by the name that llama.cpp has for it: expressions
# that split it, and "digits" for each by itself. The last of gpt-2 and smollm is in ByteLevel.
CUTS: dict[tuple[str, ...], str] = {
    ("words",): "gpt-2",
    ("digits", "words"): "smollm",
    (BEGINS + r"\p{N}{1,3}" + ENDS,): "llama-bpe",
    (BEGINS + r"\p{N}" + ENDS,): "qwen2",
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ): "tekken",
}
WHOLE_WORDS = ("llama-bpe", "tekken")  # take a word that is a token without merging it
SPACE = "\u2581"  # SentencePiece's
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
PLAIN = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}


def describe(writer: Any, vocabulary: Vocabulary, size: int) -> None:
    """Add a vocabulary to a file, with tokens that nothing is up to the model's `size`."""
    whole = json.loads(vocabulary.text)
    model, added = whole["model"], {one["id"]: one for one in whole.get("added_tokens", [])}
    if model.get("type") != "BPE" or any(model.get(key) not in (x, "") for key, x in PLAIN.items()):
        raise _refusal(f"is {model.get('type')}, or has options that are not in llama.cpp")
    texts = {number: text for text, number in model["vocab"].items()}
    texts |= {number: one["content"] for number, one in added.items()}
    unknown = model["vocab"].get(model.get("unk_token"))
    types = [_type(number, texts, added, unknown) for number in range(size)]
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(_has_prefix(whole))
        scores = _scores(model, {one["content"] for one in added.values()})
        writer.add_token_scores([scores.get(texts.get(number, ""), 0.0) for number in range(size)])
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_cut(whole))
        writer.add_token_merges(_merges(model, vocabulary))
    writer.add_token_list([_text(number, texts, added) for number in range(size)])
    writer.add_token_types(types)
    _add_special(writer, vocabulary, unknown)
    if vocabulary.template is not None:
        writer.add_chat_template(vocabulary.template)


def _add_special(writer: Any, vocabulary: Vocabulary, unknown: int | None) -> None:
    writer.add_eos_token_id(vocabulary.eos)
    # Where none begins a document, it is not to be the format's default, which is some word.
    writer.add_bos_token_id(vocabulary.eos if vocabulary.bos is None else vocabulary.bos)
    writer.add_add_bos_token(vocabulary.bos is not None)
    writer.add_add_eos_token(False)
    if ends := sorted(vocabulary.stops - {vocabulary.eos}):
        writer.add_eot_token_id(ends[0])
    if unknown is not None:
        writer.add_unk_token_id(unknown)
    padding = vocabulary.settings.get("pad_token")
    if isinstance(padding, str) and (number := _number(vocabulary, padding)) is not None:
        writer.add_pad_token_id(number)


def _number(vocabulary: Vocabulary, text: str) -> int | None:
    return next((one for one in sorted(vocabulary.special) if vocabulary.name(one) == text), None)


def _text(number: int, texts: Mapping[int, str], added: Mapping[int, dict]) -> str:
    if number not in texts:
        return f"[PAD{number}]"
    # llama.cpp looks for these in a text as it is, before spaces are SentencePiece's.
    is_typed = number in added and not added[number]["special"]
    return texts[number].replace(SPACE, " ") if is_typed else texts[number]


def _type(
    number: int, texts: Mapping[int, str], added: Mapping[int, dict], unknown: int | None
) -> int:
    from gguf import TokenType

    if number not in texts:
        return TokenType.UNUSED
    if number == unknown:
        return TokenType.UNKNOWN
    if number in added:
        return TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED
    return TokenType.BYTE if BYTE.fullmatch(texts[number]) else TokenType.NORMAL


def _merges(model: Mapping[str, Any], vocabulary: Vocabulary) -> list[str]:
    merges = [" ".join(pair) for pair in _pairs(model)]
    # A file without merges is not loaded. Parts begin as single letters, so that two whole special
    # tokens never stand beside each other.
    end = vocabulary.name(vocabulary.eos)
    return merges or [f"{end} {end}"]


def _pairs(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The merges of both spellings: one text, or a list of two."""
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def _steps(whole: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Steps of a normalizer or a pre-tokenizer, which may be a sequence of others."""
    one = whole.get(key)
    if not one:
        return []
    return one[f"{key}s" if key == "normalizer" else "pretokenizers"] if _is_list(one) else [one]


def _is_list(one: Mapping[str, Any]) -> bool:
    return one["type"] == "Sequence"


def _cut(whole: Mapping[str, Any]) -> str:
    """The name that llama.cpp has for a byte-level pre-tokenizer."""
    model, cuts = whole["model"], []
    if any(step["type"] != "NFC" for step in _steps(whole, "normalizer")):
        raise _refusal("changes the text before it is cut")
    *before, last = _steps(whole, "pre_tokenizer") or [{"type": None}]
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        raise _refusal("is not of bytes, or puts a space in front")
    for step in before:
        if step["type"] == "Digits" and step.get("individual_digits"):
            cuts.append("digits")
        elif step["type"] == "Split" and "Regex" in step["pattern"] and not step.get("invert"):
            cuts.append(step["pattern"]["Regex"])
        else:
            raise _refusal(f"cuts a text by {step['type']}")
    cuts += ["words"] if last.get("use_regex", True) else []
    if not model["merges"]:
        return "gpt-2"  # however a text is cut, its bytes are the tokens
    name = CUTS.get(tuple(cuts))
    if name is None:
        raise _refusal("cuts a text by an expression that llama.cpp has no name for")
    if model.get("ignore_merges") and name not in WHOLE_WORDS:
        raise _refusal("takes whole words without merging them")
    return name


def _has_prefix(whole: Mapping[str, Any]) -> bool:
    """Presence of a space in front of a text, of a tokenizer that writes spaces as SPACE."""
    prefix, is_spaced = False, False
    for step in _steps(whole, "normalizer"):
        if step["type"] == "Prepend" and step["prepend"] == SPACE:
            prefix = True
        elif step["type"] == "Replace" and step["pattern"] == {"String": " "}:
            is_spaced = step["content"] == SPACE
        else:
            raise _refusal(f"changes a text by {step['type']}")
    for step in _steps(whole, "pre_tokenizer"):
        if step["type"] == "Metaspace" and step["replacement"] == SPACE and not step.get("split"):
            prefix, is_spaced = prefix or step.get("prepend_scheme") != "never", True
        elif step["type"] != "Split" or step["pattern"] != {"String": " "} or not is_spaced:
            raise _refusal(f"cuts a text by {step['type']}")
    if not is_spaced:
        raise _refusal(f"writes no spaces as {SPACE}")
    return prefix


def _scores(model: Mapping[str, Any], added: set[str]) -> dict[str, float]:
    """Scores of tokens, by which SentencePiece merges as BPE does by the order of its merges."""
    scores: dict[str, float] = {}
    pairs, newest = set(), ""
    for rank, (left, right) in enumerate(_pairs(model)):
        token = left + right
        if token != newest and token in scores:
            raise _refusal("has merges of one token in several places")
        scores.setdefault(token, -float(rank))
        pairs.add((left, right))
        newest = token
    known = {text for text in model["vocab"] if len(text) == 1 or text in scores} - added
    for text in known:
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in known and right in known and (left, right) not in pairs:
                raise _refusal(f"does not merge {left} and {right}, though {text} is a token")
    return scores


def _refusal(what: str) -> UserError:
    return UserError(
        f"the tokenizer {what}, so that llama.cpp would cut a text otherwise; --as model or "
        "--as merged writes a folder, from which convert_hf_to_gguf.py of llama.cpp makes a file "
        "where it knows the tokenizer"
    )
