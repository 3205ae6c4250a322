"""The critic: the policy's architecture with one number per token in place of logits.

Shapes: T tokens of B sequences laid end to end, H hidden size.
"""

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from torch import Tensor
from typing_extensions import override

from slipstream.learner.batches.packing import PackedBatch
from slipstream.learner.model import device
from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.training.passes import RowHead
from slipstream.learner.training.states import Share
from slipstream.learner.training.trainable import Trainable


class ValueHead(torch.nn.Module):
    """A linear layer from hidden states to values, whole on every tensor-parallel rank.

    It starts at 0: an untrained critic predicts nothing.
    """

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
        self._sequence_parallel = sequence_parallel

    @override
    def forward(self, hidden: Tensor, **_kwargs: object) -> tuple[Tensor, None]:
        """Return (values [T, B, 1], None) as Megatron's output layer returns (logits, bias)."""
        if self._sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        exact = (hidden.float(), self.weight.float(), self.bias.float())
        return torch.nn.functional.linear(*exact), None


def with_value_head(model: RankModel) -> RankModel:
    """Replace a model's output layer by a value head, and return the model."""
    config = model.config
    for chunk in model.chunks:
        chunk.share_embeddings_and_output_weights = False
    if model.last is None:
        return model
    head = ValueHead(
        config.hidden_size, dtype=config.params_dtype, sequence_parallel=config.sequence_parallel
    ).to(device.device())
    for parameter in head.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    model.last.output_layer = head
    return model


class Critic(RowHead, Trainable[Tensor]):
    """Predicts the return from each state. It is trained with the policy, by its own optimizer.

    It wraps a model of ``with_value_head``.
    """

    prefix = "critic."

    @torch.no_grad()
    def values(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return the values [T] per microbatch.

        Index t is the state in which the token at t was chosen. Values are 0.0 outside the mask.
        """
        return self.forward(batches)

    @override
    def read(self, _number: int, share: Share) -> Tensor:
        """Return the values [T] of a microbatch: the state before token t is that after t - 1."""
        values = share.split.whole(share.hidden.squeeze(-1)).roll(1)
        return torch.where(share.batch.loss_mask, values, torch.zeros((), device=values.device))
