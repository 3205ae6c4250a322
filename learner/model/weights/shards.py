"""Converts Megatron's parameters to Hugging Face tensors, and back.

A rank that publishes copies each of its parameters once, directly to its place in the Hugging Face
tensors: nothing is gathered, and nothing has a second copy.

Functions take the whole model's sizes or one tensor-parallel rank's share of them, since ranks hold
whole groups of heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from slipstream.wire.models.families.tables import FusionKind, HfTensor, Parameter, Sizes
from slipstream.wire.models.fp8 import BLOCK, LARGEST

_ROWS = 32 * BLOCK  # rows that are quantized at a time: several float32 copies of them
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the whole model that do not follow from a fused parameter."""

    num_query_groups: int  # G
    num_linear_groups: int = 1  # heads of keys of linear attention
    sizes: Sizes = field(default_factory=dict)

    def num_groups(self, kind: FusionKind, ranks: int = 1) -> int:
        """Return by how many heads the rows of a parameter of a rank are fused."""
        of_all = {"qkv": self.num_query_groups, "delta": self.num_linear_groups}
        return of_all.get(kind, ranks) // ranks


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


def fuse(*parts: Tensor, num_groups: int = 1) -> Tensor:
    """Return matrices fused by the groups of their rows.

    For each of n groups come its rows of every part: a head of keys with its queries and values,
    for example, or with one group simply all parts, one after the other.

    Args:
        parts: [n * R_i, ...] each.
        num_groups: n.

    Returns:
        [n * sum of R_i, ...].
    """
    rest = parts[0].shape[1:]
    by_group = [part.reshape(num_groups, len(part) // num_groups, *rest) for part in parts]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def in_turn(rows: Tensor, count: int) -> list[Tensor]:
    """Return the matrices whose rows follow each other in turn. [n * R, ...] -> n of [R, ...]."""
    return [rows[number::count] for number in range(count)]


def write_shard(shard: Shard, wholes: Sequence[Tensor], geometry: Geometry) -> None:
    """Copy a shard to its place in the whole tensors, which may be of another type or device.

    ``wholes`` are the tensors that ``shard.parameter`` names, in its order.
    """
    places = places_of(shard, wholes, geometry)
    for place, part in zip(places, _parts_of(shard, places, geometry), strict=True):
        if shard.parameter.kind == "vocab":  # rows are padded at the end; maybe all of them
            place.copy_(part[: len(place)])
        else:
            _copy(place.view(part.shape), part)


def read_shard(shard: Shard, wholes: Sequence[Tensor], geometry: Geometry) -> None:
    """Fill a shard, of any kind but the vocabulary, from its place in the whole tensors."""
    places = places_of(shard, wholes, geometry)
    for place, part in zip(places, _parts_of(shard, places, geometry), strict=True):
        part.copy_(place.view(part.shape))


def write_in_fp8(
    shard: Shard, wholes: Sequence[Tensor], scales: Sequence[Tensor], geometry: Geometry
) -> None:
    """Copy a shard of matrices in fp8, quantized on its device, and the scales of its blocks.

    Every rank's part must have whole blocks (wire/models/fp8.py).
    """
    places = places_of(shard, wholes, geometry)
    of_scales = places_of(shard, scales, geometry)
    parts = _parts_of(shard, places, geometry)
    for place, scale, part in zip(places, of_scales, parts, strict=True):
        numbers, of_blocks = in_fp8(part.reshape(place.shape))
        _copy(place, numbers)
        _copy(scale, of_blocks)


def places_of(shard: Shard, wholes: Sequence[Tensor], geometry: Geometry) -> list[Tensor]:
    """Return the places of a shard's parts in the whole tensors, or in those of their scales."""
    match shard.parameter.kind:
        case "copy":
            (tensor,), (whole,) = shard.parameter.tensors, wholes
            return [_part(_matrix(tensor, whole), shard, shard.dim or 0)]
        case "vocab":
            rows = len(shard.tensor)
            return [wholes[0][shard.rank * rows :][:rows]]
        case _:
            pairs = zip(shard.parameter.tensors, wholes, strict=True)
            blocks = (block for pair in pairs for block in _blocks(*pair, geometry))
            return [_part(block, shard, 0) for block in blocks]


def _matrix(tensor: HfTensor, whole: Tensor) -> Tensor:
    """Return the rows and columns of an expert in a tensor that may have all of them."""
    matrix = whole if tensor.expert is None else whole[tensor.expert]
    return matrix.T if tensor.is_transposed else matrix


def _blocks(tensor: HfTensor, whole: Tensor, geometry: Geometry) -> Sequence[Tensor]:
    """Return the matrices that a tensor, or that of its scales, has one below the other."""
    whole = _matrix(tensor, whole)
    if not tensor.below:
        return [whole]
    if tensor.is_interleaved:
        return in_turn(whole, 1 + len(tensor.below))
    rows = tensor.blocks(geometry.sizes)
    return torch.split(whole, [len(whole) * count // sum(rows) for count in rows])


def _parts_of(shard: Shard, places: Sequence[Tensor], geometry: Geometry) -> Sequence[Tensor]:
    """Return the parts of a shard, one for each place."""
    tensor = shard.tensor.detach()
    if shard.parameter.kind in {"copy", "vocab"}:
        return [tensor]
    groups = geometry.num_groups(shard.parameter.kind, shard.ranks if shard.dim is not None else 1)
    sizes = [len(place) // groups for place in places]
    return torch.split(tensor.view(groups, sum(sizes), *tensor.shape[1:]), sizes, dim=1)


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

    torch itself would use pageable memory for a target that is not contiguous on the host. What is
    turned there is turned before, which is several times faster.
    """
    if part.dim() > 1 and part.stride(-1) > part.stride(-2):
        part, tensor = part.mT, tensor.mT.contiguous()
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
