"""The plain residual: each branch is added to the one stream."""

from collections.abc import Mapping
from typing import ClassVar, TypeVar

from jaxtyping import Array, Int, PRNGKeyArray

from windlass.config import section
from windlass.layers.residual import Plain
from windlass.residuals import BaseResidual

Model = TypeVar("Model")


@section
class Residual(BaseResidual):
    """One stream, to which each branch is added: x + F(x)."""

    is_plain: ClassVar[bool] = True

    def connection(
        self, branch: str, layer: Int[Array, ""], sizes: Mapping[str, int], *, key: PRNGKeyArray
    ) -> Plain:
        return Plain()

    def connect(self, model: Model, sizes: Mapping[str, int], *, key: PRNGKeyArray) -> Model:
        return model  # as every family builds it
