"""Hidden states and logits of a policy, which a learner never has whole."""

from collections.abc import Sequence

from torch import Tensor

from slipstream.learner.model.gpt import ModelInput, output_weight
from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.model.vision.images import PackedImages


def packed_forward(
    model: RankModel,
    token_ids: Tensor,
    position_ids: Tensor,
    cu_seqlens: Tensor,
    lengths: Sequence[int],
    images: PackedImages | None = None,
) -> Tensor:
    """Return the hidden states after the last layer of a model with one pipeline stage.

    Arguments and result as those of ``ModelInput.of`` and ``ModelInput.hidden``.
    """
    (chunk,) = model.chunks
    given = ModelInput.of(model.config, token_ids, position_ids, cu_seqlens, lengths, images=images)
    return given.hidden(given.through(chunk))


def packed_logits(
    model: RankModel,
    token_ids: Tensor,
    position_ids: Tensor,
    cu_seqlens: Tensor,
    lengths: Sequence[int],
    images: PackedImages | None = None,
) -> Tensor:
    """Return the logits [T, V/tp] that follow each token; arguments as in ``packed_forward``."""
    hidden = packed_forward(model, token_ids, position_ids, cu_seqlens, lengths, images)
    return hidden @ output_weight(model).t()
