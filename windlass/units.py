"""Units: bytes, times, counts, shares and money as people read them, each with its error."""

import math

_TIMES = (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0), ("days", 86400.0))
_BEYOND = {"min": 2.0, "h": 2.0, "days": 2.0}  # 90 s, not 1.5 min


def number(value: int | float) -> str:
    """A measured number, to four digits after the point where that makes sense."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if 0.001 <= abs(value) < 10_000 or value == 0 else f"{value:.4g}"


def counted(number: int, what: str) -> str:
    """A number of things: 1 step, 2 steps."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def count(value: int | float, error: float | None = None) -> str:
    """A large number, measured or estimated with a relative error: 12.3k, 45.1 ±6.8k."""
    name = ""
    for name in ("", "k", "M", "G", "T"):
        if round(value, 1) < 1000 or name == "T":
            break
        value /= 1000
    if error is not None:
        return f"{rounded(value, error)}{name}"
    return f"{value:.{0 if name == '' else 1}f}{name}"


def size(count: int | float) -> str:
    """Bytes in three digits or so: 12.3 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if round(count, 1) < 1024:
            return f"{count:.{0 if unit == 'bytes' else 1}f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def gib(size: int | float) -> str:
    """Bytes in GiB, without the unit: 9.1, and what is less than one in two digits."""
    value = size / 2**30
    return f"{value:.1f}" if value >= 1 or value == 0 else f"{value:#.2g}"


def duration(seconds: int | float) -> str:
    """Elapsed time in its two largest units: 8.2 s, 42 s, 4m10s, 3h05m, 2d04h."""
    if round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    if not minutes:
        return f"{left} s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}m{left:02}s"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02}h" if days else f"{hours}h{minutes:02}m"


def seconds(value: int | float, error: float | None = None) -> str:
    """A time in the largest unit that it has more than one of: 214 ms, 182 ±27 ms."""
    name, size = time_unit(value)
    return f"{rounded(value / size, error)} {name}"


def time_unit(value: int | float) -> tuple[str, float]:
    """The unit of a time in seconds, and how many seconds that unit is."""
    fitting = [one for one in _TIMES if value >= one[1] * _BEYOND.get(one[0], 1.0)]
    return fitting[-1] if fitting else _TIMES[0]


def percent(value: int | float, error: float | None = None) -> str:
    """A share: 41 ±6%."""
    return f"{rounded(100 * value, error)}%"


def dollars(value: int | float | None, error: float | None = None) -> str:
    """Money: $3.10 ±0.47; a question mark where the price is not known."""
    if value is None:
        return "?"
    if value < 0.005:
        return "<$0.01"
    return f"${rounded(value, error, cents=True)}"


def relative_error(low: int | float, expected: int | float, high: int | float) -> float:
    """The share by which an expected figure may be off, on the side where that is more."""
    return max(high - expected, expected - low) / expected if expected else 0.0


def rounded(value: int | float, error: float | None = None, *, cents: bool = False) -> str:
    """A number in two or three digits, and the most that it may be off, in as many decimals."""
    digits = max(0, 2 - _magnitude(value)) if value else 0
    if cents:
        digits = 2 if value < 100 else 0
    elif error is not None:
        least = max(0, 1 - _magnitude(value)) if value else 0
        digits = max(least, min(digits, -_magnitude(value * error))) if value * error else digits
    text, off = f"{value:,.{digits}f}", f"{value * (error or 0):,.{digits}f}"
    return f"{text} ±{off}" if float(off.replace(",", "")) else text


def _magnitude(value: int | float) -> int:
    return math.floor(math.log10(abs(value)))
