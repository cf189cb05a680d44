"""The families. One file each; `model.family` in a recipe is the file's name.

A family's file defines

- `Config`, a section whose fields are named for the axes they size, with `sizes`, `causal`,
  `init(key) -> model` and `tiny()` (a config in which no field has its default). Every field must
  make another model when it is doubled, negated if it is a statement, exchanged if it is a word and
  left out if it is a section; `other(field)` gives the second value of one that cannot be;
- `NAMES`, from our paths to the names in a Hugging Face checkpoint, where there is one.

The model is called as `model(batch, memory=None) -> (hidden, auxiliary, memory)`, and `model.head`
alone turns hidden states into logits.
"""

from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from windlass.layers.context import Memory
from windlass.layers.head import Head


@runtime_checkable
class Model(Protocol):
    @property
    def head(self) -> Head: ...

    def __call__(
        self, batch: dict[str, Array], memory: Memory | None = None
    ) -> tuple[Float[Array, "batch seq embed"], dict[str, Array], PyTree]: ...


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
