"""The section of sampling: of the text that a run generates as it trains, or a command later."""

from windlass.config.sections import section


@section
class Sampling:
    """Sampling of the next token, and where generation stops."""

    temperature: float = 0.8  # divides the logits; 0: greedy
    top_k: int | None = None  # sample from the k likeliest tokens; null: all
    top_p: float | None = None  # nucleus sampling: keep this probability mass; null: all
    repetition_penalty: float = 1.0  # above 1, tokens that have occurred become less likely
    tokens: int = 200  # max new tokens
    stop: tuple[str, ...] = ()  # stop sequences: generation ends before the first
    seed: int = 0  # random seed

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
