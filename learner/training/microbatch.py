"""A microbatch of a learner step, with the data known before it is trained.

Shapes: T tokens of B sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.algos.compose import LossInputs
from slipstream.algos.packing import Packing
from slipstream.algos.reduce import Denominators
from slipstream.learner.batches.packing import PackedBatch


@dataclass(slots=True, kw_only=True)
class Microbatch(LossInputs):
    """Data of a microbatch: facts from ``of`` first, then results of ``prepare``."""

    batch: PackedBatch
    indices: Tensor  # [B] int64, trajectories of the step
    entropy: Tensor | None = None  # [T] of the proximal policy, where a correction needs it
    squares: Tensor | None = None  # [T] of the proximal policy, where advantages need it
    values: Tensor | None = None  # [T] of the critic, where there is one
    returns: Tensor | None = None  # [T] that the critic learns

    @classmethod
    def of(
        cls,
        batch: PackedBatch,
        indices: Sequence[int],
        copies: Tensor | None,
        step: int,
        denominators: Denominators,
    ) -> "Microbatch":
        """Return the facts from trajectories' headers about their microbatch.

        ``copies`` is [N] of the whole step, None if every trajectory is trained once. The age of
        tokens is relative to ``step``. ``denominators`` are of the minibatch.
        """
        index = torch.tensor(list(indices), dtype=torch.int64)
        return cls(
            batch=batch,
            behavior=batch.behavior_logprobs,
            advantages=torch.empty(0),  # not computed yet: no loss takes it
            packing=Packing.of(batch.loss_mask, batch.cu_trajectories),
            denominators=denominators.of(index),
            indices=index,
            copies=None if copies is None else copies[index].to(batch.loss_mask.device),
            lags=None if batch.version_steps is None else step - batch.version_steps,
        )

    @property
    def trained(self) -> Tensor:
        """Tokens that are in the batch at least once, [T] bool."""
        return self.packing.present(self.copies)

    def here(self, values: Tensor) -> Tensor:
        """Return values of any shape as float32 on the microbatch's device."""
        return values.to(self.batch.loss_mask.device, torch.float32)


def joined(several: Sequence[Microbatch], masks: Sequence[Tensor]) -> Packing:
    """Return the layout of several microbatches laid end to end, with these masks."""
    starts = (
        torch.tensor([0, *(microbatch.packing.num_sequences for microbatch in several)])
        .cumsum(0)
        .tolist()
    )
    sequence = [
        microbatch.packing.sequence + at for microbatch, at in zip(several, starts, strict=False)
    ]
    return Packing(torch.cat(list(masks)), torch.cat(sequence), starts[-1])


def known(values: Tensor | None, what: str) -> Tensor:
    """Return log-probabilities that must have been computed by now."""
    if values is None:
        raise ValueError(f"the {what} logprobs were not computed before they were needed")
    return values
