"""The learner's ranks, and the groups in which they exchange tensors.

Places of ranks are decided in parallel.py. Megatron keeps its groups in process-wide state: one
topology per process.
"""

import math
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed.distributed_c10d import Store

from slipstream.learner.model import device
from slipstream.learner.model.arrivals import waiting
from slipstream.learner.model.communicators import groups_in_use, open_all
from slipstream.learner.parallel import ParallelSizes


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This rank's place. ``ranks_here`` is the number of ranks on each host."""

    rank: int
    world_size: int
    ranks_here: int
    sizes: ParallelSizes
    tensor_parallel_rank: int
    context_parallel_rank: int
    stage: int  # pipeline stage
    data_parallel: int
    data_parallel_rank: int
    tensor_group: dist.ProcessGroup  # ranks that hold the shards of the same layers
    pipeline_group: dist.ProcessGroup  # ranks that hold different layers of one replica
    data_group: dist.ProcessGroup  # ranks that hold the same part of different replicas
    replica_group: dist.ProcessGroup  # ranks that share one replica

    @property
    def leads_replica(self) -> bool:
        """True on the first rank of a replica, which fetches for all of them."""
        return self.tensor_parallel_rank == self.context_parallel_rank == self.stage == 0

    @property
    def replica_leader(self) -> int:
        """The rank that fetches for this replica."""
        return dist.get_global_rank(self.replica_group, 0)

    @property
    def last_stage_rank(self) -> int:
        """The rank of the last pipeline stage that has this rank's shard and tokens."""
        return dist.get_global_rank(self.pipeline_group, self.sizes.pipeline - 1)


def init_topology(
    *,
    rank: int,
    world_size: int,
    store: Store,
    seed: int,
    timeout_s: float,
    sizes: ParallelSizes | None = None,
    ranks_per_node: int = 0,
    has_experts: bool = True,
) -> Topology:
    """Join the learner's other ranks and return this rank's place; all ranks call this.

    ``ranks_per_node`` ranks are on each host, which decides their GPUs; 0: all are on one host.
    Without ``has_experts`` the groups of experts are not opened.

    Raises:
        ConfigError: the sizes do not divide the ranks.
        RuntimeError: ranks did not come in ``timeout_s``; the message names them.
    """
    sizes = sizes or ParallelSizes()
    sizes.check(world_size)
    ranks_here = ranks_per_node or world_size
    device.select(rank % ranks_here)
    timeout = timedelta(seconds=timeout_s)
    asked = store.clone()  # type: ignore[attr-defined]  # a client that waits blocks all its users
    with waiting(asked, "the learner's ranks", rank, range(world_size)):
        dist.init_process_group(
            device.backend(), store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    with waiting(asked, "groups of the learner's ranks", rank, range(world_size)):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            virtual_pipeline_model_parallel_size=sizes.chunks if sizes.chunks > 1 else None,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
        )
        replica_group = _replica_group(sizes, rank, world_size, timeout)
    model_parallel_cuda_manual_seed(seed)
    groups = groups_in_use(replica_group, has_experts=has_experts)
    open_all(groups, asked, rank, chunks=sizes.chunks, timeout_s=timeout_s)
    return Topology(
        rank=rank,
        world_size=world_size,
        ranks_here=ranks_here,
        sizes=sizes,
        tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        context_parallel_rank=parallel_state.get_context_parallel_rank(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        data_parallel=parallel_state.get_data_parallel_world_size(),
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(),
        replica_group=replica_group,
    )


def _replica_group(
    sizes: ParallelSizes, rank: int, world_size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Return the group of this rank's replica; every rank makes all of them."""
    groups = [
        dist.new_group(sizes.ranks_of_replica(replica, world_size), timeout=timeout)
        for replica in range(sizes.replicas(world_size))
    ]
    found: dist.ProcessGroup = groups[sizes.place(rank, world_size).replica]
    return found


def destroy_topology() -> None:
    """Leave all process groups; does nothing if this process is in none."""
    if not dist.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
