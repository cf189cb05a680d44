import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from transformers import PreTrainedTokenizerFast

from tests.formats.templates import SHAPES, Shape
from windlass.data import Data, Prepared, prepare
from windlass.data.tokenizer import Tokeniser, Tokenizer, learn, load
from windlass.formats.chat import Format
from windlass.sources import jsonl
from windlass.sources.stories import tell

SYSTEM = {"role": "system", "content": "Be brief."}
PLAIN = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "Good day, how can I help?"},
    {"role": "user", "content": "Say it twice"},
    {"role": "assistant", "content": " It, it.\nDone. "},
]


@pytest.fixture(scope="module")
def words() -> Library:
    return Library.from_str(learn([tell(0, number) for number in range(50)], 400).text)


@pytest.fixture(scope="module")
def folder(words: Library, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder as the hub has them: a vocabulary with the special tokens of a template."""

    def written(shape: Shape, source: str | None = None) -> Path:
        place = tmp_path_factory.mktemp("vocabulary")
        library = Library.from_str(words.to_str())
        library.add_special_tokens([AddedToken(x, special=True) for x in shape.special])
        library.save(str(place / "tokenizer.json"))
        said = {"bos_token": shape.bos, "eos_token": shape.eos, "chat_template": shape.source}
        if source is not None:
            said["chat_template"] = source
        (place / "tokenizer_config.json").write_text(json.dumps(said))
        return place

    return written


@pytest.fixture(scope="module")
def tokenisers(folder: Callable[..., Path]) -> dict[str, Tokeniser]:
    return {name: load(str(folder(shape))) for name, shape in SHAPES.items()}


@pytest.fixture
def prepared(tmp_path: Path, folder: Callable[..., Path]) -> Callable[..., Prepared]:
    """Prepares rows, each in a long row of its own."""

    def prepare_rows(shape: Shape, rows: list[dict], source: str | None = None, **how: Any):
        file = tmp_path / "chats.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        data = Data(
            source=jsonl.Source(path=str(file)),
            format=Format(**how),
            length=1024,
            packing="none",
            cache=str(tmp_path / "cache"),
        )
        vocabulary = Tokenizer(kind="file", path=str(folder(shape, source)))
        return prepare(data, vocabulary)

    return prepare_rows


def trained(prepared: Prepared, number: int = 0) -> list[str]:
    """The text of each run of tokens that are trained on, special ones by their names."""
    corpus = prepared.corpora[0]
    span = slice(corpus.offsets[number], corpus.offsets[number + 1])
    assert corpus.weights is not None
    library = Library.from_str(prepared.tokeniser.text)
    runs: list[list[int]] = [[]]
    for token, weight in zip(corpus.tokens[span].tolist(), corpus.weights[span], strict=True):
        if weight:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [library.decode(run, skip_special_tokens=False) for run in runs if run]


def text_of(prepared: Prepared, number: int = 0) -> str:
    corpus = prepared.corpora[0]
    tokens = corpus.tokens[corpus.offsets[number] : corpus.offsets[number + 1]]
    library = Library.from_str(prepared.tokeniser.text)
    return library.decode(tokens.tolist(), skip_special_tokens=False)


def theirs(folder: Path, messages: list[dict], **variables: Any) -> str:
    """What transformers makes of a conversation."""
    reference = PreTrainedTokenizerFast.from_pretrained(str(folder))
    text = reference.apply_chat_template(messages, tokenize=False, **variables)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("begin", [[], [SYSTEM]], ids=["plain", "system"])
def test_the_words_of_the_assistant_and_its_stops_are_trained_on_and_nothing_else(
    name: str, begin: list, prepared: Callable, folder: Callable
):
    shape = SHAPES[name]
    messages = [*begin, *PLAIN]
    found = prepared(shape, [{"messages": messages}])
    assert text_of(found) == theirs(folder(shape), messages)
    answers = [one["content"] for one in messages if one["role"] == "assistant"]
    is_trimmed = name in ("llama3", "gemma")
    expected = [f"{x.strip() if is_trimmed else x.lstrip()}{shape.stop}" for x in answers]
    assert [one.lstrip() for one in trained(found)] == expected
    # Only where a template itself writes a space in front may a token begin with it.
    assert name in ("mistral",) or trained(found)[0] == expected[0]
