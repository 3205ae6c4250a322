"""Rewards of turns: where they are put, how far they reach, and whom they are compared with.

In every case a turn is a run of chosen tokens, with context before it.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from docs.generate.evidence import DEFINITION, proves
from slipstream.algos.advantages import GrpoOptions, Outcomes, SiblingOptions, grpo, rloo
from slipstream.algos.packing import Packing
from slipstream.algos.returns import (
    DiscountOptions,
    GaeOptions,
    TimeOptions,
    TokenOutcomes,
    at_end,
    at_turn_ends,
    centered_returns,
    discounted_returns,
    gae,
)
from slipstream.algos.turns import TurnRewards

Array = npt.NDArray[np.float64]

# Two trajectories: turns of 2 and 1 tokens, then one of 3.
MASK = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 1, 1], dtype=torch.bool)
PACKING = Packing.of(MASK, torch.tensor([0, 6, 10]))


def turn_rewards(*of_trajectories: list[float], tokens: int = 1) -> TurnRewards:
    flat = [reward for rewards in of_trajectories for reward in rewards]
    return TurnRewards(
        rewards=torch.tensor(flat, dtype=torch.float64),
        counts=torch.tensor([len(rewards) for rewards in of_trajectories]),
        tokens=torch.full((len(flat),), tokens),
    )


def of_turns(turns: TurnRewards, groups: list[int]) -> Outcomes:
    return Outcomes(
        rewards=turns.sums,
        groups=torch.tensor(groups),
        num_groups=max(groups) + 1,
        lengths=torch.ones(len(groups)),
        turns=turns,
    )


# ---- where turns are ---------------------------------------------------------


def test_a_turn_is_a_run_of_chosen_tokens():
    assert PACKING.starts_turn.nonzero().flatten().tolist() == [1, 5, 7]
    assert PACKING.ends_turn.nonzero().flatten().tolist() == [2, 5, 9]
    assert PACKING.turns.num_sequences == 3
    assert PACKING.turns.counts.tolist() == [2, 1, 3]
    assert at_turn_ends(torch.tensor([1.0, 2.0, 3.0]), PACKING).tolist() == [
        *(0.0, 0.0, 1.0, 0.0, 0.0, 2.0),
        *(0.0, 0.0, 0.0, 3.0),
    ]


def test_a_turn_ends_with_its_trajectory():
    packing = Packing.of(torch.ones(4, dtype=torch.bool), torch.tensor([0, 1, 4]))
    assert packing.starts_turn.tolist() == [True, True, False, False]
    assert packing.ends_turn.tolist() == [True, False, False, True]


def test_values_of_other_turns_are_refused():
    with pytest.raises(ValueError, match="2 values of turns came with 3 turns"):
        at_turn_ends(torch.zeros(2), PACKING)
    turns = turn_rewards([0.0], [0.0, 1.0])
    with pytest.raises(ValueError, match="2 values of turns came with 3 turns"):
        turns.of(torch.tensor([0]), torch.zeros(2))
    with pytest.raises(ValueError, match="came with 3 turns"):
        TurnRewards(
            rewards=torch.zeros(2), counts=torch.tensor([1, 2]), tokens=torch.ones(3).long()
        )
    with pytest.raises(ValueError, match="a trajectory has no turn"):
        TurnRewards(
            rewards=torch.zeros(1), counts=torch.tensor([1, 0]), tokens=torch.ones(1).long()
        )
    with pytest.raises(ValueError, match="turns of 2 trajectories came with 1 rewards"):
        Outcomes(
            rewards=torch.zeros(1),
            groups=torch.zeros(1, dtype=torch.int64),
            num_groups=1,
            lengths=torch.ones(1),
            turns=turns,
        )


def test_turns_know_their_trajectories_and_what_they_still_earn():
    turns = turn_rewards([1.0, 0.0, 4.0], [3.0], [0.5, 2.0])
    assert turns.trajectory.tolist() == [0, 0, 0, 1, 2, 2]
    assert turns.number.tolist() == [0, 1, 2, 0, 0, 1]
    assert turns.sums.tolist() == [5.0, 3.0, 2.5]
    assert turns.returns(0.5).tolist() == [2.0, 2.0, 4.0, 3.0, 1.5, 2.0]
    assert turns.of(torch.tensor([2, 0]), turns.rewards).tolist() == [0.5, 2.0, 1.0, 0.0, 4.0]


def test_what_turns_do_not_add_up_to_is_of_the_last_turn():
    turns = turn_rewards([1.0, 0.0, 4.0], [0.0, 0.0]).adding_up_to(
        torch.tensor([4.0, 7.0]), scale=0.5
    )
    assert turns.rewards.tolist() == [0.5, 0.0, 3.5, 0.0, 7.0]
    assert turns.sums.tolist() == [4.0, 7.0]


# ---- by hand -----------------------------------------------------------------


@proves(centered_returns, "discount_by = turn", against=DEFINITION)
def test_the_group_mean_may_be_taken_off_before_the_discount_by_turn():
    outcomes = TokenOutcomes(rewards=at_end(torch.tensor([1.0, -1.0]), PACKING), packing=PACKING)
    found = centered_returns(outcomes, TimeOptions(discount=0.5, discount_by="turn"))
    assert found.advantages.tolist() == [0, 0.5, 0.5, 0, 0, 1.0, 0, -1.0, -1.0, -1.0]


def test_turns_that_nobody_rewarded_cannot_be_compared():
    step = Outcomes(
        rewards=torch.zeros(2),
        groups=torch.zeros(2, dtype=torch.int64),
        num_groups=1,
        lengths=torch.ones(2),
    )
    with pytest.raises(ValueError, match="no trajectory of this step has rewards of turns"):
        grpo(step, GrpoOptions(over="turns"))


# ---- against formulas written independently ----------------------------------


@dataclass(frozen=True)
class Case:
    """Trajectories end to end: of each, the numbers of tokens of its turns."""

    turns: list[list[int]]
    rewards: list[list[float]]  # of turns
    seed: int

    @property
    def packing(self) -> Packing:
        masks = [
            [flag for count in turns for flag in [False] * (1 + count % 2) + [True] * count]
            for turns in self.turns
        ]
        cu_seqlens = torch.tensor([0, *np.cumsum([len(mask) for mask in masks])])
        return Packing.of(torch.tensor([flag for mask in masks for flag in mask]), cu_seqlens)

    def noise(self, salt: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + salt)
        return torch.randn(len(self.packing.mask), generator=generator, dtype=torch.float64)

    @property
    def given(self) -> TokenOutcomes:
        flat = torch.tensor([r for rewards in self.rewards for r in rewards], dtype=torch.float64)
        charge = torch.where(self.packing.mask, 0.1 * self.noise(1), 0.0)  # as a KL penalty is
        return TokenOutcomes(
            rewards=at_turn_ends(flat, self.packing) - charge,
            values=self.noise(),
            packing=self.packing,
        )

    def rows(self, per_token: Tensor) -> list[list[Array]]:
        """Return the chosen tokens of each turn of each trajectory."""
        chosen = iter(per_token[self.packing.mask].tolist())
        return [[np.array([next(chosen) for _ in range(n)]) for n in turns] for turns in self.turns]


@st.composite
def cases(draw: st.DrawFn, most_turns: int = 4) -> Case:
    turns = draw(
        st.lists(
            st.lists(st.integers(1, 4), min_size=1, max_size=most_turns), min_size=1, max_size=5
        )
    )
    reward = st.sampled_from([0.0, 1.0, -0.5, 2.25])
    rewards = [draw(st.lists(reward, min_size=len(one), max_size=len(one))) for one in turns]
    return Case(turns, rewards, draw(st.integers(0, 2**31)))


factors = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def assert_rows(case: Case, ours: Tensor, expected: list[list[Array]]) -> None:
    assert (ours[~case.packing.mask] == 0.0).all()
    for mine, theirs in zip(case.rows(ours), expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def stated_tokens(
    rewards: list[Array], values: list[Array], discount: float, decay: float
) -> list[Array]:
    """GAE over tokens where a step within a turn is not discounted: from the end, one by one."""
    found: list[Array] = []
    after, advantage = 0.0, 0.0
    for r, v in zip(reversed(rewards), reversed(values), strict=True):
        row = np.zeros(len(r))
        for t in reversed(range(len(r))):
            factor = discount if t == len(r) - 1 else 1.0
            advantage = r[t] + factor * after - v[t] + factor * decay * advantage
            row[t], after = advantage, v[t]
        found.append(row)
    return found[::-1]


def stated_turns(
    rewards: list[Array], values: list[Array], discount: float, decay: float
) -> list[float]:
    """A_k = sum_l (discount decay)^l d_(k+l), with d of the values at the first tokens."""
    firsts = [v[0] for v in values] + [0.0]
    d = [
        r.sum() + discount * after - before
        for r, (before, after) in zip(rewards, pairwise(firsts), strict=True)
    ]
    return [
        sum((discount * decay) ** i * one for i, one in enumerate(d[k:])) for k in range(len(d))
    ]


@proves(discounted_returns, gae, "discount_by = turn", "rewards = turns", against=DEFINITION)
@given(case=cases(), discount=factors, decay=factors)
@settings(deadline=None, max_examples=60)
def test_a_step_within_a_turn_costs_nothing(case: Case, discount: float, decay: float):
    rewards, values = case.rows(case.given.rewards), case.rows(case.noise())
    by_turn = {"rewards": "turns", "discount": discount, "discount_by": "turn"}
    options = GaeOptions(decay=decay, **by_turn)
    expected = [stated_tokens(r, v, discount, decay) for r, v in zip(rewards, values, strict=True)]
    found = gae(case.given, options)
    assert_rows(case, found.advantages, expected)
    returns = discounted_returns(case.given, DiscountOptions(**by_turn))
    nothing = [[np.zeros(len(v)) for v in of_turns] for of_turns in values]
    sums = [stated_tokens(r, v, discount, 1.0) for r, v in zip(rewards, nothing, strict=True)]
    assert_rows(case, returns.advantages, sums)


@proves(gae, "gae: over = turns", against=DEFINITION)
@given(case=cases(), discount=factors, decay=factors, critic_decay=st.none() | factors)
@settings(deadline=None, max_examples=60)
def test_gae_over_turns_takes_a_turn_for_one_action(
    case: Case, discount: float, decay: float, critic_decay: float | None
):
    options = GaeOptions(over="turns", discount=discount, decay=decay, critic_decay=critic_decay)
    found = gae(case.given, options)
    rows = list(zip(case.rows(case.given.rewards), case.rows(case.noise()), strict=True))

    def spread(decay: float, share: float) -> list[list[Array]]:
        return [
            [
                np.full(len(one), a + share * one[0])
                for one, a in zip(v, stated_turns(r, v, discount, decay), strict=True)
            ]
            for r, v in rows
        ]

    assert_rows(case, found.advantages, spread(decay, 0.0))
    assert found.returns is not None
    targets = decay if critic_decay is None else critic_decay
    assert_rows(case, found.returns, spread(targets, 1.0))


def stated_bi_level(
    rewards: list[Array], values: list[Array], discount: float, decay: float
) -> list[Array]:
    """VAGEN's two loops: over turns at their last tokens, then over the tokens of each turn."""
    worth, of_turn, after = [0.0] * len(rewards), 0.0, 0.0
    for k in reversed(range(len(rewards))):
        delta = rewards[k][-1] + discount * after - values[k][-1]
        of_turn, after = delta + discount * decay * of_turn, values[k][-1]
        worth[k] = of_turn + values[k][-1]
    rows = []
    for k, v in enumerate(values):
        row = np.zeros(len(v))
        row[-1] = worth[k] - v[-1]
        for t in reversed(range(len(v) - 1)):
            row[t] = v[t + 1] - v[t] + decay * row[t + 1]
        rows.append(row)
    return rows


@proves(gae, "gae: over = both", against=DEFINITION)
@given(case=cases(), discount=factors, decay=factors, critic_decay=st.none() | factors)
@settings(deadline=None, max_examples=30)
def test_bi_level_gae_is_over_turns_and_then_over_the_tokens_of_each(
    case: Case, discount: float, decay: float, critic_decay: float | None
):
    flat = torch.tensor([r for rewards in case.rewards for r in rewards], dtype=torch.float64)
    step = replace(case.given, rewards=at_turn_ends(flat, case.packing))
    options = GaeOptions(over="both", discount=discount, decay=decay, critic_decay=critic_decay)
    found = gae(step, options)
    rows = [*zip(case.rows(step.rewards), case.rows(case.noise()), strict=True)]
    assert_rows(case, found.advantages, [stated_bi_level(r, v, discount, decay) for r, v in rows])
    assert found.returns is not None
    targets = decay if critic_decay is None else critic_decay
    expected = [
        [a + b for a, b in zip(stated_bi_level(r, v, discount, targets), v, strict=True)]
        for r, v in rows
    ]
    assert_rows(case, found.returns, expected)
    one_level = GaeOptions(discount=discount, decay=1.0, discount_by="turn")
    undecayed = GaeOptions(over="both", discount=discount, decay=1.0)
    torch.testing.assert_close(gae(step, undecayed).advantages, gae(step, one_level).advantages)


@proves(grpo, rloo, "grpo: over = turns", "rloo: over = turns", against=DEFINITION)
@given(case=cases(), discount=factors, data=st.data())
@settings(deadline=None, max_examples=60)
def test_over_turns_is_the_formula_of_siblings_for_each_number_of_turn(
    case: Case, discount: float, data: st.DataObject
):
    groups = [data.draw(st.integers(0, 1)) for _ in case.turns]
    step = of_turns(turn_rewards(*case.rewards), groups)
    ours = {
        "grpo": grpo(step, GrpoOptions(over="turns", discount=discount, epsilon=1e-3)),
        "plain": grpo(step, GrpoOptions(over="turns", discount=discount, divide_by_std=False)),
        "rloo": rloo(step, SiblingOptions(over="turns", discount=discount)),
    }
    place = 0
    for rewards, group in zip(case.rewards, groups, strict=True):
        for k in range(len(rewards)):
            siblings = [r for r, g in zip(case.rewards, groups, strict=True) if g == group]
            there = np.array(
                [
                    sum(discount**i * one for i, one in enumerate(r[k:]))
                    for r in siblings
                    if len(r) > k
                ]
            )
            own = sum(discount**i * one for i, one in enumerate(rewards[k:]))
            n = len(there)
            if n > 1:
                expected = {
                    "grpo": (own - there.mean()) / (there.std(ddof=1) + 1e-3),
                    "plain": own - there.mean(),
                    "rloo": own - (there.sum() - own) / (n - 1),
                }
            else:
                alone = own if len(siblings) == 1 else 0.0
                expected = {"grpo": alone / 1.001, "plain": alone, "rloo": alone}
            for name, value in expected.items():
                assert ours[name][place].item() == pytest.approx(value, rel=1e-6, abs=1e-6)
            place += 1


# ---- what must not change ----------------------------------------------------
