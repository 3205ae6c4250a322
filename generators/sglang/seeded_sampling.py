"""Pure: chooses tokens by seed and position only.

Shapes: B rows, V tokens of the vocabulary.
"""

import torch
from torch import Tensor

# Signed 64-bit constants of splitmix64; products wrap around.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_BITS = 52  # bits of u: u * total stays below total in float64


def sampling_from_probs(
    probs: Tensor, sampling_seed: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:
    """Replace the function of SGLang's sampler with the same name: tokens [B] int32."""
    if sampling_seed is None or positions is None:
        return torch.multinomial(probs, num_samples=1).squeeze(1).int()
    return choose(probs, sampling_seed, positions).int()


def sampling_from_truncated_probs(
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    need_min_p_sampling: bool,
    sampling_seed: Tensor,
    positions: Tensor,
    *,
    return_filtered_probs: bool = False,
    **_rest: object,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Replace SGLang's top-k, top-p and min-p sampling: tokens [B] int32.

    SGLang samples from sorted probabilities. Here the order is the vocabulary's: a row that
    truncates nothing gets the same token, whether or not another row of the batch truncates. With
    ``return_filtered_probs`` three more results: probabilities in descending order, 0 where a token
    is not kept, [B, V]; their tokens [B, V] int32; the probability of the chosen token [B].
    """
    descending, token_ids = probs.sort(dim=-1, descending=True)
    before = descending.cumsum(dim=-1) - descending
    rank = torch.arange(probs.shape[-1], device=probs.device)
    top_p = top_ps.view(-1, 1)
    keep = (rank < top_ks.view(-1, 1)) & ((before <= top_p) | (top_p >= 1))
    if need_min_p_sampling:
        keep &= descending >= descending[:, :1] * min_ps.view(-1, 1)
    filtered = descending * keep
    kept = torch.zeros_like(probs).scatter_(1, token_ids, filtered)
    chosen = choose(kept, sampling_seed, positions)
    if not return_filtered_probs:
        return chosen.int()
    return chosen.int(), filtered, token_ids.int(), kept.gather(1, chosen.unsqueeze(1)).squeeze(1)


def choose(probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a token per row [B]: the first whose cumulative probability exceeds u.

    ``probs`` [B, V] need not sum to 1. A token of probability 0 is never chosen.
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    threshold = uniform(seeds, positions).unsqueeze(1) * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
    return chosen.clamp_max_(probs.shape[-1] - 1)  # rows of NaN, for example in a dummy run


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return u [B] in [0, 1), float64, from seeds [B] int64 and positions [B]."""
    x = seeds + positions.to(torch.int64) * _STEP
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    x = x ^ _shifted(x, 31)
    return _shifted(x, 64 - _BITS).to(torch.float64) * 2.0**-_BITS


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right as if x were unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
