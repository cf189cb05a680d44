"""The section of what a run starts from, or a helper such as a teacher: weights elsewhere."""

from typing import Literal

from windlass.config.reading import listing
from windlass.config.sections import section

# Which weights of a run: the newest, those of the lowest validation loss, or their average.
Weights = Literal["last", "best", "ema"]


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
