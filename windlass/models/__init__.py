"""The families. One file each; `model.family` in a recipe is the file's name.

A family's file defines

- `Config`, a section whose fields are named for the axes they size, with `sizes`, `causal`,
  `init(key) -> model`, `tiny()` (a config in which no field has its default), and
  `other(field)` (a second value for a field, which must make another model);
- `NAMES`, from our paths to the names in a Hugging Face checkpoint, where there is one.

The model is called as `model(batch, memory=None) -> (hidden, auxiliary, memory)`, and `model.head`
alone turns hidden states into logits.
"""

from typing import Any, Protocol, Self

from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from windlass.layers.context import Memory
from windlass.layers.head import Head


class Model(Protocol):
    @property
    def head(self) -> Head: ...

    def __call__(
        self, batch: dict[str, Array], memory: Memory | None = None
    ) -> tuple[Float[Array, "batch seq embed"], dict[str, Array], PyTree]: ...


class Config(Protocol):
    vocab: int

    @property
    def sizes(self) -> dict[str, int]: ...

    @property
    def causal(self) -> bool: ...

    def init(self, key: PRNGKeyArray) -> Model: ...

    @classmethod
    def tiny(cls) -> Self: ...

    def other(self, field: str) -> Any: ...
