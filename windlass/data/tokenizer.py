"""The tokenizer section of a recipe: the vocabulary that text is encoded with."""

from typing import ClassVar, Literal

from windlass.config import listing, section

SMALLEST_VOCABULARY = 257  # every byte, and the end of a document


@section
class Tokenizer:
    """Tokenizer: bytes, byte pairs learned from the corpus, or that of a file or a model."""

    shorthand: ClassVar[str] = "kind"

    # bpe: learned from the corpus; null: follows from the keys beside it, byte without any
    kind: Literal["byte", "bpe", "file", "hub"] | None = None
    vocab: int | None = None  # bpe: vocabulary size, bytes and the end-of-document token included
    path: str | None = None  # file: a tokenizer.json, or the folder that holds one
    hub: str | None = None  # hub: the model whose tokenizer it is, OWNER/NAME
    revision: str | None = None  # hub: a branch, a tag or a commit; null: the newest
    # file, hub: the token that ends a document, where the files do not say
    eos: str | None = None

    def __post_init__(self):
        needs = {"vocab": "bpe", "path": "file", "hub": "hub"}
        if self.kind is None:
            implied = (kind for name, kind in needs.items() if getattr(self, name) is not None)
            object.__setattr__(self, "kind", next(implied, "byte"))
        for name, kind in needs.items():
            if getattr(self, name) is None and self.kind == kind:
                raise ValueError(f"{name} is missing; tokenizer.kind {kind} needs it")
        belongs = {name: (kind,) for name, kind in needs.items()}
        for name, kinds in {**belongs, "revision": ("hub",), "eos": ("file", "hub")}.items():
            if getattr(self, name) is not None and self.kind not in kinds:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it belongs to tokenizer.kind "
                    f"{listing(kinds)}, and this is {self.kind}"
                )
        if self.vocab is not None and self.vocab < SMALLEST_VOCABULARY:
            raise ValueError(
                f"vocab is {self.vocab}; 256 bytes and the end of a document need "
                f"{SMALLEST_VOCABULARY}"
            )
