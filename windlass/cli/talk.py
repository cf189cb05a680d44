"""A conversation at a terminal, or through a pipe: a line in, an answer out."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from rich.text import Text

from windlass.config.reading import offer
from windlass.errors import UserError
from windlass.processes.signals import Signals
from windlass.terminal import Terminal, harmless

if TYPE_CHECKING:
    from windlass.evaluation.chat import Conversation

PROMPT = "> "
LEAVING = "Ctrl-D leaves"
COMMANDS = {
    "/reset": "clear the conversation",
    "/system": "TEXT: set the system prompt; alone: show it",
    "/save": "FILE: append the conversation to a JSON Lines file",
    "/help": "this list",
    "/quit": "leave, as Ctrl-D does; Ctrl-C stops an answer",
}


class Talk:
    """Chat loop: reads user messages, and writes the model's answers.

    Through a pipe it writes answers alone, and whatever is refused ends it.
    """

    def __init__(self, conversation: "Conversation", signals: Signals):
        self.conversation, self.signals = conversation, signals
        self.is_live = sys.stdin.isatty() and sys.stdout.isatty()
        self._console = Terminal(soft_wrap=True)
        self._is_answering = False
        self._stop = threading.Event()

    def run(self) -> None:
        """Run until the input ends, or the user leaves."""
        with self.signals.interrupts(self._interrupted):
            for line in self._lines():
                if line.split() == ["/quit"]:
                    return
                try:
                    self._do(line)
                except UserError as refused:
                    if not self.is_live:
                        raise
                    self._console.print(Text(str(refused), "red"))

    def _lines(self) -> Iterator[str]:
        if not self.is_live:
            yield from (line.rstrip("\r\n") for line in sys.stdin)
            return
        import readline  # noqa: F401  so that a line can be edited, and an earlier one taken again

        while True:
            try:
                yield input(PROMPT)
            except EOFError:
                print()
                return

    def _do(self, line: str) -> None:
        if not line.strip():
            return
        name, _, rest = line.partition(" ")
        match name:
            case "/reset":
                self.conversation.reset()
                self._say("cleared")
            case "/system":
                if rest.strip():
                    self.conversation.instruct(rest.strip())
                self._say(f"system prompt: {self.conversation.system or 'none'}")
            case "/save":
                self._save(rest.strip())
            case "/help":
                for command, text in COMMANDS.items():
                    self._say(f"{command:<9}{text}")
            case _ if name.startswith("/"):
                known = offer(name, list(COMMANDS))
                raise UserError(f"no command {name}; {known}. A space before it makes it text")
            case _:
                self._answer(line.strip())

    def _answer(self, text: str) -> None:
        began, is_stopped = time.monotonic(), False
        self._stop.clear()
        self._is_answering = True
        try:
            with closing(self.conversation.stream(text)) as pieces:
                for piece in pieces:
                    sys.stdout.write(harmless(piece) if self.is_live else piece)
                    sys.stdout.flush()
                    if is_stopped := self._stop.is_set():
                        break
        finally:
            self._is_answering = False
        print()
        if self.is_live:
            if warning := self.conversation.warning():
                self._console.print(Text(warning, "yellow"))
            tokens = self.conversation.tokens
            speed = tokens / max(time.monotonic() - began, 1e-9)
            stopped = ", stopped" if is_stopped else ""
            self._console.print(Text(f"{tokens} tokens, {speed:.1f} tokens/s{stopped}", "dim"))

    def _interrupted(self) -> None:
        if self._is_answering:
            self._stop.set()
        elif self.is_live:
            sys.stdout.write(f"\n{LEAVING}\n{PROMPT}")
            sys.stdout.flush()

    def _save(self, file: str) -> None:
        if not file:
            raise UserError("/save needs a file; /save chats.jsonl adds a line to one")
        if not self.conversation.turns:
            raise UserError("nothing was said yet: there is nothing to save")
        row = json.dumps({"messages": self.conversation.messages}, ensure_ascii=False)
        try:
            with open(file, "a", encoding="utf-8") as chats:
                chats.write(f"{row}\n")
        except OSError as error:
            raise UserError(f"{file} cannot be written: {error.strerror}") from None
        self._say(f"{len(self.conversation.messages)} messages added to {file}")

    def _say(self, text: str) -> None:
        if self.is_live:
            self._console.print(Text(text, "dim"))
