"""Exchanges between a model's replicas in a step: sums, and the values of all.

Every rank of the learner calls these together; ranks of one replica hold and get the same values.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.algos.diagnostics import Sums, is_maximum
from slipstream.learner.model.device import device
from slipstream.learner.model.topology import Topology


class Replicas:
    """The data-parallel replicas, as seen from one rank."""

    def __init__(self, topology: Topology) -> None:
        """Take the group of ranks that hold the same part of different replicas."""
        self._group = topology.data_group
        self._count = topology.data_parallel
        self.rank = topology.data_parallel_rank  # number of this replica

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum over replicas, on the values' device. Any shape, equal on all ranks."""
        if self._count == 1:
            return values
        total = values.to(device(), copy=True)
        dist.all_reduce(total, group=self._group)
        return total.to(values.device)

    def combined(self, totals: Sums) -> Sums:
        """Return sums and maxima (``slipstream.algos.diagnostics``) over replicas, in float64."""
        names = sorted(totals, key=lambda name: (is_maximum(name), name))  # maxima last
        num_sums = sum(not is_maximum(name) for name in names)
        stacked = torch.stack([totals[name].double() for name in names])
        if self._count > 1:
            dist.all_reduce(stacked[:num_sums], group=self._group)
            if num_sums < len(names):
                highest = stacked[num_sums:]
                dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self._group)
        return dict(zip(names, stacked, strict=True))

    def gathered(self, values: Tensor) -> Tensor:
        """Return the values of all replicas, in their order. Shapes [n] -> [sum of all n]."""
        if self._count == 1:
            return values
        sizes = torch.zeros(self._count, dtype=torch.int64, device=values.device)
        sizes[dist.get_rank(self._group)] = len(values)
        dist.all_reduce(sizes, group=self._group)
        counts = sizes.tolist()
        if max(counts) == 0:
            return values
        padded = values.new_zeros(max(counts))
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
