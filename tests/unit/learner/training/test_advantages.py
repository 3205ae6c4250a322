"""Advantages of packed trajectories: of several turns, in several branches, in any microbatches."""

from collections.abc import Sequence
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from slipstream.algos.advantages import Outcomes
from slipstream.algos.compose import Algorithm
from slipstream.algos.config import choice_of
from slipstream.algos.reduce import Rule, reduced
from slipstream.algos.section import AlgoSection
from slipstream.learner.batches.packing import TrainTrajectory, pack
from slipstream.learner.training.advantages import fill_advantages
from slipstream.learner.training.microbatch import Microbatch
from slipstream.learner.training.step_data import step_data
from slipstream.wire.messages.broker import DeliveredGroup, DeliveredTrajectory
from slipstream.wire.messages.trajectory import TrajectoryHeader, Turn, VersionRun
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.delivered_groups import groups

CPU = torch.device("cpu")
Turns = Sequence[tuple[int, int]]  # context before a turn, and its tokens


class Alone:
    """A policy of one replica."""

    def __init__(self) -> None:
        self.replicas = self

    def summed(self, values: Tensor) -> Tensor:
        return values


def algorithm(**settings: object) -> Algorithm:
    section = msgspec.convert({"preset": "async-default", **settings}, AlgoSection)
    return Algorithm(choice_of(section), max_response_tokens=16)


def of_branches(*branches: Turns) -> TrainTrajectory:
    """A trajectory of these branches; its chosen tokens are numbered from 1, context is 0."""
    masks = [
        np.concatenate([np.repeat([False, True], turn) for turn in branch]) for branch in branches
    ]
    mask = np.concatenate(masks)
    ends = np.cumsum([len(one) for one in masks])
    return TrainTrajectory(
        token_ids=np.where(mask, mask.cumsum(), 0).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.zeros(len(mask), np.float32),
        temperature=1.0,
        branches=tuple(int(end) for end in ends[:-1]),
    )


def delivered(
    reward: float, turn_rewards: Sequence[float], *branches: Turns
) -> tuple[TrainTrajectory, DeliveredTrajectory]:
    found = of_branches(*branches)
    turns, place = [], 0
    for context, count in (turn for branch in branches for turn in branch):
        turns.append(Turn(place + context, count))
        place += context + count
    header = TrajectoryHeader(
        group_id=0,
        sibling=0,
        lease_id=0,
        num_prompt_tokens=turns[0].first_token,
        num_tokens=place,
        version_runs=(VersionRun(turns[0].first_token, PolicyVersion(1, 3)),),
        temperature=1.0,
        finish_reason="stop",
        turns=tuple(turns),
        branches=found.branches,
    )
    return found, DeliveredTrajectory(
        header=header, reward=reward, turn_rewards=tuple(turn_rewards)
    )


def microbatch(
    its: Algorithm, trajectories: Sequence[TrainTrajectory], indices: Sequence[int], count: int
) -> Microbatch:
    batch = pack([trajectories[i] for i in indices], CPU)
    tokens = float(sum(one.loss_mask.sum() for one in trajectories))
    of_one_group = torch.full((count,), tokens)
    return Microbatch.of(batch, indices, None, 5, its.denominators(tokens, count, of_one_group))


def advantages(
    its: Algorithm,
    everything: Sequence[tuple[TrainTrajectory, DeliveredTrajectory]],
    split: Sequence[Sequence[int]],
    values: float | None = None,
) -> list[list[float]]:
    """Return the advantages of the chosen tokens of each trajectory, all of them one group."""
    trajectories = [one for one, _ in everything]
    group = DeliveredGroup(group_id=0, trajectories=tuple(one for _, one in everything))
    data = step_data([group], step=5, seed=0)
    shaped = its.prepared(data.outcomes, data.is_truncated, torch.Generator())
    parts = [microbatch(its, trajectories, indices, len(everything)) for indices in split]
    for one in parts:
        if values is not None:
            one.values = torch.full((len(one.packing.mask),), values)
    fill_advantages(Alone(), parts, data.outcomes, shaped, its)  # type: ignore[arg-type]
    found: dict[int, list[float]] = {}
    for one, indices in zip(parts, split, strict=True):
        for place, index in enumerate(indices):
            own = one.packing.mask & (one.packing.sequence == place)
            found[index] = one.advantages[own].tolist()
    return [found[index] for index in sorted(found)]


BRANCHED = delivered(4.0, [1.0, 0.5, 2.0], [(2, 2), (1, 1)], [(3, 3)])
SHORT = delivered(1.0, [], [(2, 2)])
SPLITS = [[[0, 1]], [[1, 0]], [[1], [0]]]


@pytest.mark.parametrize("split", SPLITS)
def test_returns_go_from_the_end_of_a_branch_into_the_next(split: list[list[int]]):
    its = algorithm(
        advantage={
            "name": "discounted-returns",
            "rewards": "turns",
            "discount": 0.5,
            "discount_by": "turn",
        }
    )
    # 4 is 1 + 0.5 + 2 and a rest of 0.5 in the last turn: 2.5, 0.5 + 1.25, 1 + 0.875
    assert advantages(its, [BRANCHED, SHORT], split) == [
        [1.875, 1.875, 1.75, 2.5, 2.5, 2.5],
        [1.0, 1.0],
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_turns_are_actions_of_gae_across_branches(split: list[list[int]]):
    its = algorithm(
        preset="ppo", whiten="none", advantage={"rewards": "turns", "over": "turns", "decay": 1.0}
    )
    # without a discount, with lambda 1: what is still earned, less the value of 0.25
    assert advantages(its, [BRANCHED, SHORT], split, values=0.25) == [
        [3.75, 3.75, 2.75, 2.25, 2.25, 2.25],
        [0.75, 0.75],
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_turns_are_compared_with_those_of_siblings_in_other_microbatches(split: list[list[int]]):
    its = algorithm(advantage={"over": "turns", "divide_by_std": False})
    # 4 and 1 of the first turns; the others have no sibling
    assert advantages(its, [BRANCHED, SHORT], split) == [
        [1.5, 1.5, 0.0, 0.0, 0.0, 0.0],
        [-1.5, -1.5],
    ]


def test_rewards_are_shaped_before_turns_are():
    its = algorithm(
        advantage={"name": "discounted-returns", "rewards": "turns"},
        data={"scale": 2.0, "bias": 0.25},
    )
    # 2 (4 + 0.25) = 8.5 in all: 2, 1, 4 and a rest of 1.5
    assert advantages(its, [BRANCHED], [[0]]) == [[8.5, 8.5, 6.5, 5.5, 5.5, 5.5]]


def test_by_default_rewards_of_turns_change_nothing():
    plain = [(one, replace(sent, turn_rewards=())) for one, sent in (BRANCHED, SHORT)]
    for settings in (
        {},
        {"preset": "reinforce++", "kl": {"coefficient": 0.0}},
        {"preset": "rloo"},
        {"preset": "ppo"},
    ):
        its = algorithm(**settings)
        values = 0.25 if its.choice.needs_values else None
        first, second = (
            advantages(its, given, [[0, 1]], values=values) for given in ([BRANCHED, SHORT], plain)
        )
        assert first == second
        if not its.is_token_level:
            assert all(len(set(one)) == 1 for one in first)


def test_a_step_whose_turns_nobody_rewarded_is_refused():
    its = algorithm(advantage={"name": "discounted-returns", "rewards": "turns"})
    with pytest.raises(ValueError, match="no trajectory of this step has rewards of turns"):
        advantages(its, [SHORT, SHORT], [[0, 1]])


def test_rewards_of_turns_come_in_the_order_of_groups_siblings_and_turns():
    first, second = groups()
    assert step_data([first, second], step=5, seed=3).outcomes.turns is None
    with_turns = replace(first, trajectories=(BRANCHED[1], SHORT[1]))
    turns = step_data([second, with_turns], step=5, seed=3).outcomes.known_turns
    assert turns.rewards.tolist() == [0.0, 0.0, 1.0, 0.5, 2.0, 0.0]
    assert turns.counts.tolist() == [1, 1, 3, 1]
    assert turns.tokens.tolist() == [6, 6, 2, 1, 3, 2]


# ---- a trajectory counts once ------------------------------------------------

SPLIT_UP: dict[str, list[Turns]] = {
    "one": [[(2, 2), (1, 1), (1, 3), (4, 1)]],
    "two": [[(2, 2), (1, 1)], [(5, 3), (1, 1)]],
    "four": [[(2, 2)], [(4, 1)], [(6, 3)], [(9, 1)]],
}


@pytest.mark.parametrize("rule", get_args(Rule))
def test_a_reduction_counts_a_trajectory_once_however_many_branches_it_has(rule: Rule):
    its = algorithm(reduce={"name": rule})
    other = of_branches([(3, 2)])
    table = torch.linspace(-1.0, 2.0, 9, dtype=torch.float64)

    def loss(branches: Sequence[Turns]) -> tuple[float, list[float]]:
        per_id = table.clone().requires_grad_()
        given = microbatch(its, [of_branches(*branches), other], [0, 1], 2)
        assert len(given.batch.cu_seqlens) == len(branches) + 2
        assert given.packing.counts.tolist() == [7, 2]
        value = reduced(
            per_id[given.batch.token_ids], given.packing, given.denominators, rule, given.copies
        )
        value.backward()  # type: ignore[no-untyped-call]
        assert per_id.grad is not None
        return value.item(), per_id.grad.tolist()

    value, gradient = loss(SPLIT_UP["one"])
    assert gradient[0] == 0.0  # context
    # the trajectory by hand: tokens 1 to 7, beside one of tokens 1 and 2
    own, others = table[1:8].sum().item(), table[1:3].sum().item()
    expected = {
        "token-mean": (own + others) / 9,
        "group-mean-token-mean": (own + others) / 9,
        "sequence-mean-token-mean": (own / 7 + others / 2) / 2,
        "sequence-mean-token-sum": (own + others) / 2,
        "sequence-mean-token-sum-norm": (own + others) / (2 * 16),
        "token-sum": own + others,
    }[rule]
    assert value == pytest.approx(expected)
    for branches in SPLIT_UP.values():
        again, slopes = loss(branches)
        assert again == pytest.approx(value)
        assert slopes == pytest.approx(gradient)


@pytest.mark.parametrize("name", ["grpo", "discounted-returns"])
def test_branches_change_no_advantage(name: str):
    its = algorithm(advantage=name, whiten="batch")
    first, *others = (
        advantages(its, [delivered(3.0, [], *branches), SHORT], [[0, 1]])
        for branches in SPLIT_UP.values()
    )
    for found in others:
        assert found == first


def test_a_step_is_of_trajectories_and_not_of_branches():
    outcomes: Outcomes = step_data(
        [DeliveredGroup(group_id=0, trajectories=(BRANCHED[1], SHORT[1]))], step=5, seed=0
    ).outcomes
    assert outcomes.lengths.tolist() == [6, 2]
    assert outcomes.rewards.tolist() == [4.0, 1.0]
