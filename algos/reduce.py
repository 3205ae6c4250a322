"""The only masked sums. Dividing by a global count keeps gradient accumulation exact."""

from torch import Tensor, where


def masked_sum(per_token: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over the mask, whatever stands outside it. Shapes [T] -> []."""
    return where(mask, per_token, 0.0).sum()


def token_mean(per_token: Tensor, mask: Tensor, *, global_num_tokens: int) -> Tensor:
    """Return this microbatch's share of the global per-token mean. Shapes [T] -> []."""
    return masked_sum(per_token, mask) / global_num_tokens
