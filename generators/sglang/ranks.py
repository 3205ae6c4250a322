"""What all ranks of an engine say, in the process of each."""

from typing import Any


def of_all_ranks(value: int, group: Any) -> list[int]:  # noqa: ANN401 torch's
    """Return the value of every rank of a group, in their order; all of them must ask.

    Raises:
        RuntimeError: a rank is gone, or waits for something else.
    """
    import torch  # in the process of the weights, not in the agent's

    num_ranks = torch.distributed.get_world_size(group)
    if num_ranks == 1:
        return [int(value)]
    mine = torch.tensor([int(value)])
    ranks = [torch.zeros_like(mine) for _ in range(num_ranks)]
    torch.distributed.all_gather(ranks, mine, group=group)
    return [int(rank.item()) for rank in ranks]


def failure_of(rank: int) -> str:
    """Return why an engine failed, where a rank did."""
    return f"rank {rank} of this engine failed: its log has the reason"
