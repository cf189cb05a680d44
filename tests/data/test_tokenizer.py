import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from windlass.data import vocabulary as vocabularies
from windlass.data.tokenizer import Tokenizer
from windlass.data.vocabulary import Vocabulary, byte, learn, load, sample
from windlass.errors import UserError
from windlass.sources.stories import tell

STORIES = [tell(0, number) for number in range(300)]
STRANGE = [
    "",
    " ",
    "plain words",
    "  two  spaces \n\n and\ttabs \r\n",
    "Grüße, 世界, שלום, مرحبا",
    "👩‍👩‍👧‍👦 and e\u0301",
    "\x00\x01\x1c\x85\xa0\u2028 odd \u3000spaces\ufeff",
    "the end is <|endoftext|> and not the end",
    "it's 1234, they'll; don't!!!",
    "x" * 1000,
]


@pytest.fixture(scope="module")
def learned() -> Vocabulary:
    return learn(STORIES, 600)


def test_bytes_and_learned_pairs_give_every_text_back(learned: Vocabulary):
    for vocabulary in (byte(), learned):
        for text, tokens in zip(STRANGE, vocabulary.encode_batch(STRANGE), strict=True):
            assert vocabulary.decode(tokens) == text


def test_a_byte_is_its_own_number():
    assert byte().encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert (byte().size, byte().eos) == (257, 256)


def test_the_tokenizers_library_reads_what_is_saved_and_gives_the_same_tokens(
    tmp_path: Path, learned: Vocabulary
):
    texts = [*STRANGE, *STORIES]
    for vocabulary in (byte(), learned):
        vocabulary.save(tmp_path)
        library = Library.from_file(str(tmp_path / "tokenizer.json"))
        library.encode_special_tokens = True
        expected = [one.ids for one in library.encode_batch(texts, add_special_tokens=False)]
        # A second time, when the words are remembered.
        for _ in range(2):
            assert [tokens.tolist() for tokens in vocabulary.encode_batch(texts)] == expected


def test_added_tokens_that_hold_spaces_are_found(tmp_path: Path, learned: Vocabulary):
    library = Library.from_str(learned.text)
    library.add_tokens(["cat and the"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokens = load(str(tmp_path), None).encode("the cat and the hat").tolist()
    assert tokens == library.encode("the cat and the hat", add_special_tokens=False).ids
    assert library.token_to_id("cat and the") in tokens


def cut_by(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


CUTS = {
    "llama 3": cut_by(vocabularies.PATTERNS[0]),
    "qwen": cut_by(vocabularies.PATTERNS[1]),
    "smollm": [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
}
LETTERS = [*"ab'sSt  \n\r\t.,!<>019é世", "\u0301", "\u00a0", "<tool>", "'ll", " the", " 12"]


def scrambled(count: int) -> list[str]:
    """Texts in which any letter, digit, sign, space or accent follows any other."""
    random = np.random.default_rng(0)
    return ["".join(random.choice(LETTERS, random.integers(1, 40))) for _ in range(count)]


@pytest.mark.parametrize("name", CUTS)
def test_words_that_are_remembered_have_the_tokens_of_the_whole_text(tmp_path: Path, name: str):
    texts = [*STRANGE, *STORIES[:20], *scrambled(3000)]
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(CUTS[name])
    library.normalizer = normalizers.NFC()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    library.add_special_tokens(["<end>"])
    library.add_tokens([AddedToken("<tool>", normalized=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    vocabulary = load(str(tmp_path), "<end>")
    assert vocabulary._has_words
    library.encode_special_tokens = True
    for _ in range(2):
        for text, tokens in zip(texts, vocabulary.encode_batch(texts), strict=True):
            assert tokens.tolist() == library.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}},
        {"normalizer": {"type": "Lowercase"}},
        {"added_tokens": [{"content": "<t>", "special": False, "rstrip": True}]},
    ],
)
def test_a_vocabulary_that_may_join_words_remembers_none(learned: Vocabulary, change: dict):
    assert learned._has_words
    assert not vocabularies._cuts_at_spaces(json.dumps(json.loads(learned.text) | change))


def test_a_saved_vocabulary_is_read_back_as_the_same_one(tmp_path: Path, learned: Vocabulary):
    for vocabulary in (byte(), learned):
        vocabulary.save(tmp_path)
        again = load(str(tmp_path), None)
        assert (again.eos, again.bos, again.size) == (
            vocabulary.eos,
            vocabulary.bos,
            vocabulary.size,
        )
        assert again.fingerprint == vocabulary.fingerprint


def test_a_document_that_spells_a_special_token_does_not_hold_one(learned: Vocabulary):
    for vocabulary in (byte(), learned):
        assert vocabulary.eos not in vocabulary.encode("one <|endoftext|> two")


def test_text_streams_in_whole_characters(learned: Vocabulary):
    for vocabulary in (byte(), learned):
        for text in STRANGE:
            pieces = list(vocabulary.stream(vocabulary.encode(text)))
            assert "".join(pieces) == text
    assert list(byte().stream("a世b".encode())) == ["a", "世", "b"]


def test_a_stream_that_ends_within_a_character_says_so():
    assert list(byte().stream("a世".encode()[:-1])) == ["a", "\ufffd"]
    assert "".join(byte().stream(b"\xff\xfeok\xe4")) == byte().decode(b"\xff\xfeok\xe4")


def test_the_same_documents_teach_the_same_vocabulary_in_another_process(learned: Vocabulary):
    program = (
        "from windlass.data.vocabulary import learn; from windlass.sources.stories import tell;"
        "print(learn([tell(0, number) for number in range(300)], 600).fingerprint)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert found.stdout.decode().strip() == learned.fingerprint


def test_a_learned_vocabulary_is_shorter_than_bytes(learned: Vocabulary):
    assert learned.size == 600
    tokens = sum(map(len, learned.encode_batch(STORIES)))
    assert tokens < 0.4 * sum(map(len, STORIES))


def test_a_sample_comes_to_every_document_once_and_early_ones_are_spread():
    for documents in (1, 2, 10, 1000, 1001):
        numbers = list(sample(documents))
        assert sorted(numbers) == list(range(documents))
    early = np.sort(list(sample(1000))[:50])
    assert np.diff(early).max() <= 50


def test_a_file_says_how_documents_begin_and_end(tmp_path: Path):
    library = Library(models.WordLevel({"<s>": 0, "<end>": 1, "a": 2, "?": 3}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.normalizer = normalizers.Lowercase()
    library.add_special_tokens(["<s>", "<end>"])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    library.enable_truncation(2)
    library.enable_padding(length=8)
    file = tmp_path / "tokenizer.json"
    library.save(str(file))

    named = load(str(file), "<end>")
    assert (named.bos, named.eos, named.size) == (0, 1, 4)
    assert named.encode("A a a a").tolist() == [2, 2, 2, 2]

    with pytest.raises(UserError) as refused:
        load(str(file), None)
    assert str(refused.value) == (
        f"{file} does not say which token ends a document; tokenizer.eos names one: <s>, <end>"
    )
    with pytest.raises(UserError) as refused:
        load(str(file), "<eos>")
    assert str(refused.value) == (
        f"tokenizer.eos is <eos>, which is not in {file}; its special tokens are <s>, <end>"
    )
    for said in ("<end>", {"content": "<end>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": said}))
        assert load(str(tmp_path), None).eos == 1


def test_a_tokenizer_json_of_60_mb_is_refused_unread(tmp_path: Path):
    file = tmp_path / "tokenizer.json"
    with file.open("wb") as out:
        out.truncate(60 * 10**6)
    with pytest.raises(UserError) as refused:
        load(str(tmp_path), None)
    assert str(refused.value) == (
        f"tokenizer.path is {tmp_path}; {file} has 57.2 MiB, and at most 50.0 MiB are read: those "
        "of large vocabularies have 35 MB"
    )


def test_a_path_without_a_tokenizer_json_is_refused(tmp_path: Path):
    with pytest.raises(UserError) as refused:
        load(str(tmp_path), None)
    assert str(refused.value) == (
        f"tokenizer.path is {tmp_path}; there is no file {tmp_path}/tokenizer.json"
    )
    for content in (b"{}", b"no json", b"\xff\xfe"):
        file = tmp_path / "tokenizer.model"
        file.write_bytes(content)
        with pytest.raises(UserError) as refused:
            load(str(file), None)
        assert str(refused.value) == (
            f"tokenizer.path is {file}; {file} is not a tokenizer.json, the file that the "
            "tokenizers library writes"
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "bpe"}, "vocab is missing; tokenizer.kind bpe needs it"),
        ({"kind": "file"}, "path is missing; tokenizer.kind file needs it"),
        (
            {"kind": "byte", "vocab": 300},
            "vocab is 300; it belongs to tokenizer.kind bpe, and this is byte",
        ),
        (
            {"kind": "byte", "eos": "<s>"},
            "eos is <s>; it belongs to tokenizer.kind file or hub, and this is byte",
        ),
        (
            {"kind": "file", "path": "a", "revision": "main"},
            "revision is main; it belongs to tokenizer.kind hub, and this is file",
        ),
        ({"kind": "hub"}, "hub is missing; tokenizer.kind hub needs it"),
        (
            {"path": "a", "hub": "some/model"},
            "hub is some/model; it belongs to tokenizer.kind hub, and this is file",
        ),
        (
            {"kind": "bpe", "vocab": 256},
            "vocab is 256; 256 bytes and the end of a document need 257",
        ),
    ],
)
def test_refusals(fields: dict, message: str):
    with pytest.raises(ValueError) as refused:
        Tokenizer(**fields)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({}, "byte"), ({"vocab": 300}, "bpe"), ({"path": "a"}, "file"), ({"hub": "a/b"}, "hub")],
)
def test_a_kind_follows_from_the_keys_beside_it(fields: dict, kind: Any):
    assert Tokenizer(**fields) == Tokenizer(kind=kind, **fields)


def test_words_are_forgotten_before_they_fill_memory(
    monkeypatch: pytest.MonkeyPatch, learned: Vocabulary
):
    expected = [tokens.tolist() for tokens in learned.encode_batch(STORIES)]
    monkeypatch.setattr(vocabularies, "REMEMBERED_WORDS", 10)
    for story, tokens in zip(STORIES, expected, strict=True):
        assert learned.encode(story).tolist() == tokens
        assert len(learned._words) < 10 + 120
