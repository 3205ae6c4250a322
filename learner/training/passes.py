"""Passes of microbatches through a model's pipeline stages, and the last one's results on all.

Every rank of a replica calls these with the same microbatches. Results of the last stage are sent
to the other stages: so advantages, corrections and figures are computed alike on every rank, as if
each had the whole model.

Shapes: T tokens of B sequences laid end to end.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from typing_extensions import override

from slipstream.learner.batches.packing import PackedBatch, empty_microbatch
from slipstream.learner.model.collectives import broadcast_frames
from slipstream.learner.model.context import TokenSplit
from slipstream.learner.model.device import device
from slipstream.learner.model.gpt import ModelInput
from slipstream.learner.model.stages import PlannedStages, stage_shape
from slipstream.learner.model.topology import Topology
from slipstream.learner.training.states import Share
from slipstream.wire.settings.sections import RoutingReplay

Output = TypeVar("Output")
_SCHEDULE_GROUPS = ["tp", "cp", "embd", "pos_embd", "pp", "dp", "dp_cp", "tp_dp_cp"]


class Head(Protocol[Output]):
    """Turns hidden states into the inputs of a loss."""

    def read(self, number: int, share: Share) -> Output:
        """Return the outputs of all tokens of microbatch ``number``."""
        ...

    @property
    def num_rows(self) -> int:
        """Number of rows k of an output without gradient, equal on all stages."""
        ...

    def stacked(self, output: Output) -> Tensor:
        """Return the parts of an output that other stages need, [k, T] float32."""
        ...

    def unstacked(self, values: Tensor) -> Output:
        """Return the output with these parts."""
        ...


class RowHead(Head[Tensor]):
    """Reads one number per token: an output is a single row."""

    num_rows = 1

    @override
    def stacked(self, output: Tensor) -> Tensor:
        return output.unsqueeze(0)

    @override
    def unstacked(self, values: Tensor) -> Tensor:
        return values[0]


class ModelPasses(Generic[Output]):
    """Runs microbatches through the chunks of one model on this rank."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        head: Head[Output],
        topology: Topology,
        *,
        replay: RoutingReplay = "off",
    ) -> None:
        """Take a model's chunks, wrapped for training or not.

        ``replay`` decides which experts routers repeat: with R3 the experts that came with a
        microbatch, with R2 in ``train`` those of its last ``forward``, if any.
        """
        self._chunks = list(chunks)
        self._replay = replay
        self._head = head
        self._topology = topology
        self._config = chunks[0].config

    def forward(self, batches: Sequence[PackedBatch]) -> list[Output]:
        """Return the outputs for all microbatches, on every stage.

        Gradients flow only with a single stage. Outputs of a microbatch without tokens are empty.
        """
        outputs: list[Output] = []

        def of_last_stage(number: int, share: Share) -> Tensor:
            outputs.append(self._head.read(number, share))
            return share.hidden

        self._run(batches, of_last_stage)
        del outputs[len(batches) :]  # outputs of microbatches that fill up a round
        if self._topology.sizes.pipeline == 1:
            return outputs
        lengths = [len(batch.token_ids) for batch in batches]
        stacked = [self._head.stacked(output) for output in outputs]
        rows = torch.cat(stacked, dim=-1) if stacked else None
        values = self.on_all_stages(rows, (self._head.num_rows, sum(lengths)))
        parts = torch.split(values.float(), lengths, dim=-1)
        return [self._head.unstacked(part) for part in parts]

    def hidden(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return the hidden states [T/c, H] of all microbatches on the last stage; [] elsewhere."""
        states: list[Tensor] = []

        def of_last_stage(_number: int, share: Share) -> Tensor:
            states.append(share.hidden.detach())
            return share.hidden

        self._run(batches, of_last_stage)
        return states[: len(batches)]

    def train(
        self, batches: Sequence[PackedBatch], loss_of: Callable[[int, PackedBatch, Output], Tensor]
    ) -> None:
        """Run forward and backward passes; ``loss_of`` is called only on the last stage.

        A microbatch without tokens has no loss: it exists because others wait for its passes.
        """

        def of_last_stage(number: int, share: Share) -> Tensor:
            output = self._head.read(number, share)
            if not len(share.batch.token_ids):
                # Every weight waits for a gradient: it is 0.
                return self._head.stacked(output).sum() * 0.0
            return loss_of(number, share.batch, output)

        self._run(batches, of_last_stage, trains=True)

    def on_all_stages(self, values: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Return the last stage's values of this shape on every stage, in float64.

        Other stages pass None.
        """
        whole = torch.empty(shape, dtype=torch.float64, device=device())
        if values is not None:
            whole.copy_(values.detach())
        source, group = self._topology.last_stage_rank, self._topology.pipeline_group
        dist.broadcast(whole, src=source, group=group)
        return whole

    def names_on_all_stages(self, names: Sequence[str]) -> list[str]:
        """Return the last stage's names on every stage."""
        if self._topology.sizes.pipeline == 1:
            return list(names)
        source, group = self._topology.last_stage_rank, self._topology.pipeline_group
        is_source = self._topology.rank == source
        frames = [msgspec.msgpack.encode(list(names))] if is_source else None
        (data,) = broadcast_frames(frames, 1, group=group, source=source)
        return msgspec.msgpack.decode(data, type=list[str])

    def _run(
        self,
        batches: Sequence[PackedBatch],
        of_last_stage: Callable[[int, Share], Tensor],
        *,
        trains: bool = False,
    ) -> None:
        def step(
            iterator: Iterator[tuple[int, PackedBatch]], chunk: torch.nn.Module
        ) -> tuple[Tensor, Callable[..., object]]:
            number, batch = next(iterator)
            given = ModelInput.of(
                self._config,
                batch.token_ids,
                batch.position_ids,
                batch.cu_seqlens,
                batch.lengths,
                batch.shared,
                batch.images,
            )
            given = self._replaying(batch, given, trains=trains)

            def result(output: Tensor, *, non_loss_data: bool = False) -> object:
                hidden, split = given.hidden(output), given.split
                if batch.shared is not None:  # states of all tokens are here
                    split = TokenSplit(len(hidden), len(hidden))
                share = Share(batch, split, hidden)
                value = of_last_stage(number, share)
                if non_loss_data:
                    return None
                return value, torch.ones((), dtype=torch.int, device=value.device), {}

            return given.through(chunk), result

        several = len(self._chunks) > 1
        missing = -len(batches) % self._topology.sizes.microbatch_multiple
        empty = [empty_microbatch(device())] * missing
        numbered = list(enumerate([*batches, *empty]))
        stages: dict[str, object] = {}
        if self._topology.sizes.pipeline > 1:
            shapes = [stage_shape(self._config, batch.num_computed) for _, batch in numbered]
            stages = {
                "p2p_communicator": PlannedStages(self._config, shapes),
                "pg_collection": ProcessGroupCollection.use_mpu_process_groups(_SCHEDULE_GROUPS),
            }
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(numbered) for _ in self._chunks] if several else iter(numbered),
            model=self._chunks,
            num_microbatches=len(numbered),
            seq_length=1,  # any length: PlannedStages has the shapes
            micro_batch_size=1,
            forward_only=not trains,
            collect_non_loss_data=not trains,
            **stages,
        )

    def _replaying(self, batch: PackedBatch, given: ModelInput, *, trains: bool) -> ModelInput:
        """Return a microbatch whose routers follow ``replay``; unchanged without known choices."""
        if self._replay == "R3" and batch.experts is not None:
            return given.choosing(batch.experts, self._config)
        if self._replay == "R2" and not trains:
            return given.recording(batch.chosen_before)
        if self._replay == "R2" and batch.chosen_before:
            return given.repeating(batch.chosen_before)
        return given
