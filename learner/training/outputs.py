"""What a policy says about the tokens of a batch. Shapes: T tokens laid end to end."""

from typing import NamedTuple

from torch import Tensor


class Said(NamedTuple):
    """Figures of each token, 0.0 outside the loss mask. Shapes [T], in nats."""

    logprobs: Tensor
    entropy: Tensor
    kl: Tensor | None = None  # KL(this || reference) over all tokens that could be chosen
    squares: Tensor | None = None  # sum of the squares of their probabilities
