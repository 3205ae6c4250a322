"""Whether safetensors files are whole, told from their headers without reading a tensor."""

import os
from pathlib import Path

import msgspec

from slipstream.wire.errors import EngineError

_LENGTH_BYTES = 8  # of the header's own length, little-endian, at the start of a file


class _Entry(msgspec.Struct, frozen=True):
    data_offsets: tuple[int, int] = (0, 0)  # the entry __metadata__ has none


def check_weight_files(folder: Path) -> None:
    """Check that a folder holds safetensors files and that each is as long as its header says.

    Raises:
        EngineError: there is none, or one of them cannot be read, is cut off or goes on.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise EngineError(f"{folder} holds no safetensors file to load weights from")
    for path in paths:
        try:
            size, expected = _sizes(path)
        except (OSError, msgspec.DecodeError) as error:
            raise EngineError(f"cannot read the weights in {path}: {error}") from error
        if size != expected:
            raise EngineError(f"{path} has {size} bytes, its header says {expected}")


def _sizes(path: Path) -> tuple[int, int]:
    """Return how many bytes a file has and how many it must have."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > size:  # read no more than there is
            return size, _LENGTH_BYTES + length
        entries = msgspec.json.decode(file.read(length), type=dict[str, _Entry])
    data = max((entry.data_offsets[1] for entry in entries.values()), default=0)
    return size, _LENGTH_BYTES + length + data
