"""Tokenizers: text to tokens and back, by bytes, learned byte pairs (BPE) or a tokenizer.json."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, SupportsInt

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from windlass import units
from windlass.config.reading import show
from windlass.errors import UserError
from windlass.files import parse_json, write
from windlass.hub import assistant_spans
from windlass.hub.chat_template import Template

FILE, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
END = "<|endoftext|>"
# Characters read for each token to be learned, and in all: enough for merges to settle.
SAMPLE_CHARACTERS_PER_TOKEN = 2048
SAMPLE_CHARACTERS = 64 * 2**20
REMEMBERED_WORDS = 2**18
LARGEST = 50 * 2**20  # bytes of a tokenizer.json
MOST_TOKENS = 2**24

# Between these a byte-level vocabulary always cuts, so that what stands between can be encoded once
# and remembered. Only where ASCII is on both sides: elsewhere opinions differ on what a space is.
BETWEEN_WORDS = re.compile("(?<=[!-~])(?= [!-~])")

# How vocabularies cut text before pairs are merged: Llama 3's takes up to three digits, Qwen's one.
PATTERNS = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + "|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
]

# How well-known vocabularies write the end of a document, where nothing else says it.
KNOWN_ENDS = (END, "</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>", "<|im_end|>")


class Read(NamedTuple):
    """A text as tokens, and for each the first character it comes from and the one behind."""

    tokens: np.ndarray
    characters: np.ndarray


class Vocabulary:
    """A vocabulary: tokens by number, and what encodes text with them and decodes it.

    The text of its tokenizer.json is the whole of it, but for two numbers: the token that ends a
    document, and the one that begins it where there is such a token.

    For chats it has the source of a template too, further tokens that end a turn, and what else
    its tokenizer_config.json has.
    """

    def __init__(
        self,
        text: str,
        *,
        eos: int,
        bos: int | None,
        template: str | None = None,
        ends: Sequence[int] = (),
        settings: dict[str, Any] | None = None,
    ):
        self.text, self.eos, self.bos, self.template = text, eos, bos, template
        self.ends, self.settings = tuple(ends), settings or {}
        self._library = _opened(text)
        # A document that spells out a special token is text like any other.
        self._library.encode_special_tokens = True
        self.size = 1 + max(self._library.get_vocab(with_added_tokens=True).values())
        added = self._library.get_added_tokens_decoder().items()
        self.special = frozenset(number for number, token in added if token.special)
        self._is_byte = text == _byte_text()  # what the library does slowly, numpy does at once
        self._has_words = _cuts_at_spaces(text)
        self._words: dict[str, list[int]] = {}

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.eos} {self.bos} {self.text}".encode()).hexdigest()

    @property
    def described(self) -> str:
        """Identity in words, for a checkpoint or a cache to agree on."""
        return f"of {self.size} tokens ({self.fingerprint[:12]})"

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text, with nothing in front or behind."""
        if self._is_byte:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
        if not self._has_words:
            return [np.array(ids, np.int32) for ids in self._encode(texts)]
        split = [BETWEEN_WORDS.split(text) for text in texts]
        if len(self._words) > REMEMBERED_WORDS:
            self._words.clear()
        words = set(chain.from_iterable(split))
        new = [word for word in words if word not in self._words]
        self._words.update(zip(new, self._encode(new), strict=True))
        return [
            np.fromiter(chain.from_iterable(map(self._words.__getitem__, parts)), np.int32)
            for parts in split
        ]

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def read_batch(self, texts: Sequence[str], *, special: bool) -> list[Read]:
        """The tokens of each text and the characters each comes from.

        Where `special` tokens are meant as such, as in a chat, the text is to spell them out.
        """
        library = self._special_library if special else self._library
        encoded = library.encode_batch(list(texts), add_special_tokens=False)
        return [
            Read(np.array(one.ids, np.int32), np.array(one.offsets, np.int64).reshape(-1, 2))
            for one in encoded
        ]

    def read(self, text: str) -> np.ndarray:
        """Encode a text that spells out its special tokens, such as a rendered chat."""
        return self.read_batch([text], special=True)[0].tokens

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """The text of tokens; special ones are left out."""
        return self._library.decode([int(token) for token in tokens])

    def name(self, token: int) -> str:
        """The string of a token in the vocabulary, special ones too."""
        return self._library.id_to_token(token) or f"<{token}>"

    def first_difference(self, other: "Vocabulary") -> int | None:
        """The first of these tokens that is another one in the other vocabulary; None: none is."""
        return next((n for n in range(self.size) if other.name(n) != self.name(n)), None)

    def stream(self, tokens: Iterable[SupportsInt]) -> Iterator[str]:
        """Streaming decoder: the text of tokens as they come, in pieces that never cut a character.

        Some vocabularies write a word differently at the start of a text, so that each piece is
        the difference that new tokens make to the text of those just before.
        """
        before: list[int] = []
        new: list[int] = []
        for token in tokens:
            new.append(int(token))
            piece = self._difference(before, new)
            if piece and not piece.endswith("\ufffd"):
                yield piece
                before, new = new, []
        if piece := self._difference(before, new):
            yield piece

    @property
    def attributes(self) -> dict[str, Any]:
        """All but the text, as plain data."""
        names = ("eos", "bos", "template", "ends", "settings")
        return {name: getattr(self, name) for name in names}

    def with_template(self, template: str) -> "Vocabulary":
        """The same vocabulary with another chat template."""
        attributes: dict[str, Any] = self.attributes | {"template": template}
        return Vocabulary(self.text, **attributes)

    @cached_property
    def chat(self) -> Template | None:
        """The chat template, ready to render."""
        if self.template is None:
            return None
        named = {name: x for name, x in self._named().items() if isinstance(x, str)}
        special = [self.name(number) for number in sorted(self.special)]
        return Template(self.template, special, named)

    @cached_property
    def stops(self) -> frozenset[int]:
        """Stop tokens: those that end an answer, and a document."""
        ends = assistant_spans.shape(self.chat).ends if self.chat is not None else ()
        of_chats = {x for x in self.special if self.name(x) in ends}
        return frozenset({self.eos, *self.ends} | of_chats)

    def save(self, folder: str | Path) -> None:
        """Write the files that `transformers` reads a tokenizer from."""
        place = Path(folder)
        settings = self._named()
        if self.template is not None:
            settings["chat_template"] = self.template
        files = {FILE: self.text, SETTINGS: _json(settings)}
        if self.ends:
            files[GENERATION] = _json({"eos_token_id": [self.eos, *self.ends]})
        for name, text in files.items():
            # Whole: what stands there may be the only copy, and what was just read.
            write(place / name, text)

    def _named(self) -> dict[str, Any]:
        """The settings, with the tokens that begin and end a document by name."""
        own = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.name(self.eos)}
        if self.bos is not None:
            own["bos_token"] = self.name(self.bos)
        return {**own, **self.settings, "eos_token": own["eos_token"]}

    @cached_property
    def _special_library(self) -> Library:
        return _opened(self.text)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in encoded]

    def _difference(self, before: list[int], new: list[int]) -> str:
        return self.decode(before + new)[len(self.decode(before)) :]


def byte() -> Vocabulary:
    """The byte vocabulary: every byte is a token; 256 ends a document, and begins the next."""
    return Vocabulary(_byte_text(), eos=256, bos=256)


def learn(texts: Iterable[str], vocab: int) -> Vocabulary:
    """Byte-pair encoding (BPE), learned: pairs merged by how often they stand together."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    eos = 0  # the trainer numbers special tokens first
    _begin_with(library, END, eos)
    return Vocabulary(library.to_str(), eos=eos, bos=eos)


def load(path: str, eos: str | None = None) -> Vocabulary:
    """A tokenizer.json, with what the files beside it say of chats and the end of a document."""
    place = Path(path).expanduser()
    file = place / FILE if place.is_dir() else place
    if not file.is_file():
        raise UserError(f"tokenizer.path is {path}; there is no file {file}")
    if (size := file.stat().st_size) > LARGEST:
        raise UserError(
            f"tokenizer.path is {path}; {file} has {units.size(size)}, and at most "
            f"{units.size(LARGEST)} are read: those of large vocabularies have 35 MB"
        )
    not_one = (
        f"tokenizer.path is {path}; {file} is not a tokenizer.json, the file that the "
        "tokenizers library writes"
    )
    try:
        text = file.read_text(encoding="utf-8")
        whole = parse_json(text)
    except ValueError:  # neither UTF-8 nor JSON
        whole = None
    if not isinstance(whole, dict) or "model" not in whole:
        raise UserError(not_one)
    library = _understood(text, not_one)
    settings = _settings(file)
    template = _template(file, settings.pop("chat_template", None))
    end = _end(library, file, eos, settings)
    declared = _json_beside(file, GENERATION).get("eos_token_id") or []
    ends = declared if isinstance(declared, list) else [declared]
    if not all(isinstance(number, int) for number in ends):
        raise UserError(
            f"{file.with_name(GENERATION)} has eos_token_id {show(declared)}; "
            "it must be a whole number, or a list of such"
        )
    return Vocabulary(
        text,
        eos=end,
        bos=_begin(library),
        template=template,
        ends=[number for number in ends if number != end],
        settings=settings,
    )


def sample(documents: int, together: int = 1) -> Iterator[int]:
    """Numbers of documents spread evenly over a corpus, wherever one stops taking them.

    Groups of `together` neighbours are taken, for sources where these are read as fast as one.
    """
    # Multiples of a step near the golden section fill gaps evenly; a step without a common factor
    # comes to every group once.
    groups = -(-documents // together)
    step = max(1, round(groups * 0.6180339887498949))
    while np.gcd(step, groups) != 1:
        step += 1
    number = 0
    for _ in range(groups):
        yield from range(number * together, min((number + 1) * together, documents))
        number = (number + step) % groups


def _byte_text() -> str:
    library = Library(models.BPE(vocab=_byte_letters(), merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    _begin_with(library, END, 256)
    return library.to_str()


def _cuts_at_spaces(text: str) -> bool:
    """Test that a byte-level vocabulary encodes what `BETWEEN_WORDS` splits as it does the whole.

    So do GPT-2's pattern, also behind a split at digits (SmolLM), and those of Llama 3 and Qwen:
    each takes a space as the first character alone, and reads nothing behind it.
    """
    settings = json.loads(text)
    cutting = settings.get("pre_tokenizer") or {}
    steps = cutting["pretokenizers"] if cutting.get("type") == "Sequence" else [cutting]
    *before, last = steps or [{}]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return False
    if last.get("use_regex", True):
        is_known = all(step.get("type") == "Digits" for step in before)
    else:
        patterns = [step.get("pattern", {}).get("Regex") for step in before if _isolates(step)]
        is_known = len(before) == 1 and patterns in [[one] for one in PATTERNS]
    # NFC composes no character with a space behind it.
    normalizer = (settings.get("normalizer") or {}).get("type")
    # Added tokens are found in a text before it is cut; special ones are not looked for.
    added = [token for token in settings.get("added_tokens", []) if not token["special"]]
    return is_known and normalizer in (None, "NFC") and all(map(_is_within_a_word, added))


def _isolates(step: dict[str, Any]) -> bool:
    """Test that a step of a pre-tokenizer makes each match of its pattern a piece."""
    is_split = step.get("type") == "Split" and step.get("behavior") == "Isolated"
    return is_split and not step.get("invert")


def _is_within_a_word(token: dict[str, Any]) -> bool:
    """Test that an added token neither holds spaces nor takes those around it."""
    takes = any(token.get(name, False) for name in ("lstrip", "rstrip", "single_word"))
    return not takes and not re.search(r"\s", token["content"])


def _byte_letters() -> dict[str, int]:
    # The letters that byte-level vocabularies write bytes with: those that can be printed stand
    # for themselves, the others follow from 256 on.
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return {chr(byte if byte in printed else next(others)): byte for byte in range(256)}


def _begin_with(library: Library, token: str, number: int) -> None:
    library.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, number)]
    )


def _begin(library: Library) -> int | None:
    with_special = library.encode("a", add_special_tokens=True).ids
    plain = library.encode("a", add_special_tokens=False).ids
    return with_special[0] if with_special[:1] != plain[:1] else None


def _opened(text: str) -> Library:
    library = Library.from_str(text)
    # Settings some files carry for their first use, which would cut documents or fill them up.
    library.no_truncation()
    library.no_padding()
    return library


def _understood(text: str, refusal: str) -> Library:
    """A tokenizer of the library, tried once, or a refusal with its reason."""
    try:
        library = Library.from_str(text)
        library.decode(library.encode("a").ids)
        numbers = library.get_vocab(with_added_tokens=True).values()
        if not numbers or max(numbers) >= MOST_TOKENS:
            raise ValueError(f"its tokens are numbered from 0 to below {MOST_TOKENS:,}")
    except BaseException as wrong:  # the library raises plain ones, and panics as no Exception
        if isinstance(wrong, KeyboardInterrupt | SystemExit):
            raise
        raise UserError(f"{refusal} ({str(wrong)[:200]})") from None
    return library


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _json_beside(file: Path, name: str) -> dict[str, Any]:
    beside = file.with_name(name)
    if not beside.is_file():
        return {}
    try:
        values = parse_json(beside.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{beside} is not JSON") from None
    if not isinstance(values, dict):
        raise UserError(f"{beside} holds {show(values)}; it must be a mapping")
    return values


def _settings(file: Path) -> dict[str, Any]:
    """Settings of tokenizer_config.json, special tokens as plain text; nothing that names code."""
    settings = _json_beside(file, "special_tokens_map.json") | {
        name: value for name, value in _json_beside(file, SETTINGS).items() if value is not None
    }
    settings.pop("auto_map", None)
    return {
        name: value["content"] if isinstance(value, dict) and "content" in value else value
        for name, value in settings.items()
    }


def _template(file: Path, setting: str | list[dict[str, str]] | None) -> str | None:
    """The source of a chat template: a file of its own, or a setting, which may be several."""
    template_file = file.with_name("chat_template.jinja")
    if template_file.is_file():
        try:
            return template_file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{template_file} is not UTF-8") from None
    if isinstance(setting, list) and all(isinstance(one, dict) for one in setting):
        named = {one.get("name"): one.get("template") for one in setting}
        setting = named.get("default") or next(iter(named.values()), None)
    if not isinstance(setting, str | None):
        raise UserError(
            f"{file.with_name(SETTINGS)} has chat_template {show(setting)}; it must be text, or a "
            "list of mappings with name and template"
        )
    return setting


def _end(library: Library, file: Path, eos: str | None, settings: dict[str, Any]) -> int:
    special = [token.content for token in library.get_added_tokens_decoder().values()]
    eos = eos or settings.get("eos_token")
    if eos is None:
        eos = next((end for end in KNOWN_ENDS if end in special), None)
    if eos is None:
        raise UserError(
            f"{file} does not say which token ends a document; "
            f"tokenizer.eos names one: {', '.join(special) or 'it has no special tokens'}"
        )
    try:
        number = library.token_to_id(eos)
    except (TypeError, UnicodeEncodeError):  # no text, or half a character
        number = None
    if number is None:
        raise UserError(
            f"tokenizer.eos is {eos if isinstance(eos, str) else show(eos)}, which is not in "
            f"{file}; its special tokens are {', '.join(special) or 'none'}"
        )
    return number
