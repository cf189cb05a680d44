"""Counts of a text: words, characters, citations of law, steps of reasoning."""

import re
from collections.abc import Callable
from typing import Any

# A few words with a capital, with the small words that stand inside such names. Not any number of
# them: a text all in capitals would be searched again from each of its words.
_NAME = r"\b[A-Z][\w'’&-]*(?: (?:(?:of|the|and|for|against|in) )?(?:[A-Z(][\w'’&()-]*|&)){0,7}"
_LEADING = re.compile(r"^(?:(?:In|See|As|By|Under|Compare|But|And|While|With) )+")

# In a list of cases a citation is what follows a name; alone, it counts by itself.
NEUTRAL = r"\[\d{4}\] (?:\d+ )?[A-Z][A-Za-z]*(?: [A-Z][a-z]+)? \d+"  # [2023] UKSC 12, [2001] 2 AC 9
CASE = rf"(?:{_NAME} v\.? {_NAME}|Re {_NAME})"  # Smith v Jones, Re Lark
ACT = rf"(?!The Act){_NAME} Act \d{{4}}"  # Sale of Goods Act 1979
CITATION = re.compile(rf"(?P<case>{CASE})(?:,? {NEUTRAL})?|(?P<alone>{NEUTRAL}|{ACT})")
STEP = re.compile(r"\bStep (\d+):")


def words(text: str) -> int:
    """Whitespace-separated words."""
    return len(text.split())


def characters(text: str) -> int:
    return len(text.strip())


def citations(text: str) -> int:
    """Different cases and statutes; a case with its citation is one, however often it is named."""
    names = (match["case"] or match["alone"] for match in CITATION.finditer(text))
    return len({_LEADING.sub("", name) for name in names})


def steps(text: str) -> int:
    """Different numbers written as `Step 1:`."""
    return len(set(STEP.findall(text)))


COUNTS: dict[str, Callable[[str], int]] = {
    "words": words,
    "characters": characters,
    "citations": citations,
    "steps": steps,
}


def text_of(value: Any) -> str:
    """The text of a field; of a list of messages, their contents."""
    if isinstance(value, list | tuple):
        return "\n".join(text_of(item) for item in value)
    if isinstance(value, dict):
        content = value.get("content", value.get("value"))
        return text_of(list(value.values()) if content is None else content)
    return "" if value is None else str(value)
