"""Experts that were chosen before, which routers choose again, and the record of what they choose.

Shapes: T tokens of B sequences, T' with padding, of which a rank's routers see n; L layers with
experts, k experts of a token.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.learner.model.context import TokenSplit

FREE = -1  # in place of an expert: the router chooses


@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """What the routers of one model on this rank do with one microbatch.

    By number among the layers with experts, [n, k] int16 each.
    """

    given: Mapping[int, Tensor] | None = None  # FREE in rows of which nothing is known
    record: MutableMapping[int, Tensor] | None = None  # filled in by the pass

    def decided(self, layer: int, own: Tensor) -> Tensor:
        """Return a layer's experts in place of the router's ``own`` choice, [n, k] int64."""
        chosen = own
        if self.given is not None:
            given = self.given[layer].to(own)
            chosen = torch.where(given == FREE, own, given)
        if self.record is not None:
            self.record[layer] = chosen.to(torch.int16)
        return chosen


def choices_of_rank(
    experts: Tensor, split: TokenSplit, *, ranks: int = 1, rank: int = 0
) -> dict[int, Tensor]:
    """Return what a rank's routers are given of choices for all tokens, [T, L, k] int16, by layer.

    Padding is FREE.

    Args:
        experts: [T, L, k] int16.
        split: of the tokens over context parallelism.
        ranks: of sequence parallelism, which divides the tokens again.
        rank: one of them.
    """
    whole = replace(split, count=split.padded)
    rows = whole.mine(torch.arange(split.padded, device=experts.device)).chunk(ranks)[rank]
    padding = experts.new_full((split.padded - len(experts), *experts.shape[1:]), FREE)
    return dict(enumerate(torch.cat([experts, padding])[rows].unbind(1)))
