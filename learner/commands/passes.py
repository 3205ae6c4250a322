"""A loss of a tenant's on this rank: its data in microbatches, through the model, and back.

Shapes: N tokens of a datum, K targets of each; T tokens of a microbatch's data laid end to end,
divided over c ranks of context parallelism.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from slipstream.algos.logprobs.linear_logprobs import linear_logprobs
from slipstream.learner.batches.bins import fewest_bins
from slipstream.learner.batches.packing import PackedBatch, TrainTrajectory, empty_microbatch, pack
from slipstream.learner.commands.losses import loss_of
from slipstream.learner.model import device
from slipstream.learner.model.collectives import gather_bytes
from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.model.topology import Topology
from slipstream.learner.training.passes import Head, ModelPasses
from slipstream.learner.training.policy import output_layer
from slipstream.learner.training.states import Share
from slipstream.wire.messages.commands import Datum, Forward, Losses


@dataclass(slots=True)
class _Micro:
    """Data of one microbatch, by their places in the command; none where others wait for it."""

    places: list[int]
    batch: PackedBatch
    targets: Tensor  # [T, K] int64
    inputs: dict[str, Tensor]  # [T, K] float32 each


class TargetHead(Head[Tensor]):
    """Reads the log-probabilities of given targets, [T, K], whatever the tokens that follow."""

    def __init__(self, model: RankModel, topology: Topology) -> None:
        self._model = model
        self._topology = topology
        self.micros: list[_Micro] = []  # those of the passes under way
        self.width = 1  # K

    @override
    def read(self, number: int, share: Share) -> Tensor:
        layer = output_layer(self._model, self._topology, share.batch)
        hidden = share.hidden.to(layer.weight.dtype)
        # Microbatches that fill up a round have no number here, and no tokens.
        known = number < len(self.micros)
        targets = self.micros[number].targets if known else hidden.new_zeros(0, self.width).long()
        columns = [
            share.split.whole(linear_logprobs(hidden, layer, share.split.mine(column)).logprobs)
            for column in targets.unbind(1)
        ]
        return torch.stack(columns, dim=1)

    @property
    @override
    def num_rows(self) -> int:
        return self.width

    @override
    def stacked(self, output: Tensor) -> Tensor:
        return output.T

    @override
    def unstacked(self, values: Tensor) -> Tensor:
        return values.T


class TenantPasses:
    """Losses through one model's layers, with the adapters that are attached."""

    def __init__(self, model: RankModel, topology: Topology, *, max_tokens: int) -> None:
        """Take a frozen model; ``max_tokens`` are those of a microbatch at most."""
        self._topology = topology
        self._max_tokens = max_tokens
        self._head = TargetHead(model, topology)
        self._passes = ModelPasses(model.chunks, self._head, topology)

    def run(self, command: Forward) -> Losses:
        """Return the losses of a command; with ``backward`` parameters have gradients after it.

        Every rank calls this with the same command, and gets the same.
        """
        logprobs: dict[int, bytes] = {}
        loss = 0.0
        for width, places in _by_width(command.data):
            micros = self._micros(command.data, places, width)
            self._head.micros, self._head.width = micros, width
            values, found = self._of_micros(command, micros)
            loss += values
            logprobs |= found
        every = gather_bytes(msgspec.msgpack.encode((loss, logprobs)))
        total, joined = 0.0, dict[int, bytes]()
        for rank, data in enumerate(every):
            if self._leads(rank):
                part, theirs = msgspec.msgpack.decode(data, type=tuple[float, dict[int, bytes]])
                total += part
                joined |= theirs
        return Losses(
            logprobs=tuple(joined[place] for place in range(len(command.data))),
            widths=tuple(datum.width for datum in command.data),
            metrics={"loss:sum": total},
        )

    def _of_micros(self, command: Forward, micros: list[_Micro]) -> tuple[float, dict[int, bytes]]:
        """Return this replica's loss, and the log-probabilities of its data by their places."""
        if not micros:  # other replicas have all of the data
            return 0.0, {}
        batches = [micro.batch for micro in micros]
        outputs: list[Tensor] = []
        if command.backward:

            def loss(number: int, _batch: PackedBatch, found: Tensor) -> Tensor:
                outputs.append(found.detach())
                inputs = micros[number].inputs
                return loss_of(command.loss, found, inputs, command.options)

            with torch.enable_grad():
                self._passes.train(batches, loss)
            outputs = self._on_all_stages(outputs, micros)
        else:
            with torch.no_grad():
                outputs = self._passes.forward(batches)
        total, found = 0.0, dict[int, bytes]()
        full = [micro for micro in micros if micro.places]
        kept = [output for output in outputs if output.numel()]
        for micro, output in zip(full, kept, strict=True):
            with torch.no_grad():
                total += float(loss_of(command.loss, output, micro.inputs, command.options))
            lengths = [len(command.data[place].tokens) // 4 for place in micro.places]
            rows = torch.split(output.float().cpu(), lengths)
            for place, part in zip(micro.places, rows, strict=True):
                found[place] = part.numpy().astype("<f4").tobytes()
        return total, found

    def _on_all_stages(self, outputs: list[Tensor], micros: list[_Micro]) -> list[Tensor]:
        if self._topology.sizes.pipeline == 1:
            return outputs
        sizes = [micro.targets.shape for micro in micros if micro.places]
        flat = torch.cat([output.flatten() for output in outputs]) if outputs else None
        count = sum(rows * columns for rows, columns in sizes)
        whole = self._passes.on_all_stages(flat, (count,)).float()
        parts = torch.split(whole, [rows * columns for rows, columns in sizes])
        return [part.view(size) for part, size in zip(parts, sizes, strict=True)]

    def _micros(self, data: Sequence[Datum], places: list[int], width: int) -> list[_Micro]:
        """Return this replica's microbatches of some data; equally many where replicas wait."""
        lengths = [len(datum.tokens) // 4 for datum in data]
        replicas, own = self._topology.data_parallel, self._topology.data_parallel_rank
        bins = fewest_bins(places, lengths, self._max_tokens)
        mine = [_micro(data, sorted(chosen), width) for chosen in bins[own::replicas]]
        if self._topology.sizes.couples_replicas:
            most = -(-len(bins) // replicas)
            mine += [_empty(width) for _ in range(most - len(mine))]
        return mine

    def _leads(self, rank: int) -> bool:
        """True for one rank of each replica."""
        place = self._topology.sizes.place(rank, self._topology.world_size)
        return place.tensor == place.context == place.stage == 0


def _by_width(data: Sequence[Datum]) -> Iterator[tuple[int, list[int]]]:
    found: defaultdict[int, list[int]] = defaultdict(list)
    for place, datum in enumerate(data):
        found[datum.width].append(place)
    yield from sorted(found.items())


def _micro(data: Sequence[Datum], places: list[int], width: int) -> _Micro:
    chosen = [data[place] for place in places]
    tokens = [np.frombuffer(datum.tokens, "<i4") for datum in chosen]
    batch = pack(
        [
            TrainTrajectory(
                token_ids=ids,
                loss_mask=np.ones(len(ids), np.bool_),
                behavior_logprobs=np.zeros(len(ids), np.float32),
                temperature=1.0,
            )
            for ids in tokens
        ],
        device.device(),
    )

    def joined(parts: list[bytes], dtype: str) -> Tensor:
        values = np.concatenate([np.frombuffer(part, dtype) for part in parts]).reshape(-1, width)
        return torch.from_numpy(values).to(device.device())

    names = set[str]().union(*(datum.inputs for datum in chosen))
    # A mask or weights that one datum has and another lacks are 1 there.
    inputs = {
        name: joined(
            [
                datum.inputs.get(name) or np.ones(len(datum.targets) // 4, "<f4").tobytes()
                for datum in chosen
            ],
            "<f4",
        )
        for name in sorted(names)
    }
    return _Micro(places, batch, joined([d.targets for d in chosen], "<i4").long(), inputs)


def _empty(width: int) -> _Micro:
    targets = torch.zeros(0, width, dtype=torch.int64, device=device.device())
    return _Micro([], empty_microbatch(device.device()), targets, {})
