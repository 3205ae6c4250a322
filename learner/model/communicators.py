"""Communicators of a learner's ranks, opened before the first step, one after the other.

NCCL connects a group in its first collective and two stages in their first message, for as long as
that takes. Here each connects at the start, by passing a number, within a time; and a rank that
waits says for what and for whom.
"""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import p2p_communication
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # not in torch's stubs

from slipstream.learner.model import device
from slipstream.learner.model.arrivals import waiting
from slipstream.weightbus.net.threads import in_time

_SHOWN = 4  # ranks that a group is named by


def groups_in_use(
    replica_group: dist.ProcessGroup, *, has_experts: bool
) -> dict[str, dist.ProcessGroup]:
    """Return the groups of several ranks with this one that exchange tensors in a run, by name.

    The order is that in which all ranks open them.
    """
    state = parallel_state
    found = {
        "all ranks": dist.group.WORLD,
        "tensor parallelism": state.get_tensor_model_parallel_group(),
        "context parallelism": state.get_context_parallel_group(),
        "data parallelism": state.get_data_parallel_group(),
        "copies of the weights": state.get_data_parallel_group(with_context_parallel=True),
        "pipeline stages": state.get_pipeline_model_parallel_group(),
        "one copy of the model": state.get_model_parallel_group(),
        "tied embeddings": state.get_embedding_group(check_initialized=False),
        "one replica": replica_group,
        "distributed optimizers": state.get_intra_distributed_optimizer_instance_group(),
    }
    one_copy = state.get_expert_tensor_model_pipeline_parallel_group
    is_019 = "with_egtp_remat" in signature(one_copy).parameters  # there optimizers use another one
    of_experts = {
        "experts": state.get_expert_tensor_and_model_parallel_group(),
        "one copy of the experts": one_copy(with_egtp_remat=True) if is_019 else one_copy(),
        "copies of experts": state.get_expert_data_parallel_group(),
        "parts of an expert": state.get_expert_tensor_parallel_group(),  # gradients of its adapters
    }
    return {
        name: group
        for name, group in (found | (of_experts if has_experts else {})).items()
        if isinstance(group, dist.ProcessGroup) and group.size() > 1
    }


def open_all(
    groups: Mapping[str, dist.ProcessGroup],
    store: Store,
    rank: int,
    *,
    chunks: int,
    timeout_s: float,
) -> None:
    """Connect the ranks of each group, and neighboring pipeline stages; all ranks call this.

    Args:
        groups: Groups of this rank by name, in the same order on all ranks.
        store: Store of all ranks, by a client that nothing else waits with.
        rank: This rank.
        chunks: Chunks of layers on each stage: with several, the last one sends to the first.
        timeout_s: Limit for each group, seconds.

    Raises:
        RuntimeError: ranks did not come in time; the message names the group and the ranks.
    """
    numbers = torch.ones(4, dtype=torch.int32, device=device.device())  # device of this thread

    def connect(what: str, group: dist.ProcessGroup, work: Callable[[], None]) -> None:
        ranks = dist.get_process_group_ranks(group)
        shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
        with waiting(store, f"{what} ({shown})", rank, ranks):
            in_time(partial(_until_done, work, numbers), timeout_s)

    for name, group in groups.items():

        def reduce(group: dist.ProcessGroup = group) -> None:
            dist.all_reduce(numbers, group=group)

        connect(f"the group of {name}", group, reduce)
    stages = parallel_state.get_pipeline_model_parallel_group()
    if stages.size() > 1:
        connect("neighboring stages", stages, lambda: _pass_on(numbers, stages, chunks))


def _until_done(work: Callable[[], None], numbers: Tensor) -> None:
    work()
    numbers.tolist()  # waits for the device


def _pass_on(numbers: Tensor, group: dist.ProcessGroup, chunks: int) -> None:
    """Exchange numbers with the stages before and after, in both directions, as in a step."""
    stage, last = group.rank(), group.size() - 1
    has_previous, has_next = (chunks > 1 or stage != end for end in (0, last))
    sent_back, sent_on, from_previous, from_next = torch.split(numbers, 1)
    works = p2p_communication._p2p_ops(
        tensor_send_prev=sent_back if has_previous else None,
        tensor_recv_prev=from_previous if has_previous else None,
        tensor_send_next=sent_on if has_next else None,
        tensor_recv_next=from_next if has_next else None,
        group=group,
        prev_pipeline_rank=dist.get_global_rank(group, (stage - 1) % group.size()),
        next_pipeline_rank=dist.get_global_rank(group, (stage + 1) % group.size()),
    )
    for work in works.values():
        work.wait()
