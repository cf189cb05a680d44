"""Short stories of a grammar, any number of them, each from its seed and number alone."""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from windlass.config import section
from windlass.sources import Documents
from windlass.sources import _story_plots as plots
from windlass.sources import _story_words as words

T = TypeVar("T")


@section
class Source(Documents):
    """Short stories in simple words, with a beginning, a trouble and an end."""

    yields: ClassVar[str] = "text"

    count: int = 20_000  # stories
    seed: int = 0  # another seed, other stories

    def __post_init__(self):
        if self.count < 1:
            raise ValueError(f"count is {self.count}; there is at least 1 story")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; it is between 0 and {2**32 - 1}")

    @property
    def total(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.count:
            raise IndexError(f"story {index} of {self.count}")
        return {"text": tell(self.seed, index)}

    def fingerprint(self) -> str:
        return f"stories {len(self)} {self.seed} {self._grammar}"

    @cached_property
    def _grammar(self) -> str:
        # The words are part of the program: with other words these are other stories.
        files = (__file__, words.__file__, plots.__file__)
        program = b"".join(Path(file).read_bytes() for file in files)
        return hashlib.sha256(program).hexdigest()


def tell(seed: int, index: int) -> str:
    """One story."""
    pick = Chance(seed << 32 | index)
    hero = pick(words.HEROES)
    friend = pick([other for other in words.HEROES if other.name != hero.name])
    chosen = {
        "a": hero,
        "b": friend,
        "elder": pick(words.ELDERS),
        "place": pick(words.PLACES),
        "pet": pick(words.PETS),
        "toy": pick(words.TOYS),
        "color": pick(words.COLORS),
        "trait": pick(words.TRAITS),
        "hobby": pick(words.HOBBIES),
        "food": pick(words.FOODS),
        "weather": pick(words.WEATHERS),
        "time": pick(words.TIMES),
        "spot": pick(words.SPOTS),
        "plant": pick(words.PLANTS),
        "fragile": pick(words.FRAGILE),
        "skill": pick(words.SKILLS),
        "fear": pick(words.FEARS),
        "load": pick(words.LOADS),
    }
    beats = (*plots.OPENING, *pick(plots.ARCS), plots.ENDING)
    leisure = pick((0, 1, 2, 3))
    told = [
        pick(beat)
        for beat in beats
        if not isinstance(beat, plots.Aside) or pick((1, 2, 3)) <= leisure
    ]
    return " ".join(told).format_map(chosen)


class Chance:
    """A stream of choices that is the same on every machine and every version of Python."""

    def __init__(self, seed: int):
        self.state = seed

    def __call__(self, options: "tuple[T, ...] | list[T]") -> T:
        # SplitMix64: neighbouring seeds give unrelated streams.
        self.state = (self.state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = self.state
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        return options[(mixed ^ mixed >> 31) % len(options)]
