"""The section of what a run starts from, or a helper such as a teacher: weights elsewhere."""

from typing import ClassVar, Literal

from windlass.config.reading import listing
from windlass.config.sections import section

# Which weights of a run: the newest, those of the lowest validation loss, or their average.
Weights = Literal["last", "best", "ema"]


FEWEST = 8  # inputs of a group: with fewer, the scales take more room than the codes


@section
class FrozenBase:
    """Storage of a frozen model: 4 bits for each weight of its linear maps, and scales."""

    shorthand: ClassVar[str] = "kind"

    # nf4: the 16 values of NormalFloat, as bitsandbytes has them; int4: evenly spaced
    kind: Literal["int4", "nf4"]
    # consecutive inputs that share a scale, or fewer where that does not divide a map's; null: 64
    # for nf4, 128 for int4
    group: int | None = None
    zeros: bool = False  # of int4: zero points beside the scales, as a checkpoint may have them
    # dtype of the scales; bfloat16 has those of nf4 exactly where the weights are bfloat16, and a
    # checkpoint that is in 4 bits has float32
    scales: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self):
        wrong = []
        if self.group is not None and (self.group < FEWEST or self.group % 2):
            wrong.append(f"group is {self.group}; it must be even, and {FEWEST} or more")
        if self.zeros and self.kind != "int4":
            wrong.append(f"zeros is true; {self.kind} has no zero points")
        if wrong:
            raise ValueError(*wrong)

    @property
    def size(self) -> int:
        """Consecutive inputs that share a scale, where it divides."""
        return self.group or {"nf4": 64, "int4": 128}[self.kind]


@section
class Start:
    """Initial weights: a model of the hub, one in a folder, or another run's."""

    hub: str | None = None  # a model of the Hugging Face hub, OWNER/NAME
    # of hub: a branch, tag or commit; null: the newest, or that of this recipe's runs here
    revision: str | None = None
    path: str | None = None  # a folder with config.json, safetensors files and a tokenizer
    run: str | None = None  # the folder of a run, or a recipe with one run in ./runs
    # of run: last (the default), best (lowest validation loss) or ema (the moving average of
    # train.ema)
    weights: Weights | None = None
    # of the model that is trained: its linear maps in 4 bits, nf4 or int4, frozen, with an adapter
    # beside them; null: as the files have them
    base: FrozenBase | None = None

    def __post_init__(self):
        origins = [name for name in ("hub", "path", "run") if getattr(self, name) is not None]
        if not origins:
            raise ValueError("one of hub, path and run is required: where the weights are")
        if len(origins) > 1:
            first, *others = origins
            raise ValueError(
                f"{first} is {getattr(self, first)}; {listing(others, 'and')} says where the "
                "weights are, too: name one of them"
            )
        for name, of in (("revision", "hub"), ("weights", "run")):
            if getattr(self, name) is not None and origins != [of]:
                value = getattr(self, name)
                raise ValueError(f"{name} is {value}; it belongs to {of}, and this is {origins[0]}")

    @property
    def which(self) -> Weights:
        """The other run's weights that are meant: last, best or EMA."""
        return self.weights or "last"
