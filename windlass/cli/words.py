"""Parsing of the command line, and the help of a command."""

import difflib
import inspect
import re
from collections.abc import Iterable
from textwrap import indent
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from windlass.config import elsewhere, json_schema, listing
from windlass.config.sections import fields
from windlass.errors import UserError
from windlass.terminal import Terminal

WIDEST = 100  # columns of help; longer lines are hard to read
ALIKE = 0.75  # similarity to an option above which a word is a typo
TYPERS = {  # options that come with Typer, in our words
    "help": "show this help",
    "install_completion": "complete commands, options, recipes and runs in this shell",
    "show_completion": "print the script that does so",
}
KEYS = ("KEY=VALUE", "override a recipe key; also --key value")


class Command(TyperCommand):
    """A command that takes any key of a recipe, as `key=value` or `--key value`, in any place.

    The keys are left in `ctx.args`, where they are allowed at all.
    """

    context_class = typer.Context

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # for completion, of words that are not all there yet
            return TyperCommand.parse_args(self, ctx, args)
        options, places, keys = self._split(ctx, list(args))
        if keys and not ctx.allow_extra_args:
            if keys[0].startswith("-"):
                raise UserError(f"no option {keys[0].partition('=')[0]}; {_options(ctx)}")
            raise UserError(f"{keys[0]} is one argument too many; usage: {usage(ctx)}")
        TyperCommand.parse_args(self, ctx, [*options, "--", *places])
        ctx.args = keys
        return keys

    def get_help(self, ctx: Any) -> str:
        console = Terminal()
        return explanation(ctx, console, width=min(console.width, WIDEST))

    def _split(self, ctx: Any, words: list[str]) -> tuple[list[str], list[str], list[str]]:
        """Options with their values, words that have a place of their own, and keys."""
        params = self.get_params(ctx)
        known = {
            name: param for param in params for name in _spellings(param) if name.startswith("-")
        }
        counts = [param.nargs for param in params if param.param_type_name == "argument"]
        room = len(words) if -1 in counts else len(counts)
        options: list[str] = []
        places: list[str] = []
        keys: list[str] = []
        while words:
            word = words.pop(0)
            name, equals, _ = word.partition("=")
            if word == "--":  # a prompt may look like an option
                rest = room - len(places)
                places, keys, words = places + words[:rest], keys + words[rest:], []
            elif name in known:
                options.append(word)
                if not equals and (choices := str(known[name].metavar)).startswith("["):
                    options.append(_choice(choices, words))
                elif not equals and not getattr(known[name], "is_flag", False):
                    if not words:
                        raise UserError(f"{name} has no value; write {name} {known[name].metavar}")
                    options.append(words.pop(0))
            elif word.startswith("--") or re.fullmatch("-[A-Za-z]+", name):
                self._check_key(ctx, name, known)
                keys.append(word)
                if not equals and words and not words[0].startswith("--"):
                    keys.append(words.pop(0))
            elif len(places) < room and not (ctx.allow_extra_args and _is_key(name, equals)):
                places.append(word)
            else:
                keys.append(word)
        return options, places, keys

    def _check_key(self, ctx: Any, name: str, known: Iterable[str]) -> None:
        """Refuse what looks like an option and is neither one nor a key of a recipe."""
        sections = [f"--{section}" for section in _sections()] if ctx.allow_extra_args else []
        # A word with a dot is a key: `--model.run` is no slip for `--model`.
        if "." in name or name in sections:
            return
        if advice := elsewhere.instead(name):
            raise UserError(f"no option {name}; {advice}")
        if ctx.allow_extra_args and elsewhere.is_known(name):
            return
        if meant := difflib.get_close_matches(name, [*known, *sections], n=1, cutoff=ALIKE):
            raise UserError(f"no option {name}; did you mean {meant[0]}?")
        if ctx.allow_extra_args and not (name.startswith("--") and _may_be_key(name)):
            raise UserError(
                f"no option {name}; {_options(ctx)}. --KEY VALUE overrides a key of the recipe, as "
                "in --train.steps 500"
            )


def _options(ctx: Any) -> str:
    """The options that a command has, in words."""
    params = [param for param in ctx.command.get_params(ctx) if param.param_type_name == "option"]
    names = [max(param.opts, key=len) for param in params]
    return f"{ctx.command_path} has {listing(names, 'and')}"


def _may_be_key(option: str) -> bool:
    """Test for the name of a key in any section: the recipe's own errors say which."""
    from windlass.run import Run

    return option.lstrip("-").replace("-", "_") in _names(json_schema(Run))


def _names(schema: Any) -> set[str]:
    """The names of all keys in a JSON schema, at any depth."""
    if isinstance(schema, list):
        return set().union(*map(_names, schema))
    if not isinstance(schema, dict):
        return set()
    return set(schema.get("properties", {})).union(*map(_names, schema.values()))


def _sections() -> list[str]:
    from windlass.run import Run

    return [*fields(Run), "by_device"]


def _choice(metavar: str, words: list[str]) -> str:
    """The value of an option that may have none, as `[first|second]`: then it is the first."""
    choices = metavar.strip("[]").split("|")
    is_meant = words and difflib.get_close_matches(words[0], choices, n=1)
    return words.pop(0) if is_meant else choices[0]


def _is_key(name: str, equals: str) -> bool:
    """Test that `name=` is a key of a recipe, and no prompt that happens to hold `=`."""
    if not equals or not re.fullmatch(r"[a-z_]+(\.\w+)*", name):
        return False
    return name.partition(".")[0] in _sections()


class Commands(TyperGroup):
    """The program itself."""

    context_class = typer.Context

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and not ctx.resilient_parsing:
            meant = difflib.get_close_matches(args[0], self.commands, n=1)
            hint = f"did you mean {meant[0]}? " if meant else ""
            there = listing(self.commands, "and")
            raise UserError(f"windlass has no command {args[0]}; {hint}there are {there}")
        return TyperGroup.resolve_command(self, ctx, args)

    def get_help(self, ctx: Any) -> str:
        console = Terminal()
        return explanation(ctx, console, width=min(console.width, WIDEST))


def usage(ctx: typer.Context) -> str:
    """The usage line of a command."""
    words = [ctx.command_path]
    if isinstance(ctx.command, TyperGroup):
        return f"{words[0]} COMMAND"
    params = ctx.command.get_params(ctx)
    words += [str(param.metavar) for param in params if param.param_type_name == "argument"]
    if any(param.param_type_name == "option" and param.name != "help" for param in params):
        words.append("[OPTIONS]")
    if ctx.allow_extra_args:
        words.append(f"[{KEYS[0]} ...]")
    return " ".join(words)


def explanation(ctx: typer.Context, console: Console, width: int) -> str:
    """Help of a command: prose, words, and examples, which are the paragraphs of commands."""
    paragraphs = inspect.cleandoc(ctx.command.help or "").split("\n\n")
    examples = [text for text in paragraphs if text.startswith("windlass ")]
    prose = [" ".join(text.split()) for text in paragraphs if text not in examples]
    with console.capture() as captured:
        console.print(Text(usage(ctx), "bold"))
        for part in (*map(Text, prose), _words(ctx)):
            console.print()
            console.print(part, width=width)
        for text in examples:
            console.print()
            console.print(Text(indent(text, "  "), "cyan"), soft_wrap=True)
    # Tables fill their lines up with blanks.
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _words(ctx: typer.Context) -> Table:
    """Table of every word that can be written, with what it means."""
    params = ctx.command.get_params(ctx)
    commands = getattr(ctx.command, "commands", {})
    places = [(_name(p), _help_of(p)) for p in params if p.param_type_name == "argument"]
    keys = [KEYS] if ctx.allow_extra_args and not commands else []
    groups = [
        [(name, _first_line(one)) for name, one in commands.items()],
        [*places, *keys],
        [(_name(p), _help_of(p)) for p in params if p.param_type_name == "option"],
    ]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    for group in groups:
        if group and table.row_count:
            table.add_row()
        for name, text in group:
            table.add_row(Text(f"  {name}"), Text(text))
    return table


def _first_line(command: Any) -> str:
    line = (command.help or "").strip().partition("\n")[0].rstrip(".")
    return line[:1].lower() + line[1:]


def _name(param: Any) -> str:
    if param.param_type_name == "argument":
        return param.metavar.strip("[]")
    names = ", ".join(sorted(_spellings(param), key=len))
    return f"{names} {param.metavar}" if param.metavar else names


def _help_of(param: Any) -> str:
    if param.name in TYPERS:
        return TYPERS[param.name]
    has_default = param.param_type_name == "option" and isinstance(param.default, str)
    return f"{param.help} ({param.default})" if has_default else param.help


def _spellings(param: Any) -> list[str]:
    """Spellings of an option, with those that turn it off."""
    return [*param.opts, *param.secondary_opts]
