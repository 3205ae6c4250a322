"""The loss of one microbatch, from one table of all that it is made of."""

from typing import Any

from torch import Tensor

from slipstream.algos.compose import Algorithm, LossInputs, PolicyOutputs
from slipstream.algos.diagnostics import Sums


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
