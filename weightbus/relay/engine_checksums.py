"""The answer of SGLang's weights checker if an engine holds exactly our tensors.

SGLang keeps query, key and value as one tensor, gate and up as another, pads some with zeros, and
splits most over its ranks (wire/files/families/). On a CPU its checksum is the first 8
bytes of sha256 over the raw bytes, on a GPU a hash of words (gpu_hash.py; sglang 0.5.23).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

from torch import Tensor, cat, device, uint8
from torch.cuda import is_available
from torch.nn.functional import pad

from slipstream.weightbus.relay.gpu_hash import gpu_hash
from slipstream.wire.files.families.parts import EMBEDDING, OUTPUT_LAYER
from slipstream.wire.files.families.registry import EngineTensor, checksum_name, engine_tensor

_ROWS_AT_A_TIME = 256


class Holder(NamedTuple):
    """Layout of the tensors of an engine: engines of one kind hold the same."""

    device: Literal["cpu", "cuda"] = "cpu"
    num_ranks: int = 1  # that the tensors are split over
    attention_groups: int = 1  # of ranks, each of which holds the whole attention

    def share_of(self, place: EngineTensor, rank: int) -> tuple[int, int]:
        """Return the index of a rank's share of a tensor, and the number of shares."""
        count = self.num_ranks // self.attention_groups if place.of_attention else self.num_ranks
        return rank % count, count


def expected_checksums(tensors: Mapping[str, Tensor], of: Holder | None = None) -> dict[str, str]:
    """Return the checksum of every tensor of an engine, by ``checksum_name``.

    Args:
        tensors: by Hugging Face name. They are read where they lie.
        of: the engine; None for one of one rank on a CPU.
    """
    of = of or Holder()
    fused: dict[str, list[tuple[EngineTensor, Tensor]]] = {}
    for name, tensor in tensors.items():
        place = engine_tensor(name, tensors)
        if of.device != "cpu":  # there no sizes are padded but that of the vocabulary
            vocabulary = place.row_multiple if place.split == "vocabulary" else 1
            place = replace(place, row_multiple=vocabulary, column_multiple=1)
        fused.setdefault(place.name, []).append((place, tensor))
    hashed = host_checksum if of.device == "cpu" else _on_gpu
    return {
        checksum_name(name, rank): hashed(
            part
            for place, tensor in sorted(pieces, key=lambda piece: piece[0].position)
            for part in _share(place, tensor, *of.share_of(place, rank))
        )
        for name, pieces in fused.items()
        for rank in range(of.num_ranks)
    }


def host_checksum(parts: Iterable[Tensor]) -> str:
    """Return SGLang's checksum of a tensor on the host that is these parts, end to end."""
    digest = hashlib.sha256()
    for part in parts:
        flat = part.detach().cpu().contiguous().flatten()
        digest.update(flat.view(uint8).numpy().data)
    return digest.digest()[:8].hex()


def _on_gpu(parts: Iterable[Tensor]) -> str:
    where = device("cuda" if is_available() else "cpu")
    return gpu_hash(cat([part.flatten() for part in parts]), where)


def _share(place: EngineTensor, whole: Tensor, rank: int, num_ranks: int) -> Iterator[Tensor]:
    """Yield a rank's share of a tensor, in parts; only padded rows are copied."""
    for tensor in whole.chunk(place.stacked):
        yield from _share_of_one(place, tensor, rank, num_ranks)


def _share_of_one(
    place: EngineTensor, tensor: Tensor, rank: int, num_ranks: int
) -> Iterator[Tensor]:
    in_rows = num_ranks if place.split in {"rows", "vocabulary"} else 1
    in_columns = num_ranks if place.split == "columns" else 1
    of_each = place.row_multiple * (in_rows if place.split == "rows" else 1)
    rows = _rounded(len(tensor), of_each)
    if rows % in_rows:  # of the vocabulary
        rows = _rounded(len(tensor), of_each * in_rows)
    first, last = (rows // in_rows * edge for edge in _edges(rank, in_rows))
    mine = tensor[first : min(last, len(tensor))]
    if place.column_multiple * in_columns > 1:
        columns = _rounded(tensor.shape[1], place.column_multiple * in_columns)
        left, right = (columns // in_columns * edge for edge in _edges(rank, in_columns))
        for start in range(0, len(mine), _ROWS_AT_A_TIME):
            part = mine[start : start + _ROWS_AT_A_TIME, left:right]
            yield pad(part, (0, right - left - part.shape[1]))
    else:
        yield mine
    if len(mine) < last - first:
        yield tensor.new_zeros(last - first - len(mine), *tensor.shape[1:])


def _edges(rank: int, num_shares: int) -> tuple[int, int]:
    return (rank, rank + 1) if num_shares > 1 else (0, 1)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def differing(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """Return the names of tensors whose checksums differ or that only one side has.

    A tied output layer may be listed by the engine under its own name as well.
    """
    names = set(expected) | (set(found) - _tied(found))
    return sorted(name for name in names if expected.get(name) != found.get(name))


def digest_of(checksums: dict[str, str]) -> str:
    """Return one digest for all tensors: equal if and only if every checksum is.

    A tied output layer that the engine lists under its own name adds nothing.
    """
    names = sorted(set(checksums) - _tied(checksums))
    text = "\n".join(f"{name} {checksums[name]}" for name in names)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _tied(checksums: Mapping[str, str]) -> set[str]:
    """Return the names of output layers that are their rank's embedding."""
    names = [name for name in checksums if name.startswith(OUTPUT_LAYER)]
    pairs = [(name, name.replace(OUTPUT_LAYER, EMBEDDING)) for name in names]
    return {name for name, other in pairs if checksums[name] == checksums.get(other)}
