"""Expert choices that routers repeat, and a record of routers' choices.

Shapes: T tokens of B sequences, T' with padding; n tokens that a rank's routers see; L layers with
experts, k experts of a token.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.learner.model.context import TokenSplit

FREE = -1  # no expert given: the router chooses


@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """Choices for one microbatch by the routers of one model on this rank.

    Both are by number among the layers with experts, [n, k] int16 each.
    """

    given: Mapping[int, Tensor] | None = None  # FREE in rows without known choices
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
    """Return the choices for a rank's routers by layer, from those for all tokens.

    Padding is FREE.

    Args:
        experts: [T, L, k] int16.
        split: split of the tokens over context parallelism.
        ranks: number of ranks of sequence parallelism, which divides the tokens again.
        rank: number of this rank among them.
    """
    whole = replace(split, count=split.padded)
    rows = whole.mine(torch.arange(split.padded, device=experts.device)).chunk(ranks)[rank]
    padding = experts.new_full((split.padded - len(experts), *experts.shape[1:]), FREE)
    return dict(enumerate(torch.cat([experts, padding])[rows].unbind(1)))
