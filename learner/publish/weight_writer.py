"""A rank's part of a publish: its parameters, copied to their places in the weights' memory."""

import torch
from torch import Tensor

from slipstream.learner.model.collectives import gather_bytes
from slipstream.learner.model.device import device
from slipstream.learner.model.gathering import facts_of_all, received, send
from slipstream.learner.model.hf_weights import dtype_of, geometry_of
from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.model.shards import Shard, ShardFacts, is_finite, write_shard
from slipstream.learner.model.topology import Topology
from slipstream.learner.publish.contents import Contents, WholeModel
from slipstream.learner.publish.shares import Piece, share_out
from slipstream.weightbus.version.layout import part_layout, plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_views
from slipstream.wire.messages.manifest import ITEM_BYTES


class WeightWriter:
    """Writes versions of one model. Every rank has one, and writes its share.

    Each host keeps some tensors, its part of the layout, in a memory made by its first rank. A
    piece that no rank of the host holds is sent there by a rank that does.
    """

    def __init__(
        self,
        model: RankModel,
        topology: Topology,
        *,
        bucket_bytes: int,
        contents: Contents | None = None,
        in_parts: bool = True,
    ) -> None:
        """Divide the tensors over hosts and map this host's memory; all ranks call this.

        Args:
            model: this rank's part of the model.
            topology: parallel topology of all ranks.
            bucket_bytes: size of a bucket, for ``plan_layout``.
            contents: tensors that a version consists of; None is the whole model.
            in_parts: True if every host keeps some of the tensors; else the first keeps all.
        """
        self._model = model
        self._contents = contents or WholeModel(model)
        here = topology.ranks_here
        hosts = topology.world_size // here if in_parts and self._contents.in_parts else 1
        shards = {Piece(name, shard.rank): shard for name, shard in self._contents.held()}
        held = facts_of_all([(piece.name, shard) for piece, shard in shards.items()])
        specs = self._contents.specs()
        item_bytes = {spec.name: ITEM_BYTES[spec.dtype] for spec in specs}
        shares = share_out(
            held,
            lambda name: self._contents.parameter(name).names,
            item_bytes=lambda name: item_bytes[self._contents.parameter(name).names[0]],
            ranks_per_host=here,
            hosts=hosts,
        )
        self.num_parts = hosts
        self.part = topology.rank // here
        """Number of this host's part; a host from ``num_parts`` on has no part."""
        self.layout = plan_layout(specs, bucket_bytes=bucket_bytes, part_of=shares.host_of)
        """Layout of the whole version."""
        self._own_layout = part_layout(self.layout, self.part)
        self._shards = shards
        self.writes = [piece for piece in shards if piece in shares.writes[topology.rank]]
        """Pieces that this rank holds and writes."""
        self._transfers = [
            transfer
            for transfer in shares.transfers
            if topology.rank in {transfer.sender, transfer.receiver}
        ]
        self._facts = {
            transfer.piece: next(
                facts
                for facts in held[transfer.sender]
                if Piece(facts.name, facts.rank) == transfer.piece
            )
            for transfer in self._transfers
            if transfer.receiver == topology.rank
        }
        self._rank = topology.rank
        self._memory: SharedSlots | None = None
        slot_bytes = self._own_layout.num_bytes
        leads = topology.rank % here == 0 and self.part < hosts
        if leads:
            self._memory = SharedSlots.make(slot_bytes=slot_bytes, num_slots=NUM_SLOTS)
        mine = self._memory.path if self._memory is not None else ""
        paths = gather_bytes(mine.encode())
        self.paths = [paths[part * here].decode() for part in range(hosts)]
        """Path of each part's memory, valid on its host."""
        self.path = self.paths[self.part] if self.part < hosts else ""
        """Path of this host's memory; empty without a part."""
        if not leads and (self.writes or self._facts):
            self._memory = SharedSlots.open(self.path, slot_bytes=slot_bytes, num_slots=NUM_SLOTS)
        if self._memory is not None and device().type == "cuda":
            self._memory.pin()
        self._geometry = geometry_of(model.hf_config)

    def write(self, slot: int) -> str:
        """Write this rank's share into a slot; return the name of a non-finite parameter."""
        views: dict[str, Tensor] = {}
        if self._memory is not None:
            views = tensor_views(self._own_layout, self._memory.slot(slot))
        names: list[str] = []
        flags: list[Tensor] = []
        for piece in self.writes:
            names.append(piece.name)
            flags.append(self._write(self._current(piece), views))
        for piece, sender, receiver in self._transfers:
            if self._rank == sender:
                shard = self._current(piece)
                names.append(piece.name)
                flags.append(is_finite(shard.tensor))
                send(shard, receiver)
            else:
                self._write(self._received(self._facts[piece], sender), views)
        if not flags:
            return ""
        # One wait for the device: its copies are complete then.
        finite = torch.stack(flags).tolist()
        return next((name for name, is_good in zip(names, finite, strict=True) if not is_good), "")

    def _current(self, piece: Piece) -> Shard:
        return self._contents.current(piece.name, self._shards[piece])

    def _received(self, facts: ShardFacts, sender: int) -> Shard:
        parameter = self._contents.parameter(facts.name)
        tensor = received(facts, sender, dtype_of(parameter, self._model))
        return facts.shard(parameter, tensor)

    def _write(self, shard: Shard, views: dict[str, Tensor]) -> Tensor:
        """Copy a part to its places; return True if it is finite. Shape []."""
        flag = is_finite(shard.tensor)
        write_shard(shard, [views[tensor] for tensor in shard.parameter.names], self._geometry)
        return flag

    def close(self) -> None:
        """Release the memory."""
        if self._memory is not None:
            self._memory.close()
