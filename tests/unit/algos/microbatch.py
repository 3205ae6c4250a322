"""Inputs of a part of an algorithm, and the loss of one microbatch, from few words."""

from typing import Any

import torch
from torch import Tensor

from slipstream.algos.compose import Algorithm, LossInputs, PolicyOutputs
from slipstream.algos.corrections import CorrectionInputs
from slipstream.algos.diagnostics import Sums
from slipstream.algos.packing import Packing
from slipstream.algos.surrogates import SurrogateInputs


def microbatch_loss(
    chosen: Algorithm,
    *,
    current: Tensor,
    entropy: Tensor,
    full_kl: Tensor | None = None,
    num_lags: int = 0,
    **known: Any,  # noqa: ANN401 as LossInputs
) -> tuple[Tensor, Sums]:
    """Return loss and sums; ``known`` are the fields of ``LossInputs``."""
    return chosen.loss(
        LossInputs(**known), PolicyOutputs(current, entropy, full_kl), num_lags=num_lags
    )


def packed(*lengths: int) -> Packing:
    """Return sequences of these lengths, all of whose tokens are chosen."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return Packing.of(torch.ones(sum(lengths), dtype=torch.bool), ends)


def surrogate_inputs(
    current: Tensor, anchor: Tensor, advantages: Tensor, packing: Packing | None = None
) -> SurrogateInputs:
    """Return inputs whose behavior policy is the anchor; one sequence where none are given."""
    packing = packed(len(current)) if packing is None else packing
    return SurrogateInputs(
        current=current, anchor=anchor, behavior=anchor, advantages=advantages, packing=packing
    )


def correction_inputs(
    proximal: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    packing: Packing | None = None,
    lags: Tensor | None = None,
) -> CorrectionInputs:
    """Return inputs of one sequence, where no others are given."""
    return CorrectionInputs(
        proximal=proximal,
        behavior=behavior,
        advantages=advantages,
        lags=lags,
        packing=packed(len(proximal)) if packing is None else packing,
    )
