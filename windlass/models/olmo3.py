"""OLMo 3: as OLMo 2, with three layers that see a window to each that sees all."""

import dataclasses

from jaxtyping import PRNGKeyArray

from windlass.config import section
from windlass.layers.rotary import Rotary, Scaling
from windlass.models import HuggingFace, llama, olmo2
from windlass.networks.decoder import Decoder

NAMES = olmo2.NAMES
HUGGING_FACE = HuggingFace(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    fields=olmo2.FIELDS | {"window": "sliding_window"},
    absent=olmo2.ABSENT | {"sliding_window": 4096, "sliding_window_pattern": 4},
    fixed=olmo2.HUGGING_FACE.fixed,
    by_layer=True,
)


@section
class Config(llama.Transformer):
    """An OLMo 3 model from scratch."""

    window: int  # sliding window, own position included
    global_every: int = 4  # every n-th layer has global attention
    scaling: Scaling | None = None  # RoPE scaling in global layers
    eps: float = 1e-6  # epsilon of the norms
    tied: bool = False  # tie the output head to the embedding
    attention_bias: bool = False  # bias on the query, key, value and output projections

    def __post_init__(self):
        super().__post_init__()
        if self.global_every < 1:
            raise ValueError(f"global_every is {self.global_every}; it must be 1 or more")

    def init(self, key: PRNGKeyArray) -> Decoder:
        far = Rotary(self.theta, self.pairing, self.scaling)
        near = Rotary(self.theta, self.pairing)

        def local(key, layer):
            return olmo2.NormedBranchesBlock(self, near, self.window, key=key)

        def whole(key, layer):
            return olmo2.NormedBranchesBlock(self, far, key=key)

        pattern = [*[local] * (self.global_every - 1), whole]
        norm = olmo2.norm("embed", self)
        return Decoder(self.sizes, pattern, self.layers, norm=norm, tied=self.tied, key=key)

    @classmethod
    def tiny(cls) -> "Config":
        return cls(
            **llama.TINY,
            # At whole pairs: transformers reads truncate where all layers have one scaling.
            scaling=dataclasses.replace(llama.YARN, truncate=True),
            window=4,
            global_every=2,
            tied=True,
            attention_bias=True,
        )
