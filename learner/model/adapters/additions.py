"""Additions of adapters to the outputs of Megatron's layers (Hu et al., arXiv:2106.09685).

An adapter adds s B A x to the output W x of a layer whose weight W does not change. Megatron's
fused layers have one pair of A and B for each tensor that Hugging Face's model has there, as PEFT
has them, and their outputs are fused as the weights are. Each expert has pairs of its own.

A layer that splits its output over tensor-parallel ranks splits B by rows, and has A whole; a layer
that splits its input splits A by columns, and has B whole. Ranks exchange the r numbers per token
between the two. So every gradient is complete on each rank; with sequence parallelism, the gradient
of a whole matrix is the sum over ranks, which Megatron computes for parameters that have its mark.
Ranks that divide an expert see all of its tokens, and sum the gradients of whole matrices alone.

Shapes: r rank, I size of the layer's input and O of one of its outputs, in the whole model or in a
rank's share; S tokens of this rank between layers, T after they were gathered; M rows of tokens,
sorted by expert; E experts of a rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the usual name
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from slipstream.learner.model.experts.grouped_products import grouped_linear
from slipstream.learner.model.megatron_repairs import mark_expert
from slipstream.learner.model.weights.shards import Geometry, fuse
from slipstream.wire.models.families.tables import HfTensor, Parameter


@dataclass(frozen=True, slots=True)
class LayerShare:
    """A layer's tensors in the whole model, and this rank's share of them."""

    parameter: Parameter
    geometry: Geometry  # sizes of the whole model
    dim: int | None  # dimension of the weight that ranks split: 0 splits B and not A, 1 A and not B
    rank: int
    ranks: int

    def share(self, size: int, dim: int) -> slice:
        """Return this rank's slice of a length of the whole model, along a dimension."""
        if dim != self.dim:
            return slice(0, size)
        part = size // self.ranks
        return slice(self.rank * part, (self.rank + 1) * part)

    def rows(self, tensor: HfTensor) -> list[int]:
        """Return this rank's rows of each matrix of a tensor."""
        shares = (self.share(rows, 0) for rows in tensor.blocks(self.geometry.sizes))
        return [share.stop - share.start for share in shares]


class LowRank(torch.nn.Module):
    """A and B of one Hugging Face tensor, or of one of each expert."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        """Take this rank's shares: a [r, I], b [O, r]; of experts [E, r, I] and [E, O, r]."""
        super().__init__()
        self.lora_A = torch.nn.Parameter(a)  # PEFT's names
        self.lora_B = torch.nn.Parameter(b)


class Adapter(torch.nn.Module):
    """The addition to one layer. Its parts are the layer's parts that have an adapter."""

    of_experts = False

    def __init__(
        self,
        place: LayerShare,
        parts: Mapping[int, LowRank],
        *,
        scale: float,
        sequence_parallel: bool,
    ) -> None:
        """Take the parts by position in the layer."""
        super().__init__()
        self.place = place
        self.by_position = dict(parts)
        self.parts = torch.nn.ModuleList(parts.values())  # registers their parameters
        self.is_on = True
        self._rows = [place.rows(tensor) for tensor in place.parameter.tensors]
        self._scale = scale
        self._sequence_parallel = sequence_parallel
        for part in parts.values():
            for parameter, dim in ((part.lora_A, 1), (part.lora_B, 0)):
                self._mark(parameter, dim)

    def _mark(self, parameter: torch.nn.Parameter, dim: int) -> None:
        """Give a parameter Megatron's marks; ``dim`` is the one in which it may be split."""
        if self.place.dim == dim:
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dim, 1)
            return
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        parameter.sequence_parallel = self._sequence_parallel  # type: ignore[attr-defined]  # a mark

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Return the addition to the layer's output. [S, 1, I] -> [T or S, 1, sum of O]."""
        return self._added(hidden, F.linear)

    def _added(self, hidden: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        parts = self.by_position
        down = torch.cat([self._of_all(part.lora_A, 1) for part in parts.values()], dim=-2)
        low = self._exchanged(product(hidden, down)).chunk(len(parts), dim=-1)
        up = {
            at: product(part_low, self._of_all(part.lora_B, 0)) * self._scale
            for (at, part), part_low in zip(parts.items(), low, strict=True)
        }
        first = next(iter(up.values()))
        return self._fused(
            [
                up[at] if at in up else first.new_zeros(*first.shape[:-1], sum(rows))
                for at, rows in enumerate(self._rows)
            ],
            dim=-1,
        )

    def _of_all(self, parameter: Tensor, dim: int) -> Tensor:  # noqa: ARG002 - of experts
        """Return a parameter whose gradient is that of all ranks; ``dim`` as in ``_mark``."""
        return parameter

    def _exchanged(self, low: Tensor) -> Tensor:
        """Return the input of B, exchanged between ranks. Shapes [S or T, 1, n r]."""
        found: Any = low  # megatron is untyped
        if self.place.dim == 0 and self._sequence_parallel:
            found = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        elif self.place.dim == 0:
            found = copy_to_tensor_model_parallel_region(low)
        elif self.place.dim == 1 and self._sequence_parallel:
            found = reduce_scatter_to_sequence_parallel_region(low)
        elif self.place.dim == 1:
            found = reduce_from_tensor_model_parallel_region(low)
        exchanged: Tensor = found
        return exchanged

    @torch.no_grad()
    def merged(self, weight: Tensor, expert: int | None = None) -> Tensor:
        """Return the layer's weight [sum of O, I] with the addition, in its type.

        ``expert`` is its number among this rank's experts.
        """
        changes = []
        for at, rows in enumerate(self._rows):
            part = self.by_position.get(at)
            if part is None:
                changes.append(weight.new_zeros(sum(rows), weight.shape[1], dtype=torch.float32))
                continue
            pair = part.lora_A, part.lora_B
            a, b = pair if expert is None else (matrices[expert] for matrices in pair)
            changes.append(b.float() @ a.float() * self._scale)
        return (weight.float() + self._fused(changes, dim=0)).to(weight.dtype)

    def _fused(self, parts: list[Tensor], *, dim: int) -> Tensor:
        """Return outputs of the layer's parts along a dimension, fused as in the layer."""
        if self.place.parameter.kind == "copy":
            return parts[0]
        pairs = zip(parts, self._rows, strict=True)
        along = [block for part, rows in pairs for block in torch.split(part.movedim(dim, 0), rows)]
        groups = self.place.geometry.num_groups(self.place.parameter.kind, self.place.ranks)
        return fuse(*along, num_groups=groups).movedim(0, dim)


class _OfAllParts(torch.autograd.Function):
    """A parameter of all ranks that divide an expert: its gradient is the sum of theirs.

    Megatron's function for it loses the sum where the gradient is not contiguous.
    """

    @override
    @staticmethod
    def forward(_ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @override
    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous()
        dist.all_reduce(total, group=parallel_state.get_expert_tensor_parallel_group())
        return total


class ExpertAdapter(Adapter):
    """The addition to one product of each expert of a rank."""

    of_experts = True

    @override
    def _mark(self, parameter: torch.nn.Parameter, dim: int) -> None:
        mark_expert(parameter)
        # Every rank counts its own in norms of gradients; copies on ranks that divide an expert
        # are counted once.
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dim + 1, 1)
        parameter.shared = self.place.dim == 1 - dim and self.place.rank > 0  # type: ignore[attr-defined]  # a mark

    @override
    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:  # type: ignore[override]  # other rows
        """Return the addition to the product of each row's expert. [M, I] -> [M, sum of O].

        Args:
            rows: [M, I].
            ends: [E] int32, the number of rows up to the end of each expert.
        """
        return self._added(
            rows, lambda inputs, weight: grouped_linear(inputs.contiguous(), weight, ends)
        )

    @override
    def _of_all(self, parameter: Tensor, dim: int) -> Tensor:
        if self.place.dim != 1 - dim:
            return parameter
        of_all: Tensor = _OfAllParts.apply(parameter)  # type: ignore[no-untyped-call]  # of torch
        return of_all

    @override
    def _exchanged(self, low: Tensor) -> Tensor:
        """Return the input: a token's rows are on all ranks that divide an expert."""
        return low
