"""The number format a run computes in; weights and optimiser are float32 whatever it is."""

from typing import Literal

from windlass.config import Problem, section
from windlass.devices.chips import Chip
from windlass.errors import UserError


@section
class Precision:
    """What matrices are multiplied in."""

    compute: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: by the device


def problems(precision: Precision, kind: str) -> list[Problem]:
    if precision.compute != "float16":
        return []
    # float16 ends at 6e-8, where many gradients lie; bfloat16 has the range of float32.
    reason = "without loss scaling, which is not done here, small gradients become zero in it"
    if kind == "tpu":
        reason = "the matrix units of a TPU do not take it"
    return [("precision.compute", f"is float16; {reason}: bfloat16, float32 or auto would do")]


def resolve(precision: Precision, kind: str, chip: Chip | None) -> str:
    """The format to compute in: bfloat16 where the chip has it, else float32."""
    for key, what in problems(precision, kind):
        raise UserError(f"{key} {what}")
    if precision.compute != "auto":
        return precision.compute
    # A GPU the catalogue does not know is taken for a recent one.
    return "bfloat16" if kind == "tpu" or (kind == "gpu" and _fast(kind, chip)) else "float32"


def products(compute: str, kind: str) -> str | None:
    """How exactly matrices are multiplied, as JAX says it; None: as the device does by itself.

    Left to themselves a GPU rounds float32 to 19 bits before it multiplies, and a TPU to 16.
    """
    return "highest" if compute == "float32" and kind != "cpu" else None


def warnings(precision: Precision, kind: str, chip: Chip | None) -> list[str]:
    """What the user chose and may regret."""
    if precision.compute != "bfloat16" or _fast(kind, chip):
        return []
    name = chip.name if chip else f"this {kind.upper()}"
    return [f"precision.compute is bfloat16, and {name} is usually slower in it than in float32"]


def _fast(kind: str, chip: Chip | None) -> bool:
    return kind != "cpu" and (chip is None or chip.has_bfloat16)
