"""Event files: the few protobuf messages that TensorBoard reads of a run, in TFRecord frames.

The package `tensorboard` has generated classes for them, and 48 MB of a server with them, which a
run has no use for. Field numbers are those of its event, summary, tensor, types and hparams protos.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path

VERSION = "brain.Event:2"
_START = 1  # of SessionLog.SessionStatus
_STRING = 7  # of DataType
_STATUS = {True: 1, False: 2}  # of the hparams Status: success, failure
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, reflected
_MASK = 0xA282EAD8

Scalar = bool | int | float | str


def append(path: Path, event: bytes) -> None:
    """Append an event as a TFRecord: its length, the event, and a masked CRC-32C of each."""
    length = struct.pack("<Q", len(event))
    with open(path, "ab") as file:
        file.write(length + _checksum(length) + event + _checksum(event))


def event(wall_time: float, step: int = 0, *, version: str = "", start: bool = False) -> bytes:
    """An `Event` of its own kind: of a new file, or of a session that starts at a step."""
    whole = _field(1, float(wall_time)) + _field(2, step)
    if version:
        whole += _field(3, version)
    return whole + _field(7, _field(1, _START)) if start else whole


def summary(wall_time: float, step: int, *values: bytes) -> bytes:
    """An `Event` that holds a `Summary` of these values."""
    return event(wall_time, step) + _field(5, b"".join(_field(1, value) for value in values))


def scalar(tag: str, number: int | float) -> bytes:
    """A `Summary.Value` that is a point of a curve."""
    return _field(1, tag) + _key(2, 5) + _single(number)


def text(tag: str, markdown: str) -> bytes:
    """A `Summary.Value` that the text plugin shows as Markdown."""
    tensor = _field(1, _STRING) + _field(8, markdown)
    return _field(1, tag) + _field(8, tensor) + _field(9, _plugin("text"))


def hparams_start(values: Mapping[str, Scalar], wall_time: float) -> bytes:
    """A `Summary.Value` with the hyper-parameters of a run, for the HParams plugin."""
    pairs = (_field(1, name) + _field(2, _value(value)) for name, value in values.items())
    info = b"".join(_field(1, pair) for pair in pairs) + _field(5, float(wall_time))
    return _hparams("_hparams_/session_start_info", _field(3, info))


def hparams_end(is_finished: bool, wall_time: float) -> bytes:
    """A `Summary.Value` with the end of a run, for the HParams plugin."""
    info = _field(1, _STATUS[is_finished]) + _field(2, float(wall_time))
    return _hparams("_hparams_/session_end_info", _field(4, info))


def _hparams(tag: str, data: bytes) -> bytes:
    return _field(1, tag) + _field(9, _plugin("hparams", data))


def _plugin(name: str, content: bytes = b"") -> bytes:
    """A `SummaryMetadata` that says which plugin reads a value."""
    return _field(1, _field(1, name) + _field(2, content))


def _value(value: Scalar) -> bytes:
    """A `google.protobuf.Value`."""
    if isinstance(value, bool):
        return _field(4, int(value))
    return _field(3, value) if isinstance(value, str) else _field(2, float(value))


def _field(number: int, value: int | float | str | bytes) -> bytes:
    """A field of a message: a varint, a double, or bytes with their length before them."""
    if isinstance(value, int):
        return _key(number, 0) + _varint(value)
    if isinstance(value, float):
        return _key(number, 1) + struct.pack("<d", value)
    content = value.encode(errors="replace") if isinstance(value, str) else value
    return _key(number, 2) + _varint(len(content)) + content


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(number: int) -> bytes:
    number &= 2**64 - 1  # a negative number is its two's complement
    groups = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


def _single(number: int | float) -> bytes:
    """A number in float32; infinite where it is too large."""
    try:
        return struct.pack("<f", float(number))
    except OverflowError:
        return struct.pack("<f", math.inf if number > 0 else -math.inf)


def _table() -> list[int]:
    table = []
    for remainder in range(256):
        for _ in range(8):
            remainder = remainder >> 1 ^ (_POLYNOMIAL if remainder & 1 else 0)
        table.append(remainder)
    return table


_TABLE = _table()


def _checksum(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)
