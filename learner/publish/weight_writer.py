"""A rank's part of a publish: its parameters, copied to their places in the weights' memory."""

from collections.abc import Callable

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from slipstream.learner.model.hf_weights import geometry_of, hf_shapes, shards_of
from slipstream.learner.model.shards import Shard, is_finite, write_shard
from slipstream.learner.model.topology import Topology
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_views
from slipstream.wire.messages.manifest import TensorSpec


class WeightWriter:
    """Writes versions of one model. Every rank has one; only the first replica's write.

    The others may be on other hosts, and map nothing.
    """

    def __init__(
        self, model: GPTModel, topology: Topology, *, bucket_bytes: int, agree: Callable[[str], str]
    ) -> None:
        """Make the memory on rank 0 and map it on the others that write.

        ``agree`` returns rank 0's text on every rank.
        """
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        specs = [TensorSpec(name, dtype, shape) for name, shape in hf_shapes(model).items()]
        self.layout = plan_layout(specs, bucket_bytes=bucket_bytes)
        slot_bytes = self.layout.num_bytes
        made: SharedSlots | None = None
        if topology.rank == 0:
            made = SharedSlots.make(slot_bytes=slot_bytes, num_slots=NUM_SLOTS)
        self.path = agree(made.path if made is not None else "")
        self._memory = made
        self._shards: list[tuple[str, Shard]] = []
        if topology.data_parallel_rank == 0:
            self._memory = made or SharedSlots.open(
                self.path, slot_bytes=slot_bytes, num_slots=NUM_SLOTS
            )
            self._shards = [
                (name, shard)
                for name, shard in shards_of(model)
                if shard.dim is not None or topology.tensor_parallel_rank == 0
            ]
            if self._shards and self._shards[0][1].tensor.is_cuda:
                self._memory.pin()
        self._geometry = geometry_of(model.hf_config)

    def write(self, slot: int) -> str:
        """Copy this rank's parameters into a slot; return the name of a non-finite one."""
        if self._memory is None:
            return ""
        views = tensor_views(self.layout, self._memory.slot(slot))
        finite: list[Tensor] = []
        for _, shard in self._shards:
            finite.append(is_finite(shard.tensor))
            write_shard(shard, [views[name] for name in shard.parameter.names], self._geometry)
        if not finite:
            return ""
        flags = torch.stack(finite).tolist()  # one wait for the device, which has copied by then
        bad = [name for (name, _), is_good in zip(self._shards, flags, strict=True) if not is_good]
        return bad[0] if bad else ""

    def close(self) -> None:
        """Release the memory."""
        if self._memory is not None:
            self._memory.close()
