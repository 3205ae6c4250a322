"""Bits of a version's tensors as arrays of unsigned integers, for hashing.

numpy has no bfloat16, and a process that only compares does not need torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.weightbus.version.disk import data_start
from slipstream.wire.messages.manifest import ITEM_BYTES, WeightManifest
from slipstream.wire.models.model_files import WEIGHTS

if TYPE_CHECKING:
    from torch import Tensor

Bits: TypeAlias = NDArray[Any]  # unsigned integers of the tensor's item size and shape
Tensors: TypeAlias = "Mapping[str, Tensor] | Mapping[str, Bits]"
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits_of(tensor: "Tensor | Bits") -> Bits:
    """Return the bits of a tensor in its shape; shared if it is contiguous on the host."""
    if isinstance(tensor, np.ndarray):
        return tensor
    import torch  # the caller has imported it

    flat = tensor.detach().cpu().contiguous()
    data = flat.view(-1).view(torch.uint8).numpy()
    return data.view(_WORDS[flat.element_size()]).reshape(tuple(flat.shape))


def bits_in(memory: NDArray[np.uint8], manifest: WeightManifest) -> dict[str, Bits]:
    """Return each tensor of a version as a view of its bytes, [manifest.num_bytes], by name."""
    views: dict[str, Bits] = {}
    at = 0
    for spec in manifest.tensors:
        part = memory[at : at + spec.num_bytes]
        views[spec.name] = part.view(_WORDS[ITEM_BYTES[spec.dtype]]).reshape(spec.shape)
        at += spec.num_bytes
    return views


def bits_in_folder(folder: Path, manifest: WeightManifest) -> dict[str, Bits]:
    """Return each tensor of a version in a folder, by name; mapped, not read or changed.

    Raises:
        PublishError: the file is missing, or holds other tensors.
    """
    start = data_start(folder, manifest)
    if not manifest.num_bytes:
        return bits_in(np.empty(0, np.uint8), manifest)
    # Copied on write, as torch.from_numpy warns of memory that is read-only.
    mapped = np.memmap(folder / WEIGHTS, np.uint8, "c", start, (manifest.num_bytes,))
    return bits_in(mapped, manifest)
