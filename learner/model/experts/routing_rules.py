"""Pure: choice of a token's experts in a mixture.

Shapes: T tokens, E experts in n groups, k experts per token.
"""

import torch
from torch import Tensor

from slipstream.wire.models.families.tables import RouterTraits

_SMALLEST_SUM = 1e-20  # least sum of weights, as a divisor


def scores_of(logits: Tensor, score: str) -> Tensor:
    """Return the scores of experts, [T, E] float32, from the router's logits, [T, E]."""
    return logits.float().softmax(-1) if score == "softmax" else logits.float().sigmoid()


def chosen_experts(
    scores: Tensor,
    *,
    count: int,
    bias: Tensor | None = None,
    groups: int = 1,
    taken_groups: int = 1,
    group_score: str = RouterTraits().group_score,
) -> Tensor:
    """Return the numbers of the experts with the highest scores, [T, k] int64.

    With groups, only experts of the groups with the highest scores are chosen. A group's score is
    that of its best expert in DeepSeek-V2 (arXiv:2405.04434, section 2.2.2), and the sum of its two
    best in DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).

    Args:
        scores: [T, E].
        count: k.
        bias: [E], added to scores for the choice.
        groups: n.
        taken_groups: number of groups that experts may be chosen from.
        group_score: "best" or "two best".
    """
    scores = scores if bias is None else scores + bias
    if groups > 1:
        by_group = scores.view(len(scores), groups, -1)  # [T, n, E/n]
        best = 1 if group_score == "best" else min(2, by_group.size(-1))
        of_groups = by_group.topk(best, dim=-1).values.sum(-1)
        taken = torch.zeros_like(of_groups, dtype=torch.bool)
        taken.scatter_(-1, of_groups.topk(taken_groups, dim=-1).indices, True)
        scores = by_group.masked_fill(~taken[..., None], float("-inf")).flatten(-2)
    return scores.topk(count, dim=-1).indices


def weights_of(scores: Tensor, chosen: Tensor, *, is_share: bool, factor: float) -> Tensor:
    """Return the weights of chosen experts, [T, k].

    Args:
        scores: [T, E].
        chosen: [T, k] int64.
        is_share: divide scores by their sum over a token's chosen experts.
        factor: multiplies all weights.
    """
    weights = scores.gather(-1, chosen)
    if is_share:
        weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
    return weights * factor
