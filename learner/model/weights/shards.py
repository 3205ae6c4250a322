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
from torch import Tensor

from slipstream.wire.models.families.tables import Parameter


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
    tensor = shard.tensor.detach()
    match shard.parameter.kind:
        case "copy":
            _copy(_part(wholes[0], shard, shard.dim or 0), tensor)
        case "vocab":  # rows are padded at the end; a share may be padding only
            rows = wholes[0][shard.rank * len(tensor) :][: len(tensor)]
            rows.copy_(tensor[: len(rows)])
        case "gate_up":
            parts = [part for whole in wholes for part in whole.chunk(2 // len(wholes))]
            for whole, half in zip(parts, tensor.chunk(2), strict=True):
                _part(whole, shard, 0).copy_(half)
        case "qkv":
            rest = tensor.shape[1:]
            groups = geometry.num_query_groups // shard.ranks
            sizes = [geometry.queries_per_group * geometry.head_dim, *[geometry.head_dim] * 2]
            fused = tensor.view(groups, sum(sizes), *rest)
            for whole, part in zip(wholes, torch.split(fused, sizes, dim=1), strict=True):
                _part(whole, shard, 0).view(part.shape).copy_(part)


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
