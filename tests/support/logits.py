"""The logits of a policy, which a learner never has whole."""

from torch import Tensor

from slipstream.learner.model.gpt import output_weight, packed_forward
from slipstream.learner.model.rank_model import RankModel


def packed_logits(
    model: RankModel, token_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Return the logits [T, V/tp] that follow each token; arguments as in ``packed_forward``."""
    hidden = packed_forward(model, token_ids, position_ids, cu_seqlens, max_seqlen)
    return hidden @ output_weight(model).t()
