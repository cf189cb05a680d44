"""Generation: a prefill of whole prompts, then decode, a token a row at a time, by a KV cache."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from windlass.config.sampling import Sampling
from windlass.data.vocabulary import Vocabulary
from windlass.devices.axes import shard
from windlass.evaluation.sampling import Settings, adjust, draw
from windlass.layers.kv_cache import KVCache
from windlass.models import Model
from windlass.telemetry.compiles import Program

Prompt = str | np.ndarray  # text, or the tokens of one
SMALLEST_BUCKET = 32  # tokens; shorter prompts are padded to it


class Generator:
    """Generates from prompts, on the mesh that is set where it is called.

    Prompts are padded to a power of two, so that there is one prefill program and one decode
    program for all prompts of about the same length.
    """

    def __init__(self, model: Model, vocabulary: Vocabulary, ends: Iterable[int] = ()):
        self.vocabulary = vocabulary
        self.ends = frozenset({vocabulary.eos, *ends})  # tokens that end a text
        self._weights, self._rest = eqx.partition(model, eqx.is_array)
        self._prefill = Program(self._one_token, "prefill", donate_argnames="cache")
        self._decode = Program(self._one_token, "decode", donate_argnames="cache")

    @property
    def model(self) -> Model:
        return eqx.combine(self._weights, self._rest)

    def renew(self, model: Model) -> None:
        """Go on with other weights of the same model; nothing is compiled again."""
        weights, _ = eqx.partition(model, eqx.is_array)
        if jax.tree.structure(weights) != jax.tree.structure(self._weights):
            raise ValueError("a generator can be given other weights, not another model")
        self._weights = weights

    def generate(self, prompts: str | Sequence[str], sampling: Sampling) -> list[str]:
        """The text that follows each prompt, without the prompt."""
        every = [prompts] if isinstance(prompts, str) else prompts
        return list(self.each(every, sampling, max(1, len(every))))

    def each(
        self, prompts: Sequence[Prompt], sampling: Sampling, batch: int, begin: int = 0
    ) -> Iterator[str]:
        """The text that follows each prompt from `begin` on, in order, `batch` prompts at a time.

        The text of prompt i depends on it, the seed and i, and not on the others.
        """
        starts = self.encoded(prompts)
        for first in range(begin, len(starts), batch):
            prompt_tokens = starts[first : first + batch]
            # A last batch that is not full is filled up: it needs no program of its own.
            blank = [np.array([self.vocabulary.eos])] * (batch - len(prompt_tokens) if first else 0)
            yield from self._batch(prompt_tokens, blank, sampling, first)

    def stream(self, prompt: Prompt, sampling: Sampling) -> Iterator[str]:
        """The text that follows a prompt, in pieces that can be printed as they come."""
        (start,) = self.encoded([prompt])
        return self.text(start, self.tokens(start, sampling), sampling)

    def tokens(self, start: np.ndarray, sampling: Sampling) -> Iterator[int]:
        """The tokens that follow those of a prompt, up to the end of the text."""
        sampled = (int(column[0]) for column in self._columns([start], sampling))
        return takewhile(lambda token: token not in self.ends, sampled)

    def text(self, start: np.ndarray, tokens: Iterable[int], sampling: Sampling) -> Iterator[str]:
        """The text of tokens that follow a prompt, in pieces that can be printed as they come."""
        return until(self._text(start, tokens), sampling.stop)

    def encoded(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """The prompts as tokens, those that are text encoded."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(self._encode(texts))
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _batch(
        self, starts: list[np.ndarray], blank: list[np.ndarray], sampling: Sampling, first: int
    ) -> Iterator[str]:
        written: list[list[int]] = [[] for _ in starts]
        active = set(range(len(starts)))
        for column in self._columns([*starts, *blank], sampling, first):
            for row in list(active):
                if column[row] in self.ends:
                    active.remove(row)
                    continue
                written[row].append(int(column[row]))
                if sampling.stop and _holds(self.vocabulary.decode(written[row]), sampling.stop):
                    active.remove(row)
            if not active:
                break
        for start, tokens in zip(starts, written, strict=True):
            yield "".join(self.text(start, tokens, sampling))

    def _encode(self, prompts: Sequence[str]) -> list[np.ndarray]:
        vocabulary = self.vocabulary
        encoded = vocabulary.encode_batch(list(prompts))
        if vocabulary.bos is not None:
            return [np.concatenate([[vocabulary.bos], tokens]) for tokens in encoded]
        # A prefill needs a token: the end of a document is the nearest to a beginning.
        return [tokens if len(tokens) else np.array([vocabulary.eos]) for tokens in encoded]

    def _text(self, start: np.ndarray, tokens: Iterable[int]) -> Iterator[str]:
        # The prompt goes through the decoder too, since some vocabularies write a word differently
        # at the start of a text.
        has_begun = False

        def whole():
            nonlocal has_begun
            yield from start
            has_begun = True
            yield from tokens

        return (piece for piece in self.vocabulary.stream(whole()) if has_begun)

    def _columns(
        self, starts: list[np.ndarray], sampling: Sampling, first: int = 0
    ) -> Iterator[np.ndarray]:
        """Prefill, then decode: the next token of every row, over and over, whatever it is."""
        if not starts:
            return
        batch = _left_padded(starts, bucket(max(len(tokens) for tokens in starts)))
        capacity = batch["tokens"].shape[1] + bucket(sampling.tokens)
        cache = KVCache.empty(len(starts), capacity)
        settings = Settings.of(sampling, first)
        seen = None
        if sampling.repetition_penalty != 1:
            seen = np.zeros((len(starts), self.vocabulary.size), bool)
            for row, tokens in enumerate(starts):
                seen[row, tokens] = True

        last = None
        for index in range(sampling.tokens):
            advance = self._decode if index else self._prefill
            batch, cache, seen = advance(
                self._weights, batch, cache=cache, seen=seen, index=index, settings=settings
            )
            # Read one token late, so that the device has the next one to work on meanwhile.
            if last is not None:
                yield np.asarray(last)[:, 0]
            last = batch["tokens"]
        yield np.asarray(last)[:, 0]

    def _one_token(self, weights, batch, *, cache, seen, index, settings):
        """Read a batch of tokens; return the batch of those that follow, one for each row."""
        model = eqx.combine(weights, self._rest)
        batch = {name: shard(column, "batch seq") for name, column in batch.items()}
        hidden, _, cache = model(batch, cache)
        # Whole on every device: a sort cannot be split. Logits of the model
        # beyond the vocabulary are padding.
        logits = shard(model.head.logits(hidden[:, -1:]), ". . .")[:, 0, : self.vocabulary.size]
        tokens = draw(adjust(logits, seen, settings), index, settings)
        if seen is not None:
            seen = seen.at[jnp.arange(len(tokens)), tokens].set(True)
        batch = {
            "tokens": tokens[:, None],
            "position": shard(batch["position"][:, -1:] + 1, ". ."),
            "document": shard(batch["document"][:, -1:], ". ."),
        }
        return batch, cache, seen


def bucket(tokens: int) -> int:
    """The next power of two, and not a small one."""
    return max(SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())


def until(pieces: Iterable[str], stop: Sequence[str]) -> Iterator[str]:
    """A text as it comes, up to the first stop sequence.

    What may turn out to be the beginning of a stop sequence is held back until it is known.
    """
    pending = ""
    for piece in pieces:
        pending += piece
        if matches := [at for at in map(pending.find, stop) if at >= 0]:
            pending = pending[: min(matches)]
            break
        safe = len(pending) - max((_overlap(pending, end) for end in stop), default=0)
        if safe:
            yield pending[:safe]
        pending = pending[safe:]
    if pending:
        yield pending


def _overlap(text: str, end: str) -> int:
    """Number of characters at the end of a text that may be the beginning of `end`."""
    return next(n for n in range(len(end) - 1, -1, -1) if text.endswith(end[:n]))


def _holds(text: str, stop: Sequence[str]) -> bool:
    return any(end in text for end in stop)


def _left_padded(starts: list[np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Left-padded rows, which end together; padding is of document -1."""
    shape = (len(starts), length)
    tokens, position = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    document = np.full(shape, -1, np.int32)
    for row, start in enumerate(starts):
        real = slice(length - len(start), length)
        tokens[row, real], position[row, real] = start, np.arange(len(start))
        document[row, real] = 0
    return {"tokens": tokens, "position": position, "document": document}
