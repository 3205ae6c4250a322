"""A rank's part of a publish: its parameters, copied to their places in the weights' memory."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.learner.model.collectives import gather_bytes
from slipstream.learner.model.device import device
from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.model.topology import Topology
from slipstream.learner.model.weights.gathering import exchange, facts_of_all, place_for
from slipstream.learner.model.weights.hf_weights import dtype_of, geometry_of
from slipstream.learner.model.weights.shards import (
    Shard,
    ShardFacts,
    is_finite,
    write_in_fp8,
    write_shard,
)
from slipstream.learner.publish.contents import Contents
from slipstream.learner.publish.shares import Piece, Shares, batches_of, share_out
from slipstream.weightbus.version.layout import part_layout, plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_views
from slipstream.wire.messages.manifest import ITEM_BYTES, TensorSpec
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.families.registry import SCALE_SUFFIX

_SEPARATOR = "\n"
_BATCH_BYTES = 256 * 2**20  # transfers with memory on their receivers at once


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

        Every host keeps some of the tensors if ``in_parts``, else the first keeps all. Without
        ``contents`` a version is the whole model.
        """
        self._model = model
        self._contents = contents or Contents(model)
        self._rank, here = topology.rank, topology.ranks_here
        hosts = topology.world_size // here if in_parts and self._contents.in_parts else 1
        self.num_parts = hosts
        self.part = self._rank // here
        """Number of this host's part; a host from ``num_parts`` on has no part."""
        self._shards = {Piece(name, shard.rank): shard for name, shard in self._contents.held()}
        held = facts_of_all([(piece.name, shard) for piece, shard in self._shards.items()])
        specs = self._contents.specs()
        shares = self._shared_out(held, specs, here)
        host_of = {
            spec.name: shares.host_of[spec.name.removesuffix(SCALE_SUFFIX)] for spec in specs
        }
        self.layout = plan_layout(specs, bucket_bytes=bucket_bytes, part_of=host_of)
        """Layout of the whole version."""
        self._own_layout = part_layout(self.layout, self.part)
        self.writes = [piece for piece in self._shards if piece in shares.writes[self._rank]]
        """Pieces that this rank holds and writes."""
        senders = {transfer.sender for transfer in shares.transfers}
        facts_of = {
            sender: {Piece(facts.name, facts.rank): facts for facts in held[sender]}
            for sender in senders
        }
        moved = {each.piece: facts_of[each.sender][each.piece] for each in shares.transfers}

        def size_of(piece: Piece) -> int:
            return math.prod(moved[piece].shape) * self._dtype_of(piece).itemsize

        self._batches = [
            [each for each in batch if self._rank in {each.sender, each.receiver}]
            for batch in batches_of(shares.transfers, size_of, _BATCH_BYTES)
        ]
        own = [each for batch in self._batches for each in batch if each.receiver == self._rank]
        self._facts = {each.piece: moved[each.piece] for each in own}
        self._geometry = geometry_of(model.hf_config)
        self._leads = self._rank % here == 0 and self.part < hosts
        self._memory, self.paths_of = self._mapped(here)
        """Memory of this host, and the paths of each part's slots, valid on its host."""
        self.paths = self.paths_of[self.part] if self.part < hosts else ()
        """Paths of this host's slots; none without a part."""

    def _shared_out(
        self, held: Sequence[Sequence[ShardFacts]], specs: Sequence[TensorSpec], here: int
    ) -> Shares:
        item_bytes = {spec.name: ITEM_BYTES[spec.dtype] for spec in specs}

        def tensors_of(name: str) -> Sequence[str]:
            return self._contents.parameter(name).names

        return share_out(
            held,
            tensors_of,
            item_bytes=lambda name: item_bytes[tensors_of(name)[0]],
            ranks_per_host=here,
            hosts=self.num_parts,
        )

    def _mapped(self, here: int) -> tuple[SharedSlots | None, list[tuple[str, ...]]]:
        """Return this host's memory if this rank leads its host, writes or receives; all paths."""
        memory = SharedSlots.make(self._own_layout, num_slots=NUM_SLOTS) if self._leads else None
        paths = gather_bytes(_SEPARATOR.join(memory.paths).encode() if memory is not None else b"")
        of_parts = [
            tuple(paths[part * here].decode().split(_SEPARATOR)) for part in range(self.num_parts)
        ]
        if memory is None and (self.writes or self._facts):
            memory = SharedSlots.open(of_parts[self.part], self._own_layout)
        if memory is not None and device().type == "cuda":
            memory.pin()
        return memory, of_parts

    def label(self, slot: int, version: PolicyVersion | None) -> None:
        """Say which version a slot of this host holds whole; None before any rank writes."""
        if self._memory is not None and self._leads:
            self._memory.label(slot, version)

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
        for batch in self._batches:
            sent, received = [], []
            for piece, sender, receiver in batch:
                if self._rank == sender:
                    shard = self._current(piece)
                    names.append(piece.name)
                    flags.append(is_finite(shard.tensor))
                    sent.append((shard.tensor.contiguous(), receiver))
                else:
                    received.append((self._place_for(piece), sender))
            exchange(sent, [(shard.tensor, sender) for shard, sender in received])
            for shard, _ in received:
                self._write(shard, views)
        if not flags:
            return ""
        # One wait for the device: its copies are complete then.
        finite = torch.stack(flags).tolist()
        return next((name for name, is_good in zip(names, finite, strict=True) if not is_good), "")

    def _current(self, piece: Piece) -> Shard:
        return self._contents.current(piece.name, self._shards[piece])

    def _dtype_of(self, piece: Piece) -> torch.dtype:
        return dtype_of(self._contents.parameter(piece.name), self._model)

    def _place_for(self, piece: Piece) -> Shard:
        facts = self._facts[piece]
        tensor = place_for(facts, self._dtype_of(piece))
        return facts.shard(self._contents.parameter(piece.name), tensor)

    def _write(self, shard: Shard, views: dict[str, Tensor]) -> Tensor:
        """Copy a part to its places; return True if it is finite. Shape []."""
        flag = is_finite(shard.tensor)
        names = shard.parameter.names
        wholes = [views[name] for name in names]
        scales = [views[name + SCALE_SUFFIX] for name in names if name + SCALE_SUFFIX in views]
        if scales:
            write_in_fp8(shard, wholes, scales, self._geometry)
        else:
            write_shard(shard, wholes, self._geometry)
        return flag

    def close(self) -> None:
        """Release the memory."""
        if self._memory is not None:
            self._memory.close()
