"""Converts Megatron's parameters to Hugging Face tensors, and back.

A rank that publishes copies each of its parameters once, directly to its place in the Hugging Face
tensors: nothing is gathered, and nothing has a second copy.

Shapes: H query heads, G key and value heads (query groups), D channels per head, F size of the
feed-forward layer, E size of the hidden state. Functions take the whole model's sizes or one
tensor-parallel rank's share of them, since ranks hold whole query groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from slipstream.wire.models.families.tables import Parameter
from slipstream.wire.models.fp8 import BLOCK, LARGEST

_ROWS = 32 * BLOCK  # rows that are quantized at a time: several float32 copies of them
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the whole model that do not follow from a fused parameter."""

    num_query_groups: int  # G
    queries_per_group: int  # H / G
    head_dim: int  # D


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a Megatron parameter.

    ``dim`` is the dimension that tensor parallelism splits, None if every rank holds it all.
    """

    parameter: Parameter
    tensor: Tensor
    dim: int | None = None
    rank: int = 0
    ranks: int = 1


class ShardFacts(msgspec.Struct, frozen=True):
    """A part of a parameter that another rank holds."""

    name: str  # name in the whole model
    shape: tuple[int, ...]
    dim: int | None
    rank: int  # number among the ranks that split the parameter
    ranks: int

    def shard(self, parameter: Parameter, tensor: Tensor) -> Shard:
        """Return the part with this tensor."""
        return Shard(parameter, tensor, self.dim, self.rank, self.ranks)


def fuse_qkv(query: Tensor, key: Tensor, value: Tensor, *, num_groups: int) -> Tensor:
    """Return the fused projection: for each group its H/G query heads, its key, its value.

    Args:
        query: [H * D, ...].
        key: [G * D, ...].
        value: [G * D, ...].
        num_groups: G.

    Returns:
        [(H + 2G) * D, ...].
    """
    rest = query.shape[1:]
    by_group = [part.reshape(num_groups, -1, *rest) for part in (query, key, value)]
    return torch.cat(by_group, dim=1).reshape(-1, *rest)


def fuse_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Return the fused projection [2F, E] of gate [F, E] and up [F, E]."""
    return torch.cat([gate, up])


def write_shard(shard: Shard, wholes: Sequence[Tensor], geometry: Geometry) -> None:
    """Copy a shard to its place in the whole tensors, which may be of another type or device.

    ``wholes`` are the tensors that ``shard.parameter`` names, in its order.
    """
    for place, part in zip(places_of(shard, wholes), _parts_of(shard, geometry), strict=True):
        if shard.parameter.kind == "vocab":  # rows are padded at the end; maybe all of them
            place.copy_(part[: len(place)])
        else:
            _copy(place.view(part.shape), part)


def write_in_fp8(
    shard: Shard, wholes: Sequence[Tensor], scales: Sequence[Tensor], geometry: Geometry
) -> None:
    """Copy a shard of matrices in fp8, quantized on its device, and the scales of its blocks.

    Every rank's part must have whole blocks (wire/models/fp8.py).
    """
    places = zip(places_of(shard, wholes), places_of(shard, scales), strict=True)
    for (place, scale), part in zip(places, _parts_of(shard, geometry), strict=True):
        numbers, of_blocks = in_fp8(part.reshape(place.shape))
        _copy(place, numbers)
        _copy(scale, of_blocks)


def places_of(shard: Shard, wholes: Sequence[Tensor]) -> list[Tensor]:
    """Return the places of a shard's parts in the whole tensors, or in those of their scales."""
    match shard.parameter.kind:
        case "copy":
            return [_part(wholes[0], shard, shard.dim or 0)]
        case "vocab":
            rows = len(shard.tensor)
            return [wholes[0][shard.rank * rows :][:rows]]
        case "gate_up":
            halves = [part for whole in wholes for part in whole.chunk(2 // len(wholes))]
            return [_part(half, shard, 0) for half in halves]
        case "qkv":
            return [_part(whole, shard, 0) for whole in wholes]


def _parts_of(shard: Shard, geometry: Geometry) -> Sequence[Tensor]:
    """Return the parts of a shard, one for each place."""
    tensor = shard.tensor.detach()
    match shard.parameter.kind:
        case "gate_up":
            return tensor.chunk(2)
        case "qkv":
            groups = geometry.num_query_groups // shard.ranks
            sizes = [geometry.queries_per_group * geometry.head_dim, *[geometry.head_dim] * 2]
            return torch.split(tensor.view(groups, sum(sizes), *tensor.shape[1:]), sizes, dim=1)
        case _:
            return [tensor]


def in_fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix [R, C] in e4m3 and the scales of its blocks, [R/128, C/128] rounded up.

    The largest number of a block becomes the largest of e4m3. A block of zeros, or of numbers so
    small that its scale would be none, has the scale 1.
    """
    numbers = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
    scales = [
        _rows_in_fp8(part, rows)
        for part, rows in zip(torch.split(matrix, _ROWS), torch.split(numbers, _ROWS), strict=True)
    ]
    return numbers, torch.cat(scales)


def _rows_in_fp8(matrix: Tensor, numbers: Tensor) -> Tensor:
    """Write rows in e4m3 and return the scales of their blocks."""
    rows, columns = matrix.shape
    padded = F.pad(matrix, (0, -columns % BLOCK, 0, -rows % BLOCK)).float()
    blocks = padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK)
    most = blocks.abs().amax(dim=(1, 3))
    scales = torch.where(most > LARGEST * _SMALLEST, most / LARGEST, 1.0)
    scaled = (blocks / scales[:, None, :, None]).clamp_(-LARGEST, LARGEST)
    numbers.copy_(scaled.view(padded.shape)[:rows, :columns])
    return scales


def _copy(part: Tensor, tensor: Tensor) -> None:
    """Copy a tensor into a part; from a GPU into columns through pinned memory.

    torch itself would use pageable memory for a target that is not contiguous on the host.
    """
    if tensor.is_cuda and not part.is_contiguous():
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        tensor = staged.copy_(tensor)
    part.copy_(tensor)


def _part(whole: Tensor, shard: Shard, dim: int) -> Tensor:
    if shard.dim is None:
        return whole
    size = whole.shape[dim] // shard.ranks
    return whole.narrow(dim, shard.rank * size, size)


def is_finite(tensor: Tensor) -> Tensor:
    """Return True if a tensor holds no NaN or inf, in one pass without a temporary. Shape []."""
    low, high = torch.aminmax(tensor.detach())
    return low.isfinite() & high.isfinite()
