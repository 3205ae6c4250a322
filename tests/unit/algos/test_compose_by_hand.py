"""Whole losses of three tokens, worked out by hand."""

import math
from typing import get_args

import msgspec
import pytest
import torch
from torch import Tensor

from docs.generate.evidence import DEFINITION, proves
from slipstream.algos.compose import Algorithm
from slipstream.algos.config import choice_of
from slipstream.algos.corrections import Correction
from slipstream.algos.packing import Packing
from slipstream.algos.reduce import Denominators, Rule, reduced
from slipstream.algos.returns import TokenOutcomes
from slipstream.algos.section import AlgoSection
from slipstream.algos.surrogates import policy_gradient, reinforce_is
from tests.unit.algos.microbatch import microbatch_loss

CURRENT = [-1.0, -2.0, -0.5]
PROXIMAL = [-1.2, -1.9, -0.5]
BEHAVIOR = [-1.1, -2.3, -0.7]
REFERENCE = [-0.8, -2.5, -0.5]
ENTROPY = [0.3, 0.9, 0.6]
ADVANTAGES = [2.0, 2.0, -1.0]
SEQUENCES = Packing.of(torch.ones(3, dtype=torch.bool), torch.tensor([0, 2, 3]))


def algorithm(**settings: object) -> Algorithm:
    return Algorithm(choice_of(msgspec.convert(settings, AlgoSection)), max_response_tokens=4)


def loss_of(**settings: object) -> tuple[float, list[float]]:
    """Return the loss and its gradient by the current log-probabilities, without corrections."""
    chosen = algorithm(correction="none", **settings)
    current = torch.tensor(CURRENT, dtype=torch.float64, requires_grad=True)

    def tokens(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    loss, _ = microbatch_loss(
        chosen,
        current=current,
        proximal=tokens(PROXIMAL),
        behavior=tokens(BEHAVIOR),
        reference=tokens(REFERENCE),
        advantages=tokens(ADVANTAGES),
        entropy=tokens(ENTROPY),
        packing=SEQUENCES,
        denominators=chosen.denominators(3.0, 2.0),
    )
    loss.backward()
    assert current.grad is not None
    return loss.item(), current.grad.tolist()


@proves(policy_gradient, against=DEFINITION, what="value, gradient")
def test_the_policy_gradient_is_minus_advantage_times_logprob():
    loss, gradient = loss_of(surrogate="policy-gradient")
    assert loss == pytest.approx(-(2 * -1.0 + 2 * -2.0 + -1 * -0.5) / 3)
    assert gradient == pytest.approx([-2 / 3, -2 / 3, 1 / 3])


@proves(
    "anchor = proximal",
    "anchor = behavior",
    reinforce_is,
    against=DEFINITION,
    what="value, gradient",
)
@pytest.mark.parametrize(("anchor", "below"), [("proximal", PROXIMAL), ("behavior", BEHAVIOR)])
def test_anchor_is_the_denominator_of_the_ratio(anchor: str, below: list[float]):
    loss, gradient = loss_of(surrogate="reinforce-is", anchor=anchor)
    losses = [-math.exp(c - b) * a for c, b, a in zip(CURRENT, below, ADVANTAGES, strict=True)]
    assert loss == pytest.approx(sum(losses) / 3)
    assert gradient == pytest.approx([one / 3 for one in losses])


@proves("entropy_bonus", against=DEFINITION)
def test_the_entropy_bonus_is_taken_from_the_loss_and_reduced_as_it_is():
    for rule, mean in [
        ("token-mean", (0.3 + 0.9 + 0.6) / 3),
        ("sequence-mean-token-mean", ((0.3 + 0.9) / 2 + 0.6) / 2),
    ]:
        with_bonus, _ = loss_of(reduce=rule, entropy_bonus=0.5)
        without, _ = loss_of(reduce=rule)
        assert with_bonus - without == pytest.approx(-0.5 * mean)


KL: dict[str, tuple[dict[str, object], list[float]]] = {
    "from the reference": (
        {"name": "k2"},
        [(c - r) ** 2 / 2 for c, r in zip(CURRENT, REFERENCE, strict=True)],
    ),
    "from the policy that chose the token": (
        {"name": "k2", "to": "behavior"},
        [(c - b) ** 2 / 2 for c, b in zip(CURRENT, BEHAVIOR, strict=True)],
    ),
    "weighed by how likely the token is by now": (
        {"name": "k3", "importance_weighted": True},
        [
            math.exp(c - b) * (math.exp(r - c) - 1 - (r - c))
            for c, b, r in zip(CURRENT, BEHAVIOR, REFERENCE, strict=True)
        ],
    ),
}


@proves("kl.coefficient", "kl.place = loss", "kl.to = reference", against=DEFINITION)
@proves("kl.to = behavior", "kl.importance_weighted", against=DEFINITION)
@pytest.mark.parametrize("name", KL)
def test_a_divergence_is_added_to_the_loss_by_its_coefficient(name: str):
    settings, of_tokens = KL[name]
    kl = {"coefficient": 0.2, **settings}
    assert algorithm(kl=kl).choice.needs_reference == (settings.get("to") != "behavior")
    difference = loss_of(kl=kl)[0] - loss_of()[0]
    assert difference == pytest.approx(0.2 * sum(of_tokens) / 3)


@proves("kl.coefficient", "kl.place = reward", against=DEFINITION)
def test_the_reward_of_each_token_is_charged_for_the_divergence_of_the_proximal_policy():
    chosen = algorithm(preset="reinforce++", kl={"coefficient": 0.2, "name": "k1"})
    charge = chosen.reward_kl(
        torch.tensor(PROXIMAL), torch.tensor(REFERENCE), torch.ones(3, dtype=torch.bool)
    )
    rewards = chosen.token_rewards(torch.tensor([1.0, -1.0]), charge, SEQUENCES)
    # PROXIMAL - REFERENCE = -0.4, 0.6, 0.0; the reward is on the last token of its sequence
    assert rewards.tolist() == pytest.approx([0.08, 1.0 - 0.12, -1.0])
    result = chosen.token_advantages(TokenOutcomes(rewards=rewards, packing=SEQUENCES))
    assert result.advantages.tolist() == pytest.approx([0.96, 0.88, -1.0])


@proves("reduce.length", against=DEFINITION)
def test_the_constant_length_is_that_of_the_settings_or_the_longest_response():
    for length, divisor in [(0.0, 4.0), (10.0, 10.0)]:
        rule = "sequence-mean-token-sum-norm"
        loss, _ = loss_of(surrogate="policy-gradient", reduce={"name": rule, "length": length})
        assert loss == pytest.approx(-(2 * -1.0 + 2 * -2.0 + -1 * -0.5) / (2 * divisor))


KEPT = {  # losses are 2, 4 and -0.5; sequences are the first two tokens, and the third
    ("token-mean", "original"): (2 - 0.5) / 3,
    ("token-mean", "kept"): (2 - 0.5) / 2,
    ("sequence-mean-token-mean", "original"): (2 / 2 - 0.5) / 2,
    ("sequence-mean-token-mean", "kept"): (2 / 1 - 0.5) / 2,
    ("sequence-mean-token-sum", "original"): (2 - 0.5) / 2,
    ("sequence-mean-token-sum", "kept"): (2 - 0.5) / 2,
}


@pytest.mark.parametrize(("rule", "denominator"), KEPT)
def test_denominator_decides_if_rejected_tokens_count_in_sequence_means(
    rule: str, denominator: str
):
    chosen = algorithm(surrogate="policy-gradient", correction="none", reduce=rule)
    current = torch.tensor(CURRENT, dtype=torch.float64)
    keep = torch.tensor([True, False, True])
    loss, _ = microbatch_loss(
        chosen,
        current=current,
        proximal=current,
        behavior=current,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        entropy=torch.zeros(3, dtype=torch.float64),
        packing=SEQUENCES,
        denominators=chosen.denominators(3.0, 2.0),
        kept=chosen.denominators(2.0, 2.0) if denominator == "kept" else None,
        correction=Correction(weights=keep.double(), keep=keep),
    )
    assert loss.item() == pytest.approx(KEPT[rule, denominator])


@pytest.mark.parametrize("rule", get_args(Rule))
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_a_sequence_that_was_not_drawn_adds_nothing_whatever_it_holds(rule: Rule, garbage: float):
    both = Denominators(
        num_tokens=2.0, num_sequences=2.0, length=4.0, group_mean=torch.tensor([0.0, 2.0])
    )
    per_token = torch.tensor([garbage, 1.0, -0.5], dtype=torch.float64, requires_grad=True)
    drawn = reduced(per_token, SEQUENCES, both, rule, torch.tensor([0, 2]))
    alone = torch.tensor([-0.5], dtype=torch.float64)
    single = Packing.of(torch.ones(1, dtype=torch.bool), torch.tensor([0, 1]))
    of_one = reduced(alone, single, both.of(torch.tensor([1])), rule)
    assert drawn.item() == pytest.approx(2 * of_one.item())
    (gradient,) = torch.autograd.grad(drawn, per_token)
    assert gradient[:2].tolist() == [0.0, 0.0]
    assert gradient[2] > 0
