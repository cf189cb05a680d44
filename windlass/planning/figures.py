"""Figures as people read them, each with how wrong it may be."""

import math

_TIMES = (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0), ("days", 86400.0))
_COUNTS = (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))
_BEYOND = {"min": 2.0, "h": 2.0, "days": 2.0}  # 90 s, not 1.5 min


def gib(size: int | float) -> str:
    """Bytes in GiB: 9.1, and what is less than one in two digits."""
    held = size / 2**30
    return f"{held:.1f}" if held >= 1 or held == 0 else f"{held:#.2g}"


def seconds(value: int | float, error: float | None = None) -> str:
    """A time in the largest unit that it has more than one of: 182 ±27 ms."""
    name, size = unit(value)
    return f"{about(value / size, error)} {name}"


def unit(value: int | float) -> tuple[str, float]:
    """What a time is said in, and how many seconds that is."""
    fitting = [one for one in _TIMES if value >= one[1] * _BEYOND.get(one[0], 1.0)]
    return fitting[-1] if fitting else _TIMES[0]


def count(value: int | float, error: float | None = None) -> str:
    """A large number: 45.1 ±6.8k."""
    name, size = next(one for one in reversed(_COUNTS) if value >= one[1] or one[1] == 1.0)
    return f"{about(value / size, error)}{name}"


def counted(number: int, what: str) -> str:
    """So many of something: 1 row, 2 rows."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def share(value: int | float, error: float | None = None) -> str:
    """A share in per cent: 41 ±6%."""
    return f"{about(100 * value, error)}%"


def dollars(value: int | float | None, error: float | None = None) -> str:
    """Money: $3.10 ±0.47; a question mark where the price is not known."""
    if value is None:
        return "?"
    if value < 0.005:
        return "<$0.01"
    return f"${about(value, error, cents=True)}"


def wrong(low: int | float, expected: int | float, high: int | float) -> float:
    """The share by which an expected figure may be off, on the side where that is more."""
    return max(high - expected, expected - low) / expected if expected else 0.0


def about(value: int | float, error: float | None = None, *, cents: bool = False) -> str:
    """A number in two or three digits, and the most that it may be off, in as many decimals."""
    digits = max(0, 2 - _magnitude(value)) if value else 0
    if cents:
        digits = 2 if value < 100 else 0
    elif error is not None:
        least = max(0, 1 - _magnitude(value)) if value else 0
        digits = max(least, min(digits, -_magnitude(value * error))) if value * error else digits
    said, off = f"{value:,.{digits}f}", f"{value * (error or 0):,.{digits}f}"
    return f"{said} ±{off}" if float(off.replace(",", "")) else said


def _magnitude(value: int | float) -> int:
    return math.floor(math.log10(abs(value)))
