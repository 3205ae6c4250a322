"""Packed arrays hold as many bytes as their type and shape need."""

import pytest

from slipstream.wire.messages.arrays import DType, PackedArray, narrowest


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(0, "uint8"), (255, "uint8"), (256, "uint16"), (65535, "uint16"), (65536, "int32")],
)
def test_numbers_are_of_the_narrowest_type_that_holds_them(largest: int, dtype: DType):
    assert narrowest(largest) == dtype


@pytest.mark.parametrize(("dtype", "num_bytes"), [("uint8", 6), ("uint16", 12), ("int32", 24)])
def test_the_bytes_fit_the_shape(dtype: DType, num_bytes: int):
    assert PackedArray(dtype, (2, 3), memoryview(bytes(num_bytes))).data.nbytes == num_bytes
    with pytest.raises(ValueError, match=f"needs {num_bytes} bytes, got {num_bytes - 1}"):
        PackedArray(dtype, (2, 3), memoryview(bytes(num_bytes - 1)))


@pytest.mark.parametrize("shape", [(5, 2**63, 0), (-1, -4), (0, 2**31)])
def test_no_axis_is_longer_than_arrays_can_be_where_another_is_empty(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match="each size must be from 0 to 2147483647"):
        PackedArray("uint8", shape, memoryview(b""))
