"""A GGUF file's tokenizer cuts a text as the run's does."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from windlass.data import vocabulary as vocabularies
from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError
from windlass.release import gguf_file, gguf_tokenizer

gguf = pytest.importorskip("gguf")
SPACE = "\u2581"
TEXTS = (
    "Once upon a time, there was a girl.",
    "  two  spaces and\nlines and Ünïcode 漢字",
    "<mark>she had cats</mark> and more cats",
    "",
)
CORPUS = ["Once upon a time there was a girl, and she had cats. She had more cats in time."] * 4


def read(vocabulary: Vocabulary, size: int, place: Path) -> dict[str, Any]:
    """The keys of a file that has a vocabulary and nothing else."""

    def describe(writer: Any) -> None:
        gguf_tokenizer.describe(writer, vocabulary, size)

    gguf_file.made("it.gguf", "llama", describe, []).write(place)
    return {
        name.removeprefix("tokenizer.ggml."): field.contents()
        for name, field in gguf.GGUFReader(place / "it.gguf").fields.items()
    }


def sentencepiece(*, prefix: bool) -> Vocabulary:
    """BPE with byte fallback, with all merges of each token, as SentencePiece has them."""
    replace = normalizers.Replace(" ", SPACE)
    steps = [normalizers.Prepend(SPACE), replace] if prefix else [replace]
    learned = Library(models.BPE())
    learned.normalizer = normalizers.Sequence(steps)
    learned.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    pairs = json.loads(learned.to_str())["model"]["merges"]
    letters = sorted({letter for pair in pairs for part in pair for letter in part})
    pieces = ["".join(pair) for pair in pairs]
    fallback = [f"<0x{number:02X}>" for number in range(256)]
    order = ["<unk>", "<s>", "</s>", *fallback, *letters, *dict.fromkeys(pieces)]
    vocab = {text: number for number, text in enumerate(order)}
    known = {*letters, *pieces}
    merges = [
        (piece[:at], piece[at:])
        for piece in dict.fromkeys(pieces)
        for at in range(1, len(piece))
        if piece[:at] in known and piece[at:] in known
    ]
    library = Library(
        models.BPE(
            vocab=vocab,
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    library.normalizer = normalizers.Sequence(steps)
    library.add_special_tokens([AddedToken(one, special=True) for one in ("<unk>", "<s>", "</s>")])
    library.add_tokens([AddedToken("<mark>", normalized=False), AddedToken("</mark>")])
    return Vocabulary(library.to_str(), eos=2, bos=1)


def merged_by_score(text: str, found: dict[str, Any]) -> list[int]:
    """SentencePiece as llama.cpp computes it: of all neighbours, those with the highest score."""
    numbers = {token: number for number, token in enumerate(found["tokens"])}
    parts = list(text.replace(" ", SPACE))
    while True:
        scored = [
            (-found["scores"][numbers[left + right]], at)
            for at, (left, right) in enumerate(zip(parts, parts[1:], strict=False))
            if left + right in numbers
        ]
        if not scored:
            break
        _, at = min(scored)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    ids = []
    for part in parts:
        spelt = [f"<0x{byte:02X}>" for byte in part.encode()]
        ids += [numbers[part]] if part in numbers else [numbers[one] for one in spelt]
    return ids


@pytest.mark.parametrize("prefix", [True, False])
def test_scores_merge_as_the_merges_of_a_sentencepiece_vocabulary_do(prefix, tmp_path):
    vocabulary = sentencepiece(prefix=prefix)
    size = vocabulary.size + 3
    found = read(vocabulary, size, tmp_path)
    assert (found["model"], found["pre"]) == ("llama", "default")
    assert found["add_space_prefix"] is prefix
    assert (found["bos_token_id"], found["eos_token_id"], found["unknown_token_id"]) == (1, 2, 0)
    for text in TEXTS[:2]:
        expected = vocabulary.encode(text).tolist()
        assert merged_by_score(" " * prefix + text, found) == expected
    kinds, types = gguf.TokenType, found["token_type"]
    assert types[:4] == [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, kinds.BYTE]
    marked = found["tokens"].index("<mark>")
    assert types[marked] == kinds.USER_DEFINED and types[-1] == kinds.UNUSED
    assert len(found["scores"]) == len(types) == size


def test_bytes_have_a_merge_that_never_merges(tmp_path):
    vocabulary = vocabularies.byte()
    found = read(vocabulary, 257, tmp_path)
    assert (found["model"], found["pre"]) == ("gpt2", "gpt-2")
    assert found["merges"] == ["<|endoftext|> <|endoftext|>"]
    assert found["tokens"] == [vocabulary.name(number) for number in range(257)]


def split(expression: str) -> Any:
    cut = pre_tokenizers.Split(Regex(expression), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([cut, level])


def cut_by(pre_tokenizer: Any, **model: Any) -> Vocabulary:
    library = Library.from_str(vocabularies.learn(CORPUS, 270).text)
    library.pre_tokenizer = pre_tokenizer
    whole = json.loads(library.to_str())
    whole["model"] |= model
    return Vocabulary(json.dumps(whole), eos=0, bos=None)


def test_ways_to_cut_a_text_have_the_names_that_llama_cpp_gives_them(tmp_path):
    qwen2 = pytest.importorskip("transformers.models.qwen2.tokenization_qwen2")
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    llama3 = inspect.signature(convert.TikTokenConverter).parameters["pattern"].default
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    known = {
        "qwen2": cut_by(split(qwen2.PRETOKENIZE_REGEX)),
        "llama-bpe": cut_by(split(llama3), ignore_merges=True),
        "smollm": cut_by(pre_tokenizers.Sequence([digits, words])),
        "gpt-2": cut_by(words),
    }
    for name, vocabulary in known.items():
        found = read(vocabulary, 270, tmp_path)
        assert found["pre"] == name
        assert found["add_bos_token"] is False


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (
            lambda: cut_by(split(r"\p{L}+|\s+")),
            "cuts a text by an expression that llama.cpp has no name for",
        ),
        (
            lambda: cut_by(pre_tokenizers.ByteLevel(add_prefix_space=True)),
            "is not of bytes, or puts a space in front",
        ),
        (
            lambda: cut_by(pre_tokenizers.ByteLevel(add_prefix_space=False), ignore_merges=True),
            "takes whole words without merging them",
        ),
        (
            lambda: Vocabulary(
                Library(models.Unigram([("<s>", 0.0), ("a", -1.0)])).to_str(), eos=0, bos=None
            ),
            "is Unigram, or has options that are not in llama.cpp",
        ),
    ],
)
def test_a_tokenizer_that_llama_cpp_has_not_is_refused(make, what, tmp_path):
    with pytest.raises(UserError) as error:
        read(make(), 300, tmp_path)
    assert str(error.value) == (
        f"the tokenizer {what}, so that llama.cpp would cut a text otherwise; --as model or "
        "--as merged writes a folder, from which convert_hf_to_gguf.py of llama.cpp makes a file "
        "where it knows the tokenizer"
    )


def test_byte_fallback_without_all_merges_is_refused(tmp_path):
    letters = ["<s>", SPACE, *"abc", "bc", "ab", "abc"]
    merges = [("b", "c"), ("a", "b"), ("ab", "c")]  # so that abc is a, bc
    vocab = {text: number for number, text in enumerate(letters)}
    library = Library(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    library.normalizer = normalizers.Replace(" ", SPACE)
    with pytest.raises(UserError, match="does not merge a and bc, though abc is a token"):
        read(Vocabulary(library.to_str(), eos=0, bos=None), 8, tmp_path)
