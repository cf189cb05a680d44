"""Values that enter and leave a scan, by their part in it: constants, carry, slices."""

from typing import NamedTuple

from windlass.analysis.flattened import Operation
from windlass.analysis.primitives import constants_and_carry, sub_jaxprs


class Scan(NamedTuple):
    """Arguments and results of a scan; None: a literal."""

    constants: list[int | None]  # read as they are in all iterations
    initial: list[int | None]
    sliced: list[int | None]  # of which each iteration reads its own slice
    last: list[int]  # of the carry
    stacked: list[int]  # of each iteration its slice

    @classmethod
    def of(cls, operation: Operation) -> "Scan | None":
        """The values of an operation, if it is a scan."""
        if operation.name != "scan":
            return None
        (body,) = sub_jaxprs(operation.equation)
        first, carried = constants_and_carry(body, operation.equation)
        arguments, results = operation.arguments, operation.results
        return cls(
            arguments[:first],
            arguments[first : first + carried],
            arguments[first + carried :],
            results[:carried],
            results[carried:],
        )


def carried(operation: Operation, value: int) -> int | None:
    """The initial carry that a result of a scan is the last of."""
    scan = Scan.of(operation)
    return dict(zip(scan.last, scan.initial, strict=True)).get(value) if scan else None


def stacked(operation: Operation) -> list[int]:
    """Results of a scan that have an axis of its iterations."""
    scan = Scan.of(operation)
    return scan.stacked if scan else []


def is_constant(value: int, operation: Operation) -> bool:
    """Return True if a scan reads a value as it is in all of its iterations, and no slice of it."""
    scan = Scan.of(operation)
    return scan is not None and value not in (*scan.initial, *scan.sliced)


def is_sliced(value: int, operation: Operation) -> bool:
    """Return True if a scan reads a slice of a value in each iteration, and nothing else of it."""
    scan = Scan.of(operation)
    return scan is not None and value not in (*scan.constants, *scan.initial)
