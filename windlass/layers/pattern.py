"""Attention pattern: which pairs of queries and keys a kernel computes, and its name in a program.

A program has attention as a function of its own, whose name is all that whoever reads the program
(FLOPs, memory, time) needs to know of it: `Pattern.of(name)` is the pattern again.
"""

import re
from typing import NamedTuple

_NAMES = re.compile(
    r"(causal|bidirectional)_attention(?:_window_(\d+))?(?:_stride_(\d+))?(_sinks)?(_backward)?"
)


class Pattern(NamedTuple):
    """Query i sees the key slots of its document with -right <= i - newest <= left.

    The newest input of slot j is one of the positions j * stride .. (j + 1) * stride - 1 of the
    row: with a stride a slot is a cell of that many positions, seen from its newest input on.
    """

    causal: bool = True
    window: int | None = None  # positions, the own one included; in both directions if not causal
    stride: int = 1  # positions that a key slot stands for
    is_backward: bool = False
    sinks: bool = False  # each head has a learned logit beside those of its keys

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """Reach of a query: positions behind and ahead that it sees, (left, right); None: all."""
        most = None if self.window is None else self.window - 1
        return most, 0 if self.causal else most

    @property
    def name(self) -> str:
        """Name of the kernel in a program."""
        return "".join(
            [
                "causal_attention" if self.causal else "bidirectional_attention",
                "" if self.window is None else f"_window_{self.window}",
                "" if self.stride == 1 else f"_stride_{self.stride}",
                "_sinks" if self.sinks else "",
                "_backward" if self.is_backward else "",
            ]
        )

    @staticmethod
    def of(name: str) -> "Pattern | None":
        """The pattern that a function of a program is named for; None where it is no attention."""
        match = _NAMES.fullmatch(name)
        if match is None:
            return None
        direction, window, stride, sinks, backward = match.groups()
        wide = None if window is None else int(window)
        ends = backward is not None, sinks is not None
        return Pattern(direction == "causal", wide, int(stride or 1), *ends)

    def pairs(self, queries: int, slots: int) -> int:
        """Pairs of a query and a key that a model needs, in a row of one document.

        Kernels compute more of them and do not report how many: all count as those it needs.
        """
        if self.window is None and not self.causal:
            return queries * slots
        # A position sees half of those there are, on average, or a window full but for the ends.
        wide = slots if self.window is None else min(slots, -(-self.window // self.stride))
        behind = queries * wide - self.stride * wide * wide // 2
        both = 2 * behind - queries // self.stride
        return behind if self.causal else min(queries * slots, both)


CAUSAL = Pattern()
