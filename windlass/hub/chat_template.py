"""Chat templates: the Jinja text that turns messages into what a model reads, run in a sandbox."""

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
# Of the values that a template is given, and of the filters of Jinja, which assert.
ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
SHOWN = 300  # characters of what a template says when it refuses

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
            template = self._compiled
            template.environment.begin()
            return "".join(template.generate(context))
        except jinja2.TemplateError as wrong:
            raise Unrendered(str(wrong.message or type(wrong).__name__)[:SHOWN]) from None
        except ERRORS as wrong:
            raise Unrendered(f"{type(wrong).__name__}: {wrong}"[:SHOWN]) from None
        except RecursionError:
            raise Unrendered("it calls itself without end") from None
        except MemoryError:
            raise Unrendered("it needs more memory than there is") from None

    @cached_property
    def tokens(self) -> re.Pattern[str]:
        """Pattern of special tokens in a text, the longest that stands at a place."""
        longest_first = sorted(self.special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")

    @cached_property
    def _compiled(self) -> Any:
        import jinja2

        from windlass.hub.template_sandbox import SOURCE, environment

        if len(self.source) > SOURCE:
            raise UserError(
                f"the chat template has {len(self.source):,} characters, of which at most "
                f"{SOURCE:,} are read"
            )
        try:
            return environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as wrong:
            raise UserError(
                f"the chat template is not Jinja: {wrong.message} at line {wrong.lineno}"
            ) from None
        except (RecursionError, MemoryError, SyntaxError):  # of Python, for what Jinja compiles to
            raise UserError("the chat template is nested too deeply to be read") from None


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
