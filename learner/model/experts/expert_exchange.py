"""Way of rows to the ranks of their experts, and back.

Shapes: M rows; H hidden size; R ranks that share all experts, E experts of each rank.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor

from slipstream.learner.model.experts.expert_places import Places


@dataclass(frozen=True, slots=True)
class Exchange:
    """Numbers of rows that ranks send each other in a layer, known to the host."""

    group: dist.ProcessGroup
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    arrived: Places | None  # rows in the order of this rank's experts; None if it has one
    ends: Tensor  # [E] int32, rows up to the end of each of this rank's experts

    @classmethod
    def of(cls, ends: Tensor, group: dist.ProcessGroup) -> "Exchange":
        """Tell the ranks what comes; the host waits for the device once.

        Args:
            ends: [R * E] int32, rows up to the end of each expert of all ranks, in their order.
            group: the R ranks.
        """
        leaving = ends.diff(prepend=ends.new_zeros(1)).view(group.size(), -1)  # [R, E]
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=group)
        sent, received = torch.stack([leaving.sum(1), coming.sum(1)]).tolist()
        count = coming.size(1)
        arrived = None
        if count > 1:
            experts = torch.arange(count, device=ends.device).repeat(group.size())
            of_rows = experts.repeat_interleave(coming.flatten(), output_size=sum(received))
            arrived = Places.of(of_rows.view(-1, 1), count)
        return cls(group, sent, received, arrived, coming.sum(0).cumsum(0).int())

    def there(self, rows: Tensor) -> Tensor:
        """Send each row to the rank of its expert; return this rank's, sorted by expert."""
        come: Tensor = all_to_all(self.group, rows, self.received, self.sent)
        return come if self.arrived is None else self.arrived.taken(come)

    def back(self, rows: Tensor) -> Tensor:
        """Send each row to the rank of its token; return this rank's, in their first order."""
        if self.arrived is not None:
            rows = self.arrived.summed(rows)
        returned: Tensor = all_to_all(self.group, rows, self.sent, self.received)
        return returned
