"""The learner's ranks and how the model and the batch are split over them.

Tensor parallelism splits every layer over neighboring ranks, data parallelism splits the batch
over the rest. Megatron keeps its groups in process-wide state: one topology per process.
"""

import math
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed.distributed_c10d import Store

from slipstream.learner.model import device
from slipstream.wire.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This rank's place. Ranks are numbered with the tensor-parallel rank running fastest."""

    rank: int
    world_size: int
    tensor_parallel: int
    tensor_parallel_rank: int
    data_parallel: int
    data_parallel_rank: int
    tensor_group: dist.ProcessGroup  # ranks that hold the shards of one model replica
    data_group: dist.ProcessGroup  # ranks that hold the same shard of different replicas


def init_topology(
    *,
    rank: int,
    world_size: int,
    tensor_parallel: int,
    store: Store,
    seed: int,
    timeout_s: float,
    local_rank: int | None = None,
) -> Topology:
    """Join the learner's other ranks and return this rank's place; all ranks call this.

    ``local_rank`` is its place among the ranks of its host, which chooses its GPU;
    None where all are on one host.

    Raises:
        ConfigError: the ranks cannot be split into groups of ``tensor_parallel``.
    """
    if tensor_parallel < 1 or world_size % tensor_parallel:
        raise ConfigError(
            "learner.ranks must be a multiple of learner.tensor_parallel, "
            f"got {world_size} and {tensor_parallel}"
        )
    device.select(rank if local_rank is None else local_rank)
    dist.init_process_group(
        device.backend(),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    model_parallel_cuda_manual_seed(seed)
    return Topology(
        rank=rank,
        world_size=world_size,
        tensor_parallel=tensor_parallel,
        tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        data_parallel=parallel_state.get_data_parallel_world_size(),
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(),
    )


def destroy_topology() -> None:
    """Leave all process groups; does nothing if this process is in none."""
    if not dist.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
