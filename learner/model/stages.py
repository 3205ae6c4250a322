"""Tensors between pipeline stages, in shapes that every rank knows from the step's plan.

Megatron's stages send each other a shape before every tensor if lengths vary, which the host reads
before it can receive. Here each rank works out the order in which its tensors come: that of the
schedule, whose table Megatron has.

Shapes: T' tokens of a microbatch with padding, H hidden size.
"""

from collections.abc import Sequence

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from typing_extensions import override

from slipstream.learner.model.gpt import token_split

_NOTHING = (0, 0, 0)  # the shape from a side that sends nothing


def stage_shape(config: TransformerConfig, count: int) -> tuple[int, int, int]:
    """Return the shape of ``count`` computed tokens between stages: (tokens of this rank, 1, H)."""
    split = token_split(config, count)
    return split.rows[split.rank] // split.unit, 1, config.hidden_size


class PlannedStages(P2PCommunicator):  # type: ignore[misc]  # megatron is untyped
    """Exchanges of one run of microbatches with the stages before and after."""

    def __init__(self, config: TransformerConfig, shapes: Sequence[tuple[int, int, int]]) -> None:
        """Take the shapes of all microbatches, in their order.

        A stage receives what it passes through its chunks, in the order of its passes; only the
        first stage receives nothing for its first chunk, and what others send from their last one
        is a loss. The way back is the same from the other end.
        """
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        chunks = config.virtual_pipeline_model_parallel_size or 1
        table = get_schedule_table(len(shapes), chunks, config.microbatch_group_size_per_vp_stage)
        every = [shapes[microbatch] for microbatch, _ in table]
        around = [shapes[microbatch] for microbatch, chunk in table if chunk < chunks - 1]
        stage, last = self.pp_group.rank(), self.pp_group.size() - 1
        self._from_previous = iter(every if stage > 0 else around)
        self._from_next = iter(every if stage < last else around)

    @override
    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Return the shapes to come from the stages before and after; Megatron would ask them."""
        try:
            return (
                next(self._from_previous) if recv_prev else _NOTHING,
                next(self._from_next) if recv_next else _NOTHING,
            )
        except StopIteration as error:
            raise RuntimeError("a stage receives more tensors than the step has") from error
