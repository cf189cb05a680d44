"""A language of order two: the next letter follows from the last two, by tables from a seed.

p(c | a, b) = softmax(U[a] + V[b])_c, with U and V of independent normal numbers.
"""

from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from windlass.config import section
from windlass.sources import Documents

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-"


@section
class Source(Documents):
    """Texts of an artificial language whose entropy is known."""

    yields: ClassVar[str] = "text"

    count: int = 2000  # texts
    letters: int = 256  # in each
    strength: float = 1.1  # standard deviation of the numbers in either table
    seed: int = 0

    @property
    def total(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        chance = np.random.default_rng([self.seed, 1, index])
        drawn, text = chance.random(self.letters), list(chance.integers(len(LETTERS), size=2))
        for x in drawn[2:]:
            ends = self._ends[text[-2], text[-1]]
            text.append(min(int(np.searchsorted(ends, x)), len(LETTERS) - 1))
        return {"text": "".join(LETTERS[letter] for letter in text)}

    def fingerprint(self) -> str:
        return f"markov {len(self)} {self.letters} {self.strength} {self.seed}"

    @cached_property
    def probabilities(self) -> np.ndarray:
        """The probability of each letter after each two."""
        size = (len(LETTERS), len(LETTERS))
        first, second = self.strength * np.random.default_rng(self.seed).normal(size=(2, *size))
        logits = first[:, None] + second[None]
        exponents = np.exp(logits - logits.max(-1, keepdims=True))
        return exponents / exponents.sum(-1, keepdims=True)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.probabilities, axis=-1)
