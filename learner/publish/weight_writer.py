"""A rank's part of a publish: its parameters, copied to their places in the weights' memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.learner.model.device import device
from slipstream.learner.model.gathering import ShardFacts, facts_of_all, received, send
from slipstream.learner.model.hf_weights import dtype_of, geometry_of
from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.model.shards import is_finite, write_shard
from slipstream.learner.model.topology import Topology
from slipstream.learner.publish.contents import Contents, WholeModel
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_views


class WeightWriter:
    """Writes versions of one model. Every rank has one; the owners of its parts write.

    The memory is on rank 0's host. Owners on other hosts send their parts to the rank with their
    place on that one.
    """

    def __init__(
        self,
        model: RankModel,
        topology: Topology,
        *,
        bucket_bytes: int,
        agree: Callable[[str], str],
        contents: Contents | None = None,
    ) -> None:
        """Make the memory on rank 0 and map it on the others that write.

        ``agree`` returns rank 0's text on every rank. ``contents`` are the model's; None is the
        whole model.
        """
        self._model = model
        self._contents = contents or WholeModel(model)
        self.layout = plan_layout(self._contents.specs(), bucket_bytes=bucket_bytes)
        slot_bytes = self.layout.num_bytes
        made: SharedSlots | None = None
        if topology.rank == 0:
            made = SharedSlots.make(slot_bytes=slot_bytes, num_slots=NUM_SLOTS)
        self.path = agree(made.path if made is not None else "")
        self._memory = made
        self._shards = list(self._contents.owned())
        self._receiver: int | None = None
        self._remote: list[tuple[int, ShardFacts]] = []  # owner, what it sends here
        every = facts_of_all(self._shards) if topology.world_size > topology.ranks_here else []
        if topology.rank >= topology.ranks_here:
            self._receiver = topology.rank % topology.ranks_here
        else:
            self._remote = [
                (owner, one)
                for owner in range(topology.ranks_here, topology.world_size)
                if owner % topology.ranks_here == topology.rank
                for one in every[owner]
            ]
        if self._receiver is None and (self._shards or self._remote):
            self._memory = made or SharedSlots.open(
                self.path, slot_bytes=slot_bytes, num_slots=NUM_SLOTS
            )
            if device().type == "cuda":
                self._memory.pin()
        self._geometry = geometry_of(model.hf_config)

    def write(self, slot: int) -> str:
        """Copy this rank's parameters into a slot; return the name of a non-finite one."""
        flags: list[Tensor] = []
        views: dict[str, Tensor] = {}
        if self._receiver is None and self._memory is not None:
            views = tensor_views(self.layout, self._memory.slot(slot))
        for name, own in self._shards:
            shard = self._contents.current(name, own)
            flags.append(is_finite(shard.tensor))
            if self._receiver is not None:
                send(shard, self._receiver)
            elif views:
                places = [views[tensor] for tensor in shard.parameter.names]
                write_shard(shard, places, self._geometry)
        if views:
            for owner, one in self._remote:
                parameter = self._contents.parameter(one.name)
                tensor = received(one, owner, dtype_of(parameter, self._model))
                shard = one.shard(parameter, tensor)
                places = [views[tensor] for tensor in shard.parameter.names]
                write_shard(shard, places, self._geometry)
        return self._not_finite(flags)

    def close(self) -> None:
        """Release the memory."""
        if self._memory is not None:
            self._memory.close()

    def _not_finite(self, flags: list[Tensor]) -> str:
        if not flags:
            return ""
        # One wait for the device, which has copied by then.
        finite = torch.stack(flags).tolist()
        bad = [name for (name, _), is_good in zip(self._shards, finite, strict=True) if not is_good]
        return bad[0] if bad else ""
