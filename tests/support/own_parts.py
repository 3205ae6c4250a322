"""Parts as a user writes them, in a module of their own."""

from typing import Annotated

import msgspec
import torch
from torch import Tensor
from typing_extensions import override

from slipstream.algos.advantages import Outcomes
from slipstream.algos.corrections import Correction, CorrectionInputs
from slipstream.algos.parts import NoOptions, Options, advantage, correction, surrogate
from slipstream.algos.ratios import bounded_exp
from slipstream.algos.returns import TokenAdvantages, TokenOutcomes
from slipstream.algos.surrogates import SurrogateInputs, Terms


class SquareOptions(Options, frozen=True, kw_only=True):
    """How strongly large ratios are penalized."""

    strength: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """Weight of the squared log-ratio."""


@surrogate("square", SquareOptions)
def square(inputs: SurrogateInputs, options: SquareOptions) -> Terms:
    """-r A + strength / 2 (log r)^2: a soft trust region."""
    log_ratio = inputs.log_ratios
    ratio = bounded_exp(log_ratio)
    loss = -ratio * inputs.masked(inputs.advantages) + 0.5 * options.strength * log_ratio.square()
    none = torch.zeros_like(inputs.packing.mask)
    return Terms(
        per_token=loss,
        ratio=ratio.detach(),
        clipped_up=none,
        clipped_down=none,
        clipped_dual=none,
        figures={"shift": inputs.masked(inputs.current - inputs.behavior)},
    )


SHOWN: list[SurrogateInputs] = []


@surrogate("shown", needs=("entropy", "reference", "lags", "whole_minibatch"))
def shown(inputs: SurrogateInputs, _: NoOptions) -> Terms:
    """-A log pi, and a note of what it was shown."""
    SHOWN.append(inputs)
    none = torch.zeros_like(inputs.packing.mask)
    return Terms(
        per_token=-inputs.masked(inputs.advantages) * inputs.masked(inputs.current),
        ratio=bounded_exp(inputs.log_ratios).detach(),
        clipped_up=none,
        clipped_down=none,
        clipped_dual=none,
    )


@advantage("sign")
def sign(outcomes: Outcomes, _: NoOptions) -> Tensor:
    """1 above the group's mean, -1 below it."""
    return outcomes.centered().sign()


@correction("fresh")
def fresh(inputs: CorrectionInputs, _: NoOptions) -> Correction:
    """Only tokens of the newest version."""
    keep = inputs.packing.mask & (inputs.known_lags() == 0)
    return Correction(weights=torch.ones_like(inputs.log_ratios), keep=keep)


@advantage("of-all", needs=("tokens", "whole_step"))
def of_all(outcomes: TokenOutcomes, _: NoOptions) -> TokenAdvantages:
    """The log-probability of each token."""
    assert outcomes.proximal is not None
    return TokenAdvantages(advantages=outcomes.proximal, returns=None)


class GreedyOptions(Options, frozen=True, kw_only=True):
    """It needs what there is not."""

    @property
    @override
    def needs(self) -> frozenset[str]:
        return frozenset({"luck"})


@correction("greedy", GreedyOptions)
def greedy(inputs: CorrectionInputs, _: GreedyOptions) -> Correction:
    """Not to be had."""
    raise NotImplementedError


def undecorated(inputs: SurrogateInputs, options: NoOptions) -> Terms:
    """Not a part."""
    raise NotImplementedError
