"""Packed arrays: dtype, shape and little-endian bytes, so bulk data is never a list."""

from math import prod
from typing import Annotated, Literal

import msgspec

from slipstream.wire.messages.bounds import Count, Several

DType = Literal["int32", "float32", "bool", "uint8", "uint16"]
_ITEM_BYTES: dict[DType, int] = {"int32": 4, "float32": 4, "bool": 1, "uint8": 1, "uint16": 2}
_MAX_SIZE = 2**31 - 1  # size of an axis
COUNTS: tuple[DType, ...] = ("uint8", "uint16", "int32")  # types of numbers from 0, narrowest first


class PackedArray(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An array as it travels: decoded by the receiver without copying its bytes."""

    dtype: DType
    shape: Several[Count]
    data: Annotated[memoryview, msgspec.Meta(max_length=_MAX_SIZE)]

    def __post_init__(self) -> None:
        if any(not 0 <= size <= _MAX_SIZE for size in self.shape):
            raise ValueError(
                f"{self.dtype} array has shape {self.shape}, each size must be from 0 to "
                f"{_MAX_SIZE}"
            )
        want_bytes = prod(self.shape) * _ITEM_BYTES[self.dtype]
        if self.data.nbytes != want_bytes:
            raise ValueError(
                f"{self.dtype} array of shape {self.shape} needs {want_bytes} bytes, "
                f"got {self.data.nbytes}"
            )


def narrowest(largest: int) -> DType:
    """Return the narrowest type that holds all numbers from 0 to ``largest``."""
    if largest < 1 << 8:
        return "uint8"
    return "uint16" if largest < 1 << 16 else "int32"
