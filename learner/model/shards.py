"""How a rank of the learner writes its share of a version into the memory, in place.

Every rank copies each of its parameters once, straight to where it belongs in the Hugging Face
tensors: nothing is gathered, and there is no second copy of anything. Shapes as in ``names.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.learner.model.names import HfMapping


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the whole model that a fused parameter does not tell by itself."""

    num_query_groups: int  # G
    queries_per_group: int  # H / G
    head_dim: int  # D


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a Megatron parameter.

    ``dim`` is the dimension that tensor parallelism splits, None if every rank holds it all.
    """

    mapping: HfMapping
    tensor: Tensor
    dim: int | None = None
    rank: int = 0
    ranks: int = 1


def write_shard(shard: Shard, wholes: Sequence[Tensor], geometry: Geometry) -> None:
    """Copy a shard to its place in the whole tensors, which may be of another type or device.

    Args:
        shard: what to copy.
        wholes: the tensors that ``shard.mapping`` names, whole, in its order.
        geometry: of the model.
    """
    tensor = shard.tensor.detach()
    match shard.mapping.kind:
        case "copy":
            _part(wholes[0], shard, shard.dim or 0).copy_(tensor)
        case "vocab":  # rows were padded at the end, and an even share may hold nothing but padding
            rows = wholes[0][shard.rank * len(tensor) :][: len(tensor)]
            rows.copy_(tensor[: len(rows)])
        case "gate_up":
            for whole, half in zip(wholes, tensor.chunk(2), strict=True):
                _part(whole, shard, 0).copy_(half)
        case "qkv":
            rest = tensor.shape[1:]
            groups = geometry.num_query_groups // shard.ranks
            sizes = [geometry.queries_per_group * geometry.head_dim, *[geometry.head_dim] * 2]
            fused = tensor.view(groups, sum(sizes), *rest)
            for whole, part in zip(wholes, torch.split(fused, sizes, dim=1), strict=True):
                _part(whole, shard, 0).view(part.shape).copy_(part)


def _part(whole: Tensor, shard: Shard, dim: int) -> Tensor:
    if shard.dim is None:
        return whole
    size = whole.shape[dim] // shard.ranks
    return whole.narrow(dim, shard.rank * size, size)


def is_finite(tensor: Tensor) -> Tensor:
    """Tell whether a tensor holds no NaN and no inf, in one pass without a temporary. Shape []."""
    low, high = torch.aminmax(tensor.detach())
    return low.isfinite() & high.isfinite()
