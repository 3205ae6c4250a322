"""A chunk of logits: some columns of the vocabulary, for all tokens of a microbatch.

Shapes: T tokens, c columns of the chunk.
"""

from dataclasses import dataclass

from torch import Tensor

PADDED_LOGIT = -(2.0**100)  # probability 0; finite (0 * logit is 0), and exact in every type


@dataclass(frozen=True, slots=True)
class Chunk:
    """Logits of some columns, those of their distribution once tempered and without padding."""

    logits: Tensor  # [T, c] float32 or float64; PADDED_LOGIT in place of what cannot be chosen
    target: Tensor  # [T] int64 column of each token's target, which may be none of these
    temperature: Tensor | None  # [T] divides logits; 1 if None
    num_real: int  # columns from here on are padding
    others: Tensor | None = None  # [T, c] of the reference, tempered alike
    others_real: int = 0

    def tempered(self, rows: slice) -> Tensor:
        """Return rows of the logits, in memory of their own where they change."""
        return tempered(self.logits[rows], self.temperature, rows, self.num_real)

    def tempered_others(self, rows: slice) -> Tensor | None:
        """Return rows of the reference's logits."""
        if self.others is None:
            return None
        return tempered(self.others[rows], self.temperature, rows, self.others_real)


@dataclass(frozen=True, slots=True)
class LogitGradients:
    """What the gradient of each row needs besides its logits. Shapes [T]."""

    log_total: Tensor  # log of the sum of exp over all columns of all chunks
    entropy: Tensor
    gap_offset: Tensor  # log of the reference's sum of exp, less the KL
    by_all: Tensor  # gradient by the log-probability
    by_target: Tensor  # the same; 0 where the target's logit is a constant
    by_entropy: Tensor | None
    by_kl: Tensor | None


def tempered(logits: Tensor, temperature: Tensor | None, rows: slice, num_real: int) -> Tensor:
    """Return rows' logits by their temperature, with PADDED_LOGIT from column ``num_real`` on."""
    if temperature is not None:
        logits = logits / temperature[rows, None]
        logits.clamp_(min=PADDED_LOGIT)  # a barred logit stays finite
    if num_real < logits.shape[-1]:
        logits = logits.clone() if temperature is None else logits
        logits[:, num_real:] = PADDED_LOGIT
    return logits
