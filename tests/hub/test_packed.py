"""Codes of a few bits take as many bits in a file, and come back."""

import numpy as np
import pytest

from windlass.hub import packed


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_are_packed_at_their_width_and_come_back(bits, monkeypatch):
    monkeypatch.setattr(packed, "TOGETHER", 64)
    rng = np.random.default_rng(bits)
    for count in (0, 1, 7, 64, 1000):
        codes = rng.integers(1 << bits, size=count).astype(np.uint8)
        small = packed.pack(codes, bits)
        assert small.nbytes == packed.size(count, bits) == -(-count * bits // 8)
        assert np.array_equal(packed.unpack(small, bits, count, np.uint8), codes)


def test_the_lowest_bit_of_a_code_is_the_first_of_the_stream():
    codes = np.array([[1, 2, 3], [4, 5, 6]], np.uint8)
    number = sum(code << 3 * place for place, code in enumerate(codes.reshape(-1).tolist()))
    assert packed.pack(codes, 3).tobytes() == number.to_bytes(3, "little")


def test_a_code_that_needs_more_bits_is_refused():
    with pytest.raises(ValueError, match="codes from 0 to 4 do not fit in 2 bits"):
        packed.pack(np.array([0, 4], np.uint8), 2)
