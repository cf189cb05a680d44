"""Tokenising and packing of text, and reading it again, beside `datasets` and its `map`.

    python benchmarks/data.py [--documents 10000]

Generated stories in JSON Lines, and a byte-level vocabulary learned of them that cuts text as
Qwen's does. Ours is what `windlass train` does before the first step, with nothing in the cache;
the rival is `load_dataset`, `map` with the same vocabulary and `map` with the usual `group_texts`,
batched, in one process too. Both must count the same tokens. Then batches are read again: by the
loader of a run, onto the device, and by PyTorch's `DataLoader` of the packed data set.
"""

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import table  # noqa: E402
from benchmarks.table import Line  # noqa: E402

VOCAB, LENGTH, ROWS = 8192, 1024, 32
LEARNED = 4000  # documents that the vocabulary is learned of
TURNS, SECONDS = 2, 5.0  # turns of each side; of reading again
FEW = 100  # documents of a first turn, in which each side imports what it needs
END = "<|endoftext|>"
GOAL = 1.55e6  # tokens a second: ten times what an H200 trains of a model of 0.5B


def write_text(file: Path, documents: int) -> None:
    from windlass.sources.stories import tell

    texts = (tell(0, number) for number in range(documents))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_vocabulary(folder: Path, file: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, trainers
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    from windlass.data.vocabulary import PATTERNS

    library: Any = Tokenizer(models.BPE())
    library.normalizer = normalizers.NFC()
    split = Split(Regex(PATTERNS[1]), "isolated")
    library.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    with file.open() as lines:
        texts = (json.loads(line)["text"] for line in itertools.islice(lines, LEARNED))
        library.train_from_iterator(texts, trainer)
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def ours(place: Path, turn: int) -> Any:
    """Packed sequences of a run, from a cache that is empty."""
    from windlass.data import Data, prepare
    from windlass.data.tokenizer import Tokenizer
    from windlass.sources.jsonl import Source
    from windlass.terminal import Terminal

    source = Source(path=str(place / "text.jsonl"))
    data = Data(source=source, length=LENGTH, cache=str(place / f"ours{turn}"))
    quiet = Terminal(quiet=True)
    return prepare(data, Tokenizer(path=str(place / "vocabulary")), console=quiet)


def theirs(place: Path, turn: int) -> tuple[Any, int]:
    """Packed rows of a data set, and how many tokens there are before they are packed."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer: Any = AutoTokenizer.from_pretrained(str(place / "vocabulary"))

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer([text + END for text in batch["text"]])

    def group_texts(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(itertools.chain(*rows)) for name, rows in batch.items()}
        total = len(joined["input_ids"]) // LENGTH * LENGTH
        made = {
            name: [values[i : i + LENGTH] for i in range(0, total, LENGTH)]
            for name, values in joined.items()
        }
        return made | {"labels": made["input_ids"].copy()}

    cache = str(place / f"theirs{turn}")
    text = datasets.load_dataset(
        "json", data_files=str(place / "text.jsonl"), split="train", cache_dir=cache
    )
    tokens = text.map(tokenize, batched=True, remove_columns=["text"])
    packed = tokens.map(group_texts, batched=True)
    lengths = tokens.with_format("arrow")["input_ids"]
    return packed, sum(len(row) for row in lengths)


def loaded_by_us(rows: Any) -> Iterator[Any]:
    import jax

    from windlass.data.load import Loader

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return Loader(rows, ROWS, seed=0, shuffle=True).iterate(0, lambda shape, name: place)


def loaded_by_them(packed: Any) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    loader = DataLoader(packed.with_format("torch"), batch_size=ROWS, shuffle=True, drop_last=True)
    while True:
        yield from loader


def tokens_per_second(batches: Iterator[Any]) -> float:
    next(batches)  # which starts threads, too
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        next(batches)
        count += ROWS * LENGTH
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = table.parser(__doc__)
    parser.add_argument("--documents", type=int, default=10_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small, whole = Path(folder) / "small", Path(folder) / "whole"
        for place, documents in ((small, FEW), (whole, asked.documents)):
            place.mkdir()
            write_text(place / "text.jsonl", documents)
            write_vocabulary(place / "vocabulary", place / "text.jsonl")
        for side in (ours, theirs):
            side(small, 0)  # which imports, and is not counted
        table.finish(measured(whole, asked.documents), asked.to)


def measured(place: Path, documents: int) -> list[Line]:
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(TURNS):
        began = time.perf_counter()
        prepared = ours(place, turn)
        rows = prepared.split("train")
        middle = time.perf_counter()
        packed, tokens = theirs(place, turn)
        seconds["ours"].append(middle - began)
        seconds["theirs"].append(time.perf_counter() - middle)
        if len(rows.corpus.tokens) != tokens:
            sys.exit(f"{len(rows.corpus.tokens):,} tokens, and {tokens:,} of the rival: not equal")
    a, b = (statistics.median(seconds[name]) for name in seconds)
    again, other = tokens_per_second(loaded_by_us(rows)), tokens_per_second(loaded_by_them(packed))
    what = f"tokenise and pack {tokens / 1e6:.1f}M tokens of {documents:,} documents"
    return [
        Line(what, f"{tokens / a:,.0f}/s", f"{tokens / b:,.0f}/s datasets.map", b / a),
        Line(
            f"read again (goal {GOAL / 1e6:.2f}M/s)",
            f"{again / 1e6:.2f}M tokens/s",
            f"{other / 1e6:.2f}M tokens/s DataLoader",
            again / other,
        ),
    ]


if __name__ == "__main__":
    main()
