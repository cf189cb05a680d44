"""A language of eight symbols in which each follows from two earlier ones, but for some noise.

s_t = π[(s_{t-lag} + s_{t-1}) mod 8] with a probability, and else any symbol: whoever does not
remember symbol t − lag knows nothing of symbol t. The best accuracy is p + (1 − p) / 8.
"""

import numpy as np

from windlass.chance import keys
from windlass.columns import Column
from windlass.config import section
from windlass.sources import Blocks

SYMBOLS = 8


@section
class Source(Blocks):
    """Sequences of a lagged language; trained on are the symbols that follow from others."""

    count: int = 4096  # sequences
    length: int = 64
    lag: int = 3
    share: float = 0.9  # probability of the symbol that follows
    seed: int = 0

    @property
    def total(self) -> int:
        return self.count

    @property
    def columns(self) -> dict[str, Column]:
        whole = Column(np.int32, (self.length,))
        return {
            "tokens": whole,
            "targets": whole,
            "weight": Column(np.float32, (self.length,)),
            "position": whole,
            "document": Column(np.int32, (self.length,), padding=-1),
        }

    @property
    def vocab(self) -> int:
        return SYMBOLS

    def fingerprint(self) -> str:
        return f"lagged {len(self)} {self.length} {self.lag} {self.share} {self.seed}"

    def rows(
        self, numbers: np.ndarray, epochs: np.ndarray | None, seed: int
    ) -> dict[str, np.ndarray]:
        symbols = np.stack([self._row(int(key)) for key in keys(self.seed, numbers)])
        at = np.tile(np.arange(self.length, dtype=np.int32), (len(numbers), 1))
        return {
            "tokens": symbols[:, :-1],
            "targets": symbols[:, 1:],
            "weight": (at >= self.lag - 1).astype(np.float32),
            "position": at,
            "document": np.zeros_like(at),
        }

    def _row(self, key: int) -> np.ndarray:
        order = np.random.default_rng(self.seed).permutation(SYMBOLS)
        rng = np.random.default_rng(key)
        row = rng.integers(SYMBOLS, size=self.length + 1)
        follows = rng.random(self.length + 1) < self.share
        for t in range(self.lag, self.length + 1):
            if follows[t]:
                row[t] = order[(row[t - self.lag] + row[t - 1]) % SYMBOLS]
        return row.astype(np.int32)
