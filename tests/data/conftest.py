import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.prepared import tokenized
from windlass.data import Data, Tokenized
from windlass.data.tokenizer import Tokenizer
from windlass.sources import jsonl


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=100)


@pytest.fixture
def documents(tmp_path: Path, console: Console) -> Callable[..., Tokenized]:
    """Prepares documents given as a list, with a cache of their own."""

    def prepare_texts(
        texts: list[str], tokenizer: Tokenizer | None = None, **how: Any
    ) -> Tokenized:
        file = tmp_path / "rows.jsonl"
        lines = [json.dumps({"text": text}) for text in texts]
        file.write_text("".join(f"{line}\n" for line in lines))
        how = {"length": 16, "cache": str(tmp_path / "cache"), **how}
        data = Data(source=jsonl.Source(path=str(file)), **how)
        return tokenized(data, tokenizer or Tokenizer(kind="byte"), console=console)

    return prepare_texts
