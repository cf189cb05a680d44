"""Chat templates: the Jinja text that turns messages into what a model reads, run in a sandbox."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from windlass.errors import UserError

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Rows are rendered as of one day, whenever that is done: a run can be resumed tomorrow.
A_DAY = datetime(2024, 7, 26)
LONGEST = 2**26  # characters; a template that writes more never ends

Thinking = Literal["none", "off", "on"]
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


class Unrendered(Exception):
    """Refusal of a template to render some messages, with the reason."""


class Template:
    """A chat template with the special tokens of its vocabulary.

    Its variables are those of `transformers`, but for the day, which is `now`.
    """

    def __init__(self, source: str, special: Sequence[str], variables: Mapping[str, str]):
        self.source, self.special, self.variables = source, tuple(special), dict(variables)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        prompt: bool = False,
        now: datetime = A_DAY,
        **variables: Any,
    ) -> str:
        """The text of a conversation; as a `prompt`, with the words that begin an answer."""
        import jinja2

        context: dict[str, Any] = {"tools": None, "documents": None, **self.variables, **variables}
        context |= {"messages": messages, "add_generation_prompt": prompt}
        context["strftime_now"] = now.strftime
        try:
            pieces, length = [], 0
            for piece in self._compiled.generate(context):
                pieces.append(piece)
                length += len(piece)
                if length > LONGEST:
                    raise Unrendered(f"it writes more than {LONGEST:,} characters")
        except jinja2.TemplateError as wrong:
            raise Unrendered(str(wrong.message or type(wrong).__name__)) from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as wrong:
            raise Unrendered(f"{type(wrong).__name__}: {wrong}") from None
        except RecursionError:
            raise Unrendered("it calls itself without end") from None
        return "".join(pieces)

    @cached_property
    def tokens(self) -> re.Pattern[str]:
        """Pattern of special tokens in a text, the longest that stands at a place."""
        longest_first = sorted(self.special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")

    @cached_property
    def _compiled(self) -> Any:
        import jinja2

        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as wrong:
            raise UserError(
                f"the chat template is not Jinja: {wrong.message} at line {wrong.lineno}"
            ) from None


def source(name: str) -> str:
    """Source of a template that a recipe names: `chatml`, or a file."""
    if name == "chatml":
        return CHATML
    file = Path(name).expanduser()
    if not file.is_file():
        raise UserError(
            f"data.format.template is {name}; it is chatml, or a file with a Jinja template, and "
            f"there is no file {file}"
        )
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"data.format.template is {name}, which is not UTF-8") from None


def chat_prompt(
    messages: list[dict[str, Any]],
    template: Template,
    thinking: Thinking = "none",
    **variables: Any,
) -> str:
    """Generation prompt of a chat; with thinking off, an empty thought ends it."""
    if thinking != "none":
        variables["enable_thinking"] = thinking == "on"
    try:
        text = template.render(messages, prompt=True, now=datetime.now(), **variables)
    except Unrendered as why:
        raise UserError(f"the chat template refuses this conversation: {why}") from None
    if thinking == "off" and not text.rstrip().endswith("</think>"):
        text = re.sub(r"<think>\s*$", "", text) + EMPTY_THOUGHT
    return text


def _environment() -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """A sandbox in which no product fills the memory."""

        intercepted_binops = frozenset({"*"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            for one, times in ((left, right), (right, left)):
                is_many = isinstance(one, str | list | tuple) and isinstance(times, int)
                if is_many and len(one) * times > LONGEST:
                    raise SecurityError(f"it multiplies to more than {LONGEST:,} characters")
            return super().call_binop(context, operator, left, right)

    class Generation(Extension):
        """The `generation` block, which elsewhere masks the loss: here it is its content alone."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own escapes what would be HTML.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
