"""What SGLang's weights checker must answer if an engine holds exactly our tensors.

SGLang keeps query, key and value as one tensor, gate and up as another, and pads some with zeros
(wire/files/model_families.py). On a CPU its checksum is the first 8 bytes of sha256 over the raw
bytes (sglang 0.5.23). A GPU uses another function: there the publish record keeps a digest per
engine, to be compared with each other.
"""

import hashlib
from collections.abc import Iterator, Mapping

from torch import Tensor, uint8
from torch.nn.functional import pad

from slipstream.wire.files.model_families import (
    EMBEDDING,
    OUTPUT_LAYER,
    EngineTensor,
    engine_tensor,
)

_ROWS_AT_A_TIME = 256


def expected_checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the checksum of every tensor of an engine with one rank, by the engine's name.

    Args:
        tensors: by Hugging Face name. They are read where they lie.
    """
    fused: dict[str, list[tuple[EngineTensor, Tensor]]] = {}
    for name, tensor in tensors.items():
        place = engine_tensor(name)
        fused.setdefault(place.name, []).append((place, tensor))
    checksums = {}
    for name, pieces in fused.items():
        digest = hashlib.sha256()
        for place, tensor in sorted(pieces, key=lambda piece: piece[0].position):
            for part in _padded(place, tensor):
                flat = part.detach().cpu().contiguous().flatten()
                digest.update(flat.view(uint8).numpy().data)
        checksums[name] = digest.digest()[:8].hex()
    return checksums


def _padded(place: EngineTensor, tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor as SGLang keeps it, in parts; only rows that are padded are copied."""
    rows = -len(tensor) % place.row_multiple
    columns = -tensor.shape[1] % place.column_multiple if place.column_multiple > 1 else 0
    if columns:
        for start in range(0, len(tensor), _ROWS_AT_A_TIME):
            yield pad(tensor[start : start + _ROWS_AT_A_TIME], (0, columns))
    else:
        yield tensor
    if rows:
        yield tensor.new_zeros(rows, *tensor.shape[1:])


def differing(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """Return the names of tensors whose checksums differ or that only one side has.

    A tied output layer may be listed by the engine under its own name as well.
    """
    names = set(expected) | set(found)
    if OUTPUT_LAYER not in expected and found.get(OUTPUT_LAYER) == expected.get(EMBEDDING):
        names.discard(OUTPUT_LAYER)
    return sorted(name for name in names if expected.get(name) != found.get(name))


def digest_of(checksums: dict[str, str]) -> str:
    """Return one digest for all tensors: equal if and only if every checksum is.

    A tied output layer that the engine lists under its own name adds nothing.
    """
    names = sorted(checksums)
    if OUTPUT_LAYER in checksums and checksums[OUTPUT_LAYER] == checksums.get(EMBEDDING):
        names.remove(OUTPUT_LAYER)
    text = "\n".join(f"{name} {checksums[name]}" for name in names)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
