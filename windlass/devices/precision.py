"""Compute precision of a run; weights and optimiser are float32 whatever it is."""

from typing import Literal

from windlass.config import Problem, section
from windlass.devices.chips import Chip
from windlass.errors import UserError


@section
class Precision:
    """The number format of matmuls."""

    # auto: by the device; float16, for GPUs without bfloat16, uses dynamic loss scaling
    compute: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


def problems(precision: Precision, kind: str) -> list[Problem]:
    if precision.compute != "float16" or kind != "tpu":
        return []
    reason = "the matrix units of a TPU do not take it"
    return [("precision.compute", f"is float16; {reason}: bfloat16, float32 or auto would do")]


def resolve(precision: Precision, kind: str, chip: Chip | None) -> str:
    """The dtype to compute in: bfloat16 where the chip has it, else float16, else float32."""
    for key, what in problems(precision, kind):
        raise UserError(f"{key} {what}")
    if precision.compute != "auto":
        return precision.compute
    if kind == "cpu":
        return "float32"
    # A GPU the catalogue does not know is taken for a recent one.
    return "bfloat16" if chip is None or chip.has_bfloat16 else "float16"


def matmul_precision(compute: str, kind: str) -> str | None:
    """JAX's matmul precision; None: the device's default.

    Left to themselves a GPU rounds float32 to 19 bits before it multiplies, and a TPU to 16.
    """
    return "highest" if compute == "float32" and kind != "cpu" else None


def warnings(precision: Precision, kind: str, chip: Chip | None) -> list[str]:
    """Warnings of a choice that a user may regret."""
    dtype = precision.compute
    is_fast = kind != "cpu" and (chip is None or chip.has_bfloat16 or dtype in chip.peak)
    if dtype in ("auto", "float32") or is_fast:
        return []
    name = chip.name if chip else f"this {kind.upper()}"
    return [f"precision.compute is {dtype}, and {name} is usually slower in it than in float32"]
