"""Text that is prepared, by its own type: it has corpora and a vocabulary."""

from rich.console import Console

from windlass.data import Data, Tokenized, prepare
from windlass.data.tokenizer import Tokenizer


def tokenized(data: Data, tokenizer: Tokenizer, *, console: Console | None = None) -> Tokenized:
    found = prepare(data, tokenizer, console=console)
    assert isinstance(found, Tokenized)
    return found
