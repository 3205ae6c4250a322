"""Hidden states of a microbatch, and the figures of tokens that the output layer reads in them.

Shapes: T tokens of B sequences laid end to end, divided over c ranks of context parallelism, C of a
rank's tokens before one that the policy chose; H hidden size.
"""

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from slipstream.algos.compose import PolicyOutputs
from slipstream.algos.logprobs.linear_logprobs import (
    Reference,
    linear_logprobs,
    squared_probabilities,
)
from slipstream.algos.logprobs.sampling import Kept, OutputLayer
from slipstream.learner.batches.packing import PackedBatch
from slipstream.learner.model.context import TokenSplit


class Share(NamedTuple):
    """The last stage's result of a microbatch for the tokens of this rank."""

    batch: PackedBatch
    split: TokenSplit  # split of its tokens over context parallelism
    hidden: Tensor  # [T/c, H]

    @property
    def choosing(self) -> Tensor:
        """Places of this rank's tokens after which the policy chose a token, [C] int64."""
        if self.split.group is None:
            return self.batch.choosing
        return self.batch.choosing_in(self.split.runs)


def token_logprobs(
    share: Share, layer: OutputLayer, reference: Reference | None = None
) -> PolicyOutputs:
    """Return the figures for the token at each index, 0.0 outside the loss mask. Shapes [T].

    The hidden state at t chooses the token at t + 1: figures are shifted by one, and no other state
    meets the output layer. Logits are divided by the temperature of their sequence. Tokens that end
    a response are barred where the engine barred them, and so are tokens that its sampler left out.
    """
    places = share.choosing
    if reference is not None:
        reference = reference._replace(hidden=reference.hidden.index_select(0, places))
    following = linear_logprobs(
        _states(share, layer, places),
        layer,
        share.split.mine(share.batch.token_ids.roll(-1))[places],
        **_sampling(share, places),
        reference=reference,
    )
    rows = [following.logprobs, following.entropy]
    if following.kl is not None:
        rows.append(following.kl)
    logprobs, entropy, *kl = _shifted(share, torch.stack(rows), places)
    return PolicyOutputs(logprobs, entropy, kl[0] if kl else None)


def token_squares(share: Share, layer: OutputLayer) -> Tensor:
    """Return the sum of squares of the probabilities that each token was chosen from, [T].

    0.0 outside the loss mask; shifted, tempered, barred and truncated as in ``token_logprobs``.
    """
    places = share.choosing
    following = squared_probabilities(
        _states(share, layer, places), layer, **_sampling(share, places)
    )
    return _shifted(share, following, places)


def _states(share: Share, layer: OutputLayer, places: Tensor) -> Tensor:
    """Return the hidden states that the output layer reads, [C, H]."""
    # Megatron's wrapper for bfloat16 upcasts them.
    return share.hidden.index_select(0, places).to(layer.weight.dtype)


def _shifted(share: Share, following: Tensor, places: Tensor) -> Tensor:
    """Return figures [..., C] of the tokens after these places as [..., T], 0.0 elsewhere."""
    mine = following.new_zeros(*following.shape[:-1], len(share.hidden))
    return share.split.whole(mine.index_copy(-1, places, following)).roll(1, dims=-1)


class _Sampling(TypedDict):
    """What decides which tokens could follow, by name of the argument."""

    temperature: Tensor  # [C]
    barred: Tensor | None  # [C] bool, where an end of the response could not follow
    kept: Kept | None  # candidates that may follow, if some may not


def _sampling(share: Share, places: Tensor) -> _Sampling:
    """Return the sampling of the tokens after these places."""
    batch, split = share.batch, share.split
    barred = batch.end_barred
    return _Sampling(
        temperature=split.mine(batch.temperature, fill=1.0)[places],
        barred=None if barred is None else split.mine(barred.roll(-1))[places],
        kept=None if batch.kept is None else _kept(share, batch.kept.before(), places),
    )


def _kept(share: Share, following: Kept, places: Tensor) -> Kept:
    """Return the candidates of the tokens after these places, from those of all tokens."""
    count = len(following.is_truncated)
    tokens = share.split.mine(torch.arange(count, device=places.device))[places]
    row_of = torch.full((count,), -1, device=places.device)
    row_of[tokens] = torch.arange(len(tokens), device=places.device)
    rows, ids = following.rows, following.ids
    if share.split.group is not None:
        here = share.batch.kept_after(share.split.runs)
        rows, ids = (torch.cat([values[part] for part in here]) for values in (rows, ids))
    return Kept(following.is_truncated[tokens], row_of[rows], ids)
