"""Owners of the parts of a model's parameters, and other ranks' parts, received one by one.

If several ranks hold the same part, the first in every dimension that copies it is the owner and
alone writes or sends it. Only publishing divides the work among all ranks that hold the part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from slipstream.learner.model.collectives import gather_bytes
from slipstream.learner.model.device import device
from slipstream.learner.model.rank_model import TIED_OUTPUT, RankModel, is_expert
from slipstream.learner.model.weights.shards import Shard, ShardFacts
from slipstream.wire.models.families.tables import TOWER, Parameter


def split_of(name: str, parameter: Tensor) -> tuple[int | None, int, int]:
    """Return the dimension that ranks split, this rank's number among them, and their number.

    A dimension of None means that every rank holds the whole parameter.
    """
    if is_expert(name):
        ranks = parallel_state.get_expert_tensor_parallel_world_size()
        rank = parallel_state.get_expert_tensor_parallel_rank()
    else:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
    if ranks == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return None, 0, 1
    dim: int = parameter.partition_dim  # type: ignore[attr-defined]  # set together with the mark
    return dim, rank, ranks


def owned_shards(model: RankModel) -> Iterator[tuple[str, Shard]]:
    """Yield the parts of the weights that this rank owns, by name; tied embeddings once."""
    for name, shard in held_shards(model):
        if is_expert(name):
            copy = parallel_state.get_expert_data_parallel_rank()
        else:
            copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        if copy == 0:
            yield name, shard


def held_shards(model: RankModel) -> Iterator[tuple[str, Shard]]:
    """Yield the parts of the weights that this rank has a copy of; tied embeddings once.

    A vision tower that is not trained is left out: engines and exports have it from the folder.
    Only the first tensor-parallel rank yields parameters that tensor parallelism does not split.
    """
    for name, parameter in model.named_weights():
        if name == TIED_OUTPUT and model.hf_config.tie_word_embeddings:
            continue
        if name.startswith(TOWER) and not model.hf_config.trains_vision:
            continue
        dim, rank, ranks = split_of(name, parameter)
        if is_expert(name):
            first = parallel_state.get_expert_tensor_parallel_rank() == 0
        else:
            first = parallel_state.get_tensor_model_parallel_rank() == 0
        if dim is not None or first:
            yield name, Shard(parameter_of(model, name), parameter, dim, rank, ranks)


def with_adapter(model: RankModel, name: str, shard: Shard) -> Shard:
    """Return a part with its layer's adapter added, as a new tensor."""
    if model.adapters is None:
        return shard
    return replace(shard, tensor=model.adapters.merged(name, shard.tensor))


def parameter_of(model: RankModel, name: str) -> Parameter:
    """Return the Hugging Face tensors that a parameter holds."""
    hf = model.hf_config
    return hf.family.parameter(name, tied_embeddings=hf.tie_word_embeddings)


def facts_of_all(shards: Sequence[tuple[str, Shard]]) -> list[list[ShardFacts]]:
    """Return the facts of all ranks' shards, by rank; all ranks call this with their own."""
    mine = [
        ShardFacts(name, tuple(shard.tensor.shape), shard.dim, shard.rank, shard.ranks)
        for name, shard in shards
    ]
    data = gather_bytes(msgspec.msgpack.encode(mine))
    return [msgspec.msgpack.decode(encoded, type=list[ShardFacts]) for encoded in data]


def exchange(sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]) -> None:
    """Send tensors to ranks and fill tensors from ranks, all in one batch.

    A batch goes through the communicator of all ranks; a message alone would make one for each
    pair. Between two ranks, both sides name their tensors in the same order.
    """
    messages = [
        dist.P2POp(way, tensor.detach(), rank)
        for way, tensors in ((dist.isend, sent), (dist.irecv, received))
        for tensor, rank in tensors
    ]
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()


def place_for(facts: ShardFacts, dtype: torch.dtype) -> Tensor:
    """Return a tensor for a part that is received."""
    return torch.empty(facts.shape, dtype=dtype, device=device())
