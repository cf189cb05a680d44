"""Kinds of conversations through templates: the text of `transformers`, and who generates it.

Behind the default prompt of the messages so far, up to the token that ends the turn, all is the
assistant's. Where a template is not compared, `DELIBERATE` has the reason.
"""

import re
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from tests.formats.templates import DEEPSEEK, HARMONY, SHAPES, Shape
from windlass.errors import UserError
from windlass.formats.chat import Format
from windlass.hub.chat_template import Template

TEMPLATES = {**SHAPES, "harmony": HARMONY}
TOOL = {
    "type": "function",
    "function": {
        "name": "warmth",
        "description": "Degrees at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(arguments: dict[str, Any]) -> dict[str, Any]:
    return said("assistant", "", tool_calls=[_function(arguments)])


def _function(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "warmth", "arguments": arguments}}


ASK = said("user", "How warm is it in Bern?")
ANSWER = said("assistant", "It is 12 degrees.")
RESULT = said("tool", "12")
KINDS: dict[str, list[dict[str, Any]]] = {
    "no system": [ASK, ANSWER],
    "system": [said("system", "Be brief."), ASK, ANSWER],
    "several turns": [ASK, ANSWER, said("user", "And now?"), said("assistant", "Still so.")],
    "tools": [ASK, call({"place": "Bern"})],
    "tool results": [ASK, call({"row": 3}), RESULT, ANSWER],
    "thought": [ASK, ANSWER | {"reasoning_content": "Look.", "thinking": "Look."}],
    "empty thought": [ASK, said("assistant", "<think>\n\n</think>\n\nIt is 12 degrees.")],
    "code": [ASK, said("assistant", "    def f(x):\n\treturn x\n")],
    "unicode": [ASK, said("assistant", "世界 👩‍👩‍👧‍👦 e\u0301 \U000f0000")],
    "empty": [ASK, said("assistant", "")],
}
NO_TOOLS = "the template refuses tools or leaves calls out, so that there is nothing to train on"
EMPTY = "an answer without a word is refused: it would teach to stop at once"
DELIBERATE: dict[tuple[str, str], str] = {
    **{(name, "empty"): EMPTY for name in TEMPLATES},
    **{
        (name, kind): NO_TOOLS
        for name in ("mistral", "gemma", "phi3", "cohere")
        for kind in ("tools", "tool results")
    },
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_is_the_text_of_transformers_and_what_is_generated_of_it_is_trained_on(
    name: str, kind: str
):
    shape = _of_one_day(TEMPLATES[name])
    messages = KINDS[kind]
    row = {"messages": messages} | ({"tools": [TOOL]} if "tool" in kind else {})
    if (name, kind) in DELIBERATE:
        with pytest.raises(UserError):
            _ours(shape, row)
        return
    text, spans = _ours(shape, row)
    if shape.source == DEEPSEEK.source:  # which adds text to text
        messages = [_with_text(one) for one in messages]
    reference = _theirs(shape)
    tools = row.get("tools")
    whole = reference(messages, tools=tools)
    assert text == whole
    numbers = [n for n, one in enumerate(messages) if one["role"] == "assistant"]
    assert len(spans) == len(numbers)
    for number, span in zip(numbers, spans, strict=True):
        prompt = reference(messages[:number], tools=tools, add_generation_prompt=True)
        if shape.source == DEEPSEEK.source:  # whose answers have no thought: that is warned of
            prompt = prompt.removesuffix("<think>\n")
        assert whole.startswith(prompt)
        assert span == whole[len(prompt) : _end(shape, messages[number], whole, len(prompt))]


def _end(shape: Shape, message: dict[str, Any], whole: str, start: int) -> int:
    """End of a turn: behind the token that ends it, which comes after its last word."""
    last = "warmth" if message.get("tool_calls") else message["content"].split("\n")[-1].strip()
    last = last or message["content"].split()[-1]
    at = whole.index(last, start) + len(last)
    stops = [shape.stop, "<|end|>", "<|call|>"] if "<|call|>" in shape.special else [shape.stop]
    return min(whole.index(stop, at) + len(stop) for stop in stops if stop in whole[at:])


def _ours(shape: Shape, row: dict[str, Any]) -> tuple[str, list[str]]:
    tokens = {"bos_token": shape.bos, "eos_token": shape.eos}
    variables = {name: token for name, token in tokens.items() if token is not None}
    template = Template(shape.source, shape.special, variables)
    (found,) = Format(messages="messages").render(row, "the row", template)
    return found.text, [found.text[span.start : span.stop] for span in found.spans]


def _theirs(shape: Shape) -> Any:
    tokens = {"bos_token": shape.bos, "eos_token": shape.eos}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Library(models.BPE()), **tokens)

    def render(messages: list[dict[str, Any]], **how: Any) -> str:
        text = tokenizer.apply_chat_template(
            messages, chat_template=shape.source, tokenize=False, **how
        )
        assert isinstance(text, str)
        return text

    return render


def _of_one_day(shape: Shape) -> Shape:
    return shape._replace(source=re.sub(r"strftime_now\(.*?\)", "'2024-07-26'", shape.source))


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    arguments = message["tool_calls"][0]["function"]["arguments"]
    return message | {"tool_calls": [_function(str(arguments).replace("'", '"'))]}
