"""The families. One file each; `model.family` in a recipe is the file's name.

A family's file defines

- `Config`, a section whose fields are named for the axes they size, with `sizes`, `causal`,
  `init(key) -> model` and `tiny()` (a config in which no field has its default). Every field must
  make another model when it is doubled, negated if it is a statement, exchanged if it is a word and
  left out if it is a section; `other(field)` gives the second value of one that cannot be;
- where Hugging Face has such models: `NAMES`, from our paths to the names in a checkpoint, and
  `HUGGING_FACE`, how its config.json describes one.

The model is called as `model(batch, cache=None) -> (hidden, auxiliary, cache)`, and `model.head`
alone turns hidden states into logits. `auxiliary` is what blocks reported with
`context.auxiliary`: a total and its weight, by name. A module that extends `AuxiliaryLosses`
declares which of its reports are part of the loss, under every objective; the others are metrics.

A config whose model ends at some position has `longest`, the length of the longest sequence. One
with fields that may be others once it is trained, since no weight depends on them, names those in
`in_use`. A model that has `facts` has them printed when a run starts; one that can be measured
without data is `Diagnosed`, and `windlass evaluate --diagnose` shows what was measured.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from windlass.layers.auxiliary import Report
from windlass.layers.head import Head
from windlass.layers.kv_cache import KVCache

HEAD = "output.weight"  # absent where the head shares the embedding's weight


@runtime_checkable
class Model(Protocol):
    @property
    def head(self) -> Head: ...

    def __call__(
        self, batch: dict[str, Array], cache: KVCache | None = None
    ) -> tuple[Float[Array, "batch seq embed"], Report, PyTree]: ...


@runtime_checkable
class SharesTable(Protocol):
    """A model whose head may share the embedding's table, of which both have a part's gradient."""

    def looked_up(self, tokens: Int[Array, "batch seq"]) -> Model:
        """The same model for a batch of these tokens alone, with the two added in place."""
        ...


@runtime_checkable
class Config(Protocol):
    vocab: int

    @property
    def sizes(self) -> dict[str, int]: ...

    @property
    def causal(self) -> bool: ...

    def init(self, key: PRNGKeyArray) -> Model: ...

    @classmethod
    def tiny(cls) -> "Config": ...


class Diagnosis(NamedTuple):
    """Measures of the parts of a model: a table, and a curve of each over whole numbers."""

    rows: Sequence[Mapping[str, Any]]  # one for each part, by the same names; None: has no such
    curves: Mapping[str, list[tuple[int, int | float]]]
    title: str  # of the curves


@runtime_checkable
class Introduced(Protocol):
    """A model that has something to say of itself when a run starts."""

    def facts(self) -> Iterable[tuple[str, str]]:
        """Titles and lines that a run prints once its arrays are there."""
        ...


@runtime_checkable
class Diagnosed(Introduced, Protocol):
    """A model that can be measured without data, from its arrays alone."""

    def diagnose(self) -> Diagnosis: ...


class Multimodal(NamedTuple):
    """A model of images and text elsewhere, whose language model is one of a family.

    Its config.json has that of the language model as `text_config`.
    """

    architecture: str
    model_type: str
    prefix: str  # of the names of the language model's tensors, in place of `model.`


class Spelling(NamedTuple):
    """Keys of a family's config.json that are not the plain values of fields."""

    # a config.json with a key for each field, and what is wrong with it, by key
    read: Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[tuple[str, str]]]]
    written: Callable[[Any], dict[str, Any]]  # keys, beside those of fields, of a section
    former: tuple[str, ...] = ()  # keys that are not written


class HuggingFace(NamedTuple):
    """A family's config.json, key by key, but for its RoPE settings.

    A key that `absent` has no value for must be there. One of `fixed` changes what is computed, and
    only these values of it are computed here; where it is left out, the first of them is meant.
    """

    architecture: str
    model_type: str
    fields: Mapping[str, str]  # from ours to the key there
    absent: Mapping[str, Any]
    fixed: Mapping[str, tuple]
    gguf: str | None = None  # its architecture in llama.cpp; None: there is none
    also: Mapping[str, str] = {}  # from another spelling of a key to the one that is written
    by_layer: bool = False  # RoPE settings of layers that see a window are apart
    rope: tuple[str, ...] = ()  # more keys of RoPE parameters, kept as they are
    spelling: Spelling | None = None
    multimodal: Multimodal | None = None
    # prefixes of tensors in its checkpoints that are none of the model's, and what they are of
    beside: Mapping[str, str] = {}
    # the same by the config.json of the language model, of tensors that are under its own prefix
    unused: Callable[[Mapping[str, Any]], Mapping[str, str]] | None = None
    scored: str | None = None  # the architecture with a head of scores, where it has another stem

    @property
    def classifier(self) -> str:
        """The architecture with a head of scores, as a reward model has."""
        causal, scored = "ForCausalLM", "ForSequenceClassification"
        return self.scored or self.architecture.replace(causal, scored)


def as_trained(config: Any, stored: Mapping[str, Any]) -> Any:
    """The config that weights were trained with, of one in use: `in_use` fields as stored."""
    own = {name: stored[name] for name in getattr(config, "in_use", ()) if name in stored}
    return dataclasses.replace(config, **own)


def names(config: Config) -> Mapping[str, str]:
    """The table of names elsewhere of a config's family; of one that has none it is empty."""
    return getattr(import_module(type(config).__module__), "NAMES", {})
