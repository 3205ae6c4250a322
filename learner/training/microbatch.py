"""A microbatch of a learner step, with what is known of it before it is trained.

Shapes: T tokens of B sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.algos.compose import LossInputs, RightAnswers
from slipstream.algos.corrections import Correction
from slipstream.algos.packing import Packing
from slipstream.algos.reduce import Denominators
from slipstream.algos.surrogates import WholeMinibatch
from slipstream.learner.batches.packing import PackedBatch


@dataclass(slots=True)
class Microbatch:
    """What is known of a microbatch, filled by ``prepare`` in the order of fields."""

    batch: PackedBatch
    packing: Packing
    indices: Tensor  # [B] int64, trajectories of the step
    copies: Tensor | None  # [B] int64, None if every trajectory is trained once
    lags: Tensor | None  # [T]
    proximal: Tensor | None = None  # [T]; None if the training pass computes them
    entropy: Tensor | None = None  # [T] of the proximal policy, where a correction needs it
    squares: Tensor | None = None  # [T] of the proximal policy, where advantages need it
    reference: Tensor | None = None  # [T]
    teacher: Tensor | None = None  # [T]
    values: Tensor | None = None  # [T]
    advantages: Tensor = field(default_factory=lambda: torch.empty(0))  # [T]
    returns: Tensor | None = None  # [T]
    correction: Correction | None = None

    @classmethod
    def of(
        cls, batch: PackedBatch, indices: Sequence[int], copies: Tensor | None, step: int
    ) -> "Microbatch":
        """Return what the headers of trajectories state of their microbatch.

        ``copies`` is [N] of the whole step, None if every trajectory is trained once. The age of
        tokens counts against ``step``.
        """
        index = torch.tensor(list(indices), dtype=torch.int64)
        return cls(
            batch=batch,
            packing=Packing.of(batch.loss_mask, batch.cu_seqlens),
            indices=index,
            copies=None if copies is None else copies[index].to(batch.loss_mask.device),
            lags=None if batch.version_steps is None else step - batch.version_steps,
        )

    @property
    def trained(self) -> Tensor:
        """The tokens that are in the batch at least once, [T] bool."""
        return self.packing.present(self.copies)

    def inputs(
        self,
        denominators: Denominators,
        kept: Denominators | None,
        right: RightAnswers | None,
        minibatch: WholeMinibatch | None,
    ) -> LossInputs:
        """Return what its loss is computed from, with what its whole minibatch adds."""
        return LossInputs(
            proximal=self.proximal,
            behavior=self.batch.behavior_logprobs,
            advantages=self.advantages,
            packing=self.packing,
            denominators=denominators,
            kept=kept,
            reference=self.reference,
            teacher=self.teacher,
            lags=self.lags,
            copies=self.copies,
            right=right,
            minibatch=minibatch,
            correction=self.correction,
        )

    def here(self, values: Tensor) -> Tensor:
        """Return values of any shape as float32 on its device."""
        return values.to(self.batch.loss_mask.device, torch.float32)


def joined(several: Sequence[Microbatch], masks: Sequence[Tensor]) -> Packing:
    """Return the layout of several microbatches laid end to end, with these masks."""
    starts = torch.tensor([0, *(one.packing.num_sequences for one in several)]).cumsum(0).tolist()
    sequence = [one.packing.sequence + at for one, at in zip(several, starts, strict=False)]
    return Packing(torch.cat(list(masks)), torch.cat(sequence), starts[-1])


def known(values: Tensor | None, what: str) -> Tensor:
    """Return log-probabilities that must have been computed by now."""
    if values is None:
        raise ValueError(f"the {what} logprobs were not computed before they were needed")
    return values
