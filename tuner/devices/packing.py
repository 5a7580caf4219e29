"""Kernel arguments as C expects them: an array of pointers to 8-byte slots, made once and written again each launch."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

_MASKS = {"ptr": 2**64 - 1, "i64": 2**64 - 1, "i32": 2**32 - 1}


class ArgumentBlock:
    """The `void**` of one launch. The callee copies the values, so one block serves every launch of a step.

    All targets are little-endian, so a 4-byte value is the low half of its 8-byte slot.
    """

    def __init__(self, count: int) -> None:
        """Make room for `count` arguments."""
        self._slots = (ctypes.c_uint64 * max(count, 1))()
        start = ctypes.addressof(self._slots)
        self._pointers = (ctypes.c_void_p * max(count, 1))(*(start + 8 * i for i in range(count)))
        self.count = count
        self.address = ctypes.addressof(self._pointers)

    def write(self, values: Sequence[tuple[str, int | float]]) -> None:
        """Write (`ptr`|`i32`|`i64`|`f32`, value) pairs, in argument order.

        Raises:
            ValueError: The number of values is not the number of arguments.
        """
        if len(values) != self.count:
            raise ValueError(f"{len(values)} values for {self.count} arguments")
        slots = self._slots
        for i, (ctype, value) in enumerate(values):
            mask = _MASKS.get(ctype)
            slots[i] = _float_bits(value) if mask is None else int(value) & mask

    def words(self) -> tuple[int, ...]:
        """The slots as they stand."""
        return tuple(self._slots[: self.count])


def _float_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
