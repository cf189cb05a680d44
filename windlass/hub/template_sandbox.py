"""Jinja sandbox for chat templates: no code of theirs runs, and their time and memory have ends.

Jinja's own sandbox keeps a template from the interpreter, not from the machine: `x ~ x` forty times
fills any memory, and two nested loops have no end. Here every value that a template makes is
measured, before it is made where it could be large, and the total is limited; every step of a loop,
call and filter looks at the clock.
"""

import functools
import json
import re
import string
import sys
import threading
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LONGEST = 2**26  # bytes of one value; a template that makes a longer one never ends
MADE = 2**29  # bytes of all values that are made for one conversation
SECONDS = 10.0  # for one conversation, of which thousands are rendered in a second
SOURCE = 2**20  # characters of a template
INTEGER_BITS = 2**14
EMPTY = sys.getsizeof("")
ITEM = 64  # bytes of an item in a container, and of a number
# Tuples, since a union is made anew each time it is written.
TEXTS, PLAIN, OWNERS = (str, bytes), (str, int), (str, int, datetime)
SEQUENCES = (str, list, tuple)
CONTAINERS = (list, tuple, set, KeysView, ValuesView, ItemsView)
STEPS = "loop steps"  # a filter that no template writes
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
WITHOUT = ("lipsum", "pprint", "random", "urlize")  # of no use in a chat, and slow or by chance
CHEAP = {"count", "d", "default", "first", "last", "length"}  # however large a value is
WITHOUT_METHODS = {"encode", "maketrans", "to_bytes", "translate"}  # and all those of bytes
SLOW = {"striptags", "title", "urlencode", "wordcount", "wordwrap", "xmlattr"}  # for SOURCE at most


class Budget(threading.local):
    """Bytes that were made for a conversation, and when it must end; of each thread its own."""

    made = 0
    ends = computed = float("inf")


class Sandbox(ImmutableSandboxedEnvironment):
    """Sandboxed environment with a budget of bytes and of time for each conversation."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options: Any):
        # A constant that is folded is computed when the template is read, outside of any budget.
        super().__init__(optimized=False, finalize=self.written, **options)
        for name in WITHOUT:
            self.filters.pop(name, None)
            self.globals.pop(name, None)
        formats = self.filters.pop("format")
        self.filters |= {name: self._measured(name, one) for name, one in self.filters.items()}
        self.filters["format"] = self._measured("%", formats)  # as the operator, not the method
        self.tests |= {name: self._ticking(one) for name, one in self.tests.items()}
        self.filters[STEPS] = functools.partial(Steps, tick=self.tick)
        self._budget = Budget()

    def begin(self) -> None:
        """Begin a conversation with a whole budget."""
        self._budget.made, self._budget.ends = 0, time.monotonic() + SECONDS
        self._budget.computed = time.thread_time() + SECONDS

    def tick(self) -> None:
        """Look at the clock."""
        # The time that it computes, which is dearer to ask for: a process may have been stopped.
        budget = self._budget
        if time.monotonic() > budget.ends and time.thread_time() > budget.computed:
            raise SecurityError(f"it takes more than {SECONDS:g} seconds")

    def made(self, value: Any) -> Any:
        """A value that the template has made, on its budget."""
        self._spend(measure(value))
        return value

    def sliced(self, value: Any) -> Any:
        """A part of a value: of a container the items are those that were there."""
        self._spend(ITEM * len(value) if isinstance(value, list | tuple) else measure(value))
        return value

    def written(self, value: Any) -> Any:
        """A value that the template writes."""
        if type(value) is not str:
            self._spend(measure(value))
        else:
            self._spend(len(value))
        return value

    def concatenated(self, join: Callable[[Any], str], parts: tuple) -> str:
        """`a ~ b`."""
        self._spend(measure(parts))
        return join(parts)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        __self.tick()
        __self._check_grown(*args, *kwargs.values())
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja's own around str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, OWNERS):
            args = __self._bounded(method.__name__, owner, args, kwargs)
        elif isinstance(__obj, LoopContext):  # of a recursive loop
            args = tuple(Steps(one, tick=__self.tick) for one in args)
        return __self.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:  # as most are
            self._allow(len(left) + len(right))
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, SEQUENCES) and isinstance(times, int):
                    self._allow(measure(one) * times)
        elif operator == "+" and isinstance(left, SEQUENCES):
            self._allow(measure(left) + measure(right))
        elif operator == "%" and isinstance(left, str):
            self._allow(_formatted(left, right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > INTEGER_BITS:
                raise SecurityError("it computes a number that is too large")
        return self.made(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, bytes) or (isinstance(obj, OWNERS) and attr in WITHOUT_METHODS):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, STEPS, [], [], None, None, lineno=loop.lineno)
        return tree

    def _measured(self, name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is measured."""
        first = 1 if hasattr(apply, "jinja_pass_arg") else 0  # a context is in front of the value

        @functools.wraps(apply)
        def measured(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            front, value, rest = args[:first], args[first], args[first + 1 :]
            if name == "join" and not isinstance(value, str):
                value = list(value)  # a generator has no length before it is over
            if name not in CHEAP:
                self._check_grown(value, *rest, *kwargs.values())
            rest = self._bounded(name, value, rest, kwargs)
            return self.made(apply(*front, value, *rest, **kwargs))

        return measured

    def _ticking(self, test: Callable[..., Any]) -> Callable[..., Any]:
        """A test that looks at the clock, since filters apply it to every item."""

        @functools.wraps(test)
        def ticking(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return test(*args, **kwargs)

        return ticking

    def _bounded(self, name: str, value: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """Arguments of a method or a filter, of which the result is not too large."""
        if name in SLOW and measure(value) > SOURCE:
            raise SecurityError(f"{name} is applied to more than {SOURCE:,} characters")
        if name == "join" and isinstance(value, str) and args and not isinstance(args[0], str):
            args = (list(args[0]), *args[1:])  # of the method, whose text is between the items
        self._allow(_growth(name, value, args, kwargs))
        return args

    def _check_grown(self, *given: Any) -> None:
        """Refuse values that have grown since they were made, as namespaces do."""
        if others := [one for one in given if not isinstance(one, PLAIN)]:
            self._allow(measure(others))

    def _allow(self, size: int) -> None:
        if size > LONGEST:
            raise SecurityError(f"it makes a value of more than {LONGEST:,} characters")

    def _spend(self, size: int) -> None:
        self._allow(size)
        budget = self._budget
        budget.made += size
        if budget.made > MADE:
            raise SecurityError(f"it makes values of more than {MADE:,} characters")


class Steps:
    """Items of a loop, with a look at the clock before each."""

    def __init__(self, items: Iterable[Any], tick: Callable[[], None]):
        self._items, self._tick = items, tick

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._tick()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # a TypeError where it has none


class Measuring(CodeGenerator):
    """Code of a template, in which what is made without a call is measured too."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.concatenated(")
        join = "markup_join" if frame.eval_ctx.autoescape else "str_join"
        if frame.eval_ctx.volatile:
            join = "(markup_join if context.eval_ctx.volatile else str_join)"
        self.write(f"{join}, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Any) -> None:
        self._made(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:
        self._made(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:
        if node.ctx == "load":
            self._made(super().visit_Tuple, node, frame)
        else:  # the names of `set a, b`
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._made(super().visit_Getitem, node, frame, "sliced")
        else:
            super().visit_Getitem(node, frame)

    def _made(
        self, visit: Callable[..., None], node: nodes.Node, frame: Any, how: str = "made"
    ) -> None:
        self.write(f"environment.{how}(")
        visit(node, frame)
        self.write(")")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.written({super()._output_const_repr(group)})"

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


Sandbox.code_generator_class = Measuring


class Generation(Extension):
    """The `generation` block, which elsewhere masks the loss: here it is its content alone."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def environment() -> Sandbox:
    """A sandbox with what chat templates expect."""
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = sandbox._measured("tojson", tojson)
    sandbox.globals["raise_exception"] = raise_exception
    return sandbox


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON of a value; Jinja's own escapes what would be HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def measure(value: Any) -> int:
    """Bytes that the text of a value may take: one that occurs twice in it counts twice.

    No more is counted than is refused.
    """
    if isinstance(value, TEXTS):
        return sys.getsizeof(value) - EMPTY
    total, pending = 0, [value]
    while pending and total <= LONGEST:
        one = pending.pop()
        kind = type(one)
        total += ITEM
        if issubclass(kind, TEXTS):
            total += sys.getsizeof(one)
        elif issubclass(kind, dict):
            pending += [*one.keys(), *one.values()]
        elif issubclass(kind, CONTAINERS):
            pending += one
        elif issubclass(kind, Namespace):  # which answers slowly
            total += ITEM * ITEM
            pending.append(one._Namespace__attrs)  # type: ignore[attr-defined]
        elif issubclass(kind, int) and one.bit_length() > INTEGER_BITS:
            raise SecurityError("it computes a number that is too large")
    return total


def _growth(name: str, value: Any, args: tuple, kwargs: dict[str, Any]) -> int:
    """Upper bound of the size of what a method or a filter makes; 0: not above that of `value`."""
    given = [*args, *kwargs.values()]
    plain = [x for one in given for x in (one if isinstance(one, list | tuple) else [one])]
    number = max((abs(one) for one in plain if isinstance(one, int)), default=0)
    text = max((len(one) for one in plain if isinstance(one, str)), default=0)
    lines = value.count("\n") + 1 if isinstance(value, str) else 1
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            return number
        case "batch" | "slice":
            return number * ITEM
        case "indent":
            return measure(value) + lines * (number + text)
        case "expandtabs":
            return measure(value) * (8 + number)
        case "strftime":
            return 256 * text  # as much as Python tries
        case "split" | "rsplit" | "splitlines":
            return measure(value) + _pieces(name, value, given) * ITEM
        case "wordwrap":
            return measure(value) * (1 + text)
        case "tojson" | "round" if number > ITEM or text > ITEM:
            raise SecurityError(f"{name} has {number or text:,} as an option")
        case "tojson":
            return measure(value) * (1 + number + text)
        case "sum" if any(isinstance(one, list | tuple) for one in given):
            raise SecurityError("sum is of lists")
        case "format" | "format_map":
            if any("{" in (spec or "") for _, _, spec, _ in string.Formatter().parse(value)):
                raise SecurityError("it formats with a width that is itself formatted")
            return _formatted(value, given)
        case "%":
            return _formatted(str(value), given)
        case "replace":
            whole, names = str(value), zip(("old", "new"), [*args, "", ""], strict=False)
            old, new = (str(kwargs.get(name, one)) for name, one in names)
            return measure(whole) + whole.count(old) * measure(new)
        case "join" if isinstance(value, str) and args and not isinstance(args[0], str):
            return measure(args[0]) + len(args[0]) * len(value)  # the method
        case "join":
            between = max(map(measure, given), default=0)
            return measure(value) + len(value) * (between + isinstance(value, str))
        case "list" | "sort" | "unique" | "map" if isinstance(value, str):
            return len(value) * ITEM
    return 0


def _pieces(name: str, value: str, given: list[Any]) -> int:
    """Number of pieces that a text is split into, at most."""
    if name == "splitlines":
        return 1 + sum(map(value.count, LINE_ENDS))
    separator = next((one for one in given if isinstance(one, str)), None)
    return 1 + (len(value) // 2 if separator is None else value.count(separator))


def _formatted(pattern: str, given: Any) -> int:
    """Size of a text that is formatted, at most."""
    fields = pattern.count("%") + pattern.count("{")
    width = sum(int(digits[:12]) for digits in re.findall(r"\d+", pattern))
    if "*" in pattern:  # the width is among the values
        numbers = given.values() if isinstance(given, dict) else given
        numbers = numbers if isinstance(numbers, Iterable) else [numbers]
        width += max((abs(one) for one in numbers if isinstance(one, int)), default=0)
    return measure(pattern) + fields * (measure(given) + width)
