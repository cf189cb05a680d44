"""Text from a model: prompts read in one pass, then a token at a time from its memory."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from windlass.config import section
from windlass.data.tokenizer import Tokeniser
from windlass.devices.axes import shard
from windlass.layers.context import Memory
from windlass.models import Model
from windlass.telemetry.compiles import Program

SMALLEST_BUCKET = 32  # tokens; shorter prompts are padded to it


@section
class Sampling:
    """How the next token is chosen, and when a text ends."""

    temperature: float = 0.8  # 0: always the most likely token
    top_k: int | None = None  # choose among so many tokens; None: among all
    top_p: float | None = None  # choose among the likeliest that make up this share; None: all
    repetition_penalty: float = 1.0  # above 1, tokens that have occurred become less likely
    tokens: int = 200  # at most so many new ones
    stop: tuple[str, ...] = ()  # a text ends before the first of these
    seed: int = 0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; it is 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it is a number of tokens, 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it is a share, above 0 and at most 1")
        if not self.repetition_penalty > 0:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}; it is above 0, and 1 is none"
            )
        if self.tokens < 1:
            raise ValueError(f"tokens is {self.tokens}; it is 1 or more")
        if isinstance(self.stop, str):
            raise ValueError(f"stop is {self.stop!r}; it is a list of texts")
        if "" in self.stop:
            raise ValueError("stop holds an empty text, which is found everywhere")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; it is 0 or more and below 2^32")


class Settings(NamedTuple):
    """A `Sampling` as the compiled step sees it.

    Values are arguments of the step; only what is None changes the program.
    """

    seed: ArrayLike
    temperature: ArrayLike | None  # None: the most likely token
    top_k: ArrayLike | None
    top_p: ArrayLike | None
    repetition_penalty: ArrayLike

    @staticmethod
    def of(sampling: Sampling) -> "Settings":
        def unless(absent, value):
            return None if value in (None, absent) else np.float32(value)

        return Settings(
            seed=np.uint32(sampling.seed),
            temperature=unless(0, sampling.temperature),
            top_k=None if sampling.top_k is None else np.int32(sampling.top_k),
            top_p=unless(1, sampling.top_p),
            repetition_penalty=np.float32(sampling.repetition_penalty),
        )


class Generator:
    """Writes on from prompts, on the mesh that is set where it is called.

    Prompts are padded to a power of two, so that there is one program that reads them and one that
    writes a token for all prompts of about the same length.
    """

    def __init__(self, model: Model, tokeniser: Tokeniser):
        self.tokeniser = tokeniser
        self._weights, self._rest = eqx.partition(model, eqx.is_array)
        self._read = Program(self._one_token, "prompt reader", donate_argnames="memory")
        self._write = Program(self._one_token, "token writer", donate_argnames="memory")

    def renew(self, model: Model) -> None:
        """Go on with other weights of the same model; nothing is compiled again."""
        weights, _ = eqx.partition(model, eqx.is_array)
        if jax.tree.structure(weights) != jax.tree.structure(self._weights):
            raise ValueError("a generator can be given other weights, not another model")
        self._weights = weights

    def generate(self, prompts: str | Sequence[str], sampling: Sampling) -> list[str]:
        """The text that follows each prompt, without the prompt.

        The text of row i depends on its prompt, the seed and i, and not on the other rows.
        """
        starts = self._encode([prompts] if isinstance(prompts, str) else prompts)
        written: list[list[int]] = [[] for _ in starts]
        writing = set(range(len(starts)))
        for column in self._columns(starts, sampling):
            for row in list(writing):
                if column[row] == self.tokeniser.eos:
                    writing.remove(row)
                    continue
                written[row].append(int(column[row]))
                if sampling.stop and _holds(self.tokeniser.decode(written[row]), sampling.stop):
                    writing.remove(row)
            if not writing:
                break
        return [
            "".join(until(self._text(start, tokens), sampling.stop))
            for start, tokens in zip(starts, written, strict=True)
        ]

    def stream(self, prompt: str, sampling: Sampling) -> Iterator[str]:
        """The text that follows a prompt, in pieces that can be printed as they come."""
        (start,) = starts = self._encode([prompt])
        tokens = (int(column[0]) for column in self._columns(starts, sampling))
        written = takewhile(lambda token: token != self.tokeniser.eos, tokens)
        return until(self._text(start, written), sampling.stop)

    def _encode(self, prompts: Sequence[str]) -> list[np.ndarray]:
        tokeniser = self.tokeniser
        encoded = tokeniser.encode_batch(list(prompts))
        if tokeniser.bos is not None:
            return [np.concatenate([[tokeniser.bos], tokens]) for tokens in encoded]
        # A model has to be told something: the end of a document is the nearest to a beginning.
        return [tokens if len(tokens) else np.array([tokeniser.eos]) for tokens in encoded]

    def _text(self, start: np.ndarray, tokens: Iterable[int]) -> Iterator[str]:
        # The prompt goes through the decoder too, since some vocabularies write a word differently
        # at the start of a text.
        has_begun = False

        def whole():
            nonlocal has_begun
            yield from start
            has_begun = True
            yield from tokens

        return (piece for piece in self.tokeniser.stream(whole()) if has_begun)

    def _columns(self, starts: list[np.ndarray], sampling: Sampling) -> Iterator[np.ndarray]:
        """The next token of every row, over and over, whatever it is."""
        if not starts:
            return
        batch = _left_padded(starts, bucket(max(len(tokens) for tokens in starts)))
        capacity = batch["tokens"].shape[1] + bucket(sampling.tokens)
        memory = Memory.empty(len(starts), capacity)
        settings = Settings.of(sampling)
        seen = None
        if sampling.repetition_penalty != 1:
            seen = np.zeros((len(starts), self.tokeniser.size), bool)
            for row, tokens in enumerate(starts):
                seen[row, tokens] = True

        last = None
        for index in range(sampling.tokens):
            advance = self._write if index else self._read
            batch, memory, seen = advance(
                self._weights, batch, memory=memory, seen=seen, index=index, settings=settings
            )
            # Read one token late, so that the device has the next one to work on meanwhile.
            if last is not None:
                yield np.asarray(last)[:, 0]
            last = batch["tokens"]
        yield np.asarray(last)[:, 0]

    def _one_token(self, weights, batch, *, memory, seen, index, settings):
        """Read a batch of tokens; return the batch of those that follow, one for each row."""
        model = eqx.combine(weights, self._rest)
        batch = {name: shard(column, "batch seq") for name, column in batch.items()}
        hidden, _, memory = model(batch, memory)
        # Whole on every device: a sort cannot be split. What the model has beyond the tokeniser's
        # vocabulary is padding.
        logits = shard(model.head.logits(hidden[:, -1:]), ". . .")[:, 0, : self.tokeniser.size]
        tokens = draw(adjust(logits, seen, settings), index, settings)
        if seen is not None:
            seen = seen.at[jnp.arange(len(tokens)), tokens].set(True)
        batch = {
            "tokens": tokens[:, None],
            "position": shard(batch["position"][:, -1:] + 1, ". ."),
            "document": shard(batch["document"][:, -1:], ". ."),
        }
        return batch, memory, seen


def bucket(tokens: int) -> int:
    """The next power of two, and not a small one."""
    return max(SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())


def adjust(
    logits: Float[Array, "batch vocab"],
    seen: Bool[Array, "batch vocab"] | None,  # what the penalty is for; None: for nothing
    settings: Settings,
) -> Float[Array, "batch vocab"]:
    """The logits to choose by, in float32; minus infinity for what is not to be chosen."""
    s = settings
    if seen is not None:
        fewer = jnp.where(logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty)
        logits = jnp.where(seen, fewer, logits)
    if s.temperature is None:
        return logits
    logits = logits / s.temperature
    if s.top_k is None and s.top_p is None:
        return logits
    ordered = jnp.sort(logits, axis=-1, descending=True)
    if s.top_k is not None:
        last = jnp.minimum(s.top_k, logits.shape[-1]) - 1
        least = jax.lax.dynamic_index_in_dim(ordered, last, axis=-1)
        logits = jnp.where(logits < least, -jnp.inf, logits)
        ordered = jnp.where(ordered < least, -jnp.inf, ordered)
    if s.top_p is not None:
        share = jax.nn.softmax(ordered, axis=-1)
        # The token that crosses the threshold is kept: what counts is the share of those before.
        is_kept = jnp.cumsum(share, axis=-1) - share < s.top_p
        least = jnp.min(jnp.where(is_kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def draw(
    logits: Float[Array, "batch vocab"], index: Int[Array, ""], settings: Settings
) -> Int[Array, " batch"]:
    """A token for each row, by chance that depends on the seed, the row and the token's index."""
    if settings.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def one(row, logits):
        key = jax.random.key(settings.seed)
        key = jax.random.fold_in(jax.random.fold_in(key, row), index)
        return jax.random.categorical(key, logits).astype(jnp.int32)

    return jax.vmap(one)(jnp.arange(logits.shape[0]), logits)


def until(pieces: Iterable[str], stop: Sequence[str]) -> Iterator[str]:
    """A text as it comes, up to the first of some strings.

    What may turn out to be the beginning of one is held back until it is known.
    """
    held = ""
    for piece in pieces:
        held += piece
        if found := [at for at in map(held.find, stop) if at >= 0]:
            held = held[: min(found)]
            break
        safe = len(held) - max((_overlap(held, end) for end in stop), default=0)
        if safe:
            yield held[:safe]
        held = held[safe:]
    if held:
        yield held


def _overlap(text: str, end: str) -> int:
    """How many characters at the end of a text may be the beginning of `end`."""
    return next(n for n in range(len(end) - 1, -1, -1) if text.endswith(end[:n]))


def _holds(text: str, stop: Sequence[str]) -> bool:
    return any(end in text for end in stop)


def _left_padded(starts: list[np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Rows that end together; padding is of document -1."""
    shape = (len(starts), length)
    tokens, position = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    document = np.full(shape, -1, np.int32)
    for row, start in enumerate(starts):
        real = slice(length - len(start), length)
        tokens[row, real], position[row, real] = start, np.arange(len(start))
        document[row, real] = 0
    return {"tokens": tokens, "position": position, "document": document}
