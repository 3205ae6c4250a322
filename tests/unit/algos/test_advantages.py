import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from docs.generate.evidence import DEFINITION, PROPERTY, proves
from slipstream.algos.advantages import (
    GdpoOptions,
    GrpoOptions,
    Outcomes,
    PassAtKOptions,
    SiblingOptions,
    gdpo,
    grpo,
    maxrl,
    opo,
    pass_at_k,
    plain,
    remax,
    rloo,
    zero,
)
from slipstream.algos.parts import NoOptions, Options, Part

Array = npt.NDArray[np.float64]

DR_GRPO = GrpoOptions(divide_by_std=False)
PLAIN_PASS_AT_K = PassAtKOptions(divide_by_std=False)
NONE = NoOptions()

ALL: dict[str, tuple[Part[..., Any], Options]] = {
    "grpo": (grpo, GrpoOptions()),
    "dr-grpo": (grpo, DR_GRPO),
    "rloo": (rloo, SiblingOptions()),
    "opo": (opo, NONE),
    "pass-at-k": (pass_at_k, PassAtKOptions()),
    "pass-at-k, not divided": (pass_at_k, PLAIN_PASS_AT_K),
    "remax": (remax, NONE),
    "reinforce": (plain, NONE),
    "grpo, leave one out": (grpo, GrpoOptions(leave_one_out=True)),
}
AMONG_SIBLINGS = sorted(set(ALL) - {"remax", "reinforce"})


def outcomes(
    rewards: list[float],
    groups: list[int] | None = None,
    lengths: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
) -> Outcomes:
    groups = groups or [0] * len(rewards)
    return Outcomes(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=torch.tensor(groups),
        num_groups=max(groups) + 1,
        lengths=torch.ones(len(rewards)) if lengths is None else lengths,
        greedy_rewards=greedy_rewards,
    )


@st.composite
def steps(draw: st.DrawFn, least_siblings: int = 2) -> Outcomes:
    """Groups of different sizes, their trajectories in any order, some rewards equal."""
    sizes = draw(st.lists(st.integers(least_siblings, 5), min_size=1, max_size=4))
    groups = draw(st.permutations(np.repeat(range(len(sizes)), sizes).tolist()))
    n = len(groups)
    reward = st.sampled_from([0.0, 1.0]) | st.floats(-4, 4, width=32)
    return Outcomes(
        rewards=torch.tensor(draw(st.lists(reward, min_size=n, max_size=n)), dtype=torch.float64),
        groups=torch.tensor(groups),
        num_groups=len(sizes),
        lengths=torch.tensor(draw(st.lists(st.integers(1, 50), min_size=n, max_size=n))),
        greedy_rewards=torch.tensor(draw(st.lists(reward, min_size=n, max_size=n))),
    )


def of_papers(name: str, r: Array, lengths: Array, greedy: Array, i: int) -> float:
    """The advantage of sibling i of one group, from the formula of the paper."""
    others = np.delete(r, i)
    lead = max(r[i] - others.max(), 0.0)
    match name:
        case "grpo":
            return (r[i] - r.mean()) / (r.std(ddof=1) + 1e-6)
        case "grpo, leave one out":
            return (r[i] - others.mean()) / (r.std(ddof=1) + 1e-6)
        case "dr-grpo" | "reinforce++-baseline":
            return r[i] - r.mean()
        case "rloo":
            return r[i] - others.mean()
        case "remax":
            return r[i] - greedy[i]
        case "reinforce":
            return r[i]
        case "opo":
            return r[i] - (r * lengths).sum() / lengths.sum()
        case "pass-at-k":
            return lead / (r.std(ddof=1) + 1e-6)
        case _:
            return lead


@proves(*(part for part, _ in ALL.values()), against=DEFINITION)
@pytest.mark.parametrize("name", ALL)
@given(step=steps())
@settings(deadline=None, max_examples=30)
def test_every_group_has_the_formula_of_the_paper(name: str, step: Outcomes):
    part, options = ALL[name]
    ours = part(step, options).numpy()
    of_step = (step.groups, step.rewards, step.lengths, step.greedy_rewards)
    groups, rewards, lengths, greedy = (x.numpy() for x in of_step)
    for group in range(step.num_groups):
        members = np.flatnonzero(groups == group)
        r, n = rewards[members], lengths[members].astype(float)
        expected = [of_papers(name, r, n, greedy[members], i) for i in range(len(members))]
        np.testing.assert_allclose(ours[members], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", AMONG_SIBLINGS)
@pytest.mark.parametrize("reward", [0.1, -2.0, 1e6 / 3])
def test_a_group_of_equal_rewards_has_no_advantage_at_all(name: str, reward: float):
    part, options = ALL[name]
    step = outcomes([reward] * 3, lengths=torch.tensor([3, 7, 11]))
    assert part(step, options).tolist() == [0.0] * 3


def test_a_group_of_one_has_the_baseline_0():
    for name in sorted(set(AMONG_SIBLINGS) - {"pass-at-k", "pass-at-k, not divided"}):
        part, options = ALL[name]
        step = outcomes([2.0, 1.0, 0.0], [1, 0, 0])
        assert part(step, options)[0].item() == pytest.approx(2.0, rel=2e-6)


def test_pass_at_k_needs_a_second_best():
    with pytest.raises(ValueError, match="at least 2 siblings"):
        pass_at_k(outcomes([2.0, 1.0, 0.0], [1, 0, 0]), PassAtKOptions())


def test_opo_weighs_a_group_without_tokens_as_nothing():
    step = outcomes([1.0, 0.5], lengths=torch.tensor([0, 0]))
    assert opo(step, NONE).isfinite().all()


@proves(*(part for part, _ in ALL.values()), against=PROPERTY, what="half")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ALL)
def test_rewards_of_low_precision_are_computed_with_in_float64(name: str, dtype: torch.dtype):
    part, options = ALL[name]
    rewards = torch.tensor([1.0, 0.3, 0.7, 0.2]).to(dtype)

    def step(values: Tensor) -> Outcomes:
        return Outcomes(
            rewards=values,
            groups=torch.zeros(4, dtype=torch.int64),
            num_groups=1,
            lengths=torch.tensor([1, 2, 3, 4]),
            greedy_rewards=torch.full((4,), 0.5),
        )

    ours = part(step(rewards), options)
    assert ours.dtype == torch.float64
    assert torch.equal(ours, part(step(rewards.double()), options))


def test_remax_without_greedy_rewards_is_refused():
    assert remax.needs == {"greedy"}
    with pytest.raises(ValueError, match="remax needs greedy_rewards"):
        remax(outcomes([1.0, 0.0]), NONE)


def test_outcomes_that_do_not_fit_are_refused():
    for change, message in [
        ({"rewards": torch.zeros(2, 2)}, r"rewards must be \[N\]"),
        (
            {"groups": torch.zeros(3, dtype=torch.int64)},
            r"groups has shape \(3,\), expected \(2,\)",
        ),
        ({"lengths": torch.zeros(1)}, "lengths has shape"),
        ({"greedy_rewards": torch.zeros(1)}, "greedy_rewards has shape"),
        ({"groups": torch.tensor([0, 2])}, r"groups must be 0 to 1 .* got 0 to 2"),
        ({"groups": torch.tensor([-1, 0])}, r"got -1 to 0"),
    ]:
        fitting = {
            "rewards": torch.zeros(2),
            "groups": torch.tensor([0, 1]),
            "lengths": torch.ones(2),
            "greedy_rewards": None,
        }
        with pytest.raises(ValueError, match=message):
            Outcomes(num_groups=2, **{**fitting, **change})


# ---- over the batch, by the mean, of parts ----


def several(rewards: list[list[float]], **parts: list[list[float]]) -> Outcomes:
    """Return outcomes of groups, and named parts of their rewards."""
    return Outcomes(
        rewards=torch.tensor([r for group in rewards for r in group]),
        groups=torch.tensor([g for g, group in enumerate(rewards) for _ in group]),
        num_groups=len(rewards),
        lengths=torch.ones(sum(map(len, rewards))),
        parts={
            name: torch.tensor([r for group in values for r in group], dtype=torch.float64)
            for name, values in parts.items()
        },
    )


@proves(grpo, "std_over = batch", against=DEFINITION)
def test_the_deviation_may_be_that_of_the_batch():
    groups = [[1.0, 0.0, 0.5], [4.0, 2.0], [7.0]]
    flat = [r for group in groups for r in group]
    expected = [
        (r - (np.mean(group) if len(group) > 1 else 0.0)) / (np.std(flat, ddof=1) + 1e-3)
        for group in groups
        for r in group
    ]
    found = grpo(several(groups), GrpoOptions(std_over="batch", epsilon=1e-3))
    assert found.tolist() == pytest.approx(expected)


@proves(grpo, "std_over = advantages", against=DEFINITION)
def test_the_deviation_may_be_that_of_all_advantages_of_the_batch():
    groups = [[1.0, 0.0, 0.5], [4.0, 2.0], [7.0, 7.0]]
    centered = [r - np.mean(group) for group in groups for r in group]
    expected = [a / (np.std(centered, ddof=1) + 1e-3) for a in centered]
    found = grpo(several(groups), GrpoOptions(std_over="advantages", epsilon=1e-3))
    assert found.tolist() == pytest.approx(expected)


def leave_one_out(rewards: list[float]) -> list[float]:
    """NeMo-RL's advantages of one prompt: baseline and deviation are of the other answers."""
    found = []
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        mean = math.fsum(others) / len(others)
        squares = math.fsum((r - mean) ** 2 for r in others)
        std = math.sqrt(squares / (len(others) - 1)) if len(set(others)) > 1 else 0.0
        found.append((reward - mean) / (std + 1e-6) if std > 0 else reward - mean)
    return found


@proves(grpo, "std_over = siblings", against=DEFINITION)
@given(
    groups=st.lists(
        st.lists(st.sampled_from([0.0, 0.35, 1.0, -0.5, 2.25, 1e-3]), min_size=2),
        min_size=1,
        max_size=4,
    )
)
@settings(deadline=None, max_examples=60)
def test_baseline_and_deviation_may_be_those_of_the_other_siblings(groups: list[list[float]]):
    options = GrpoOptions(std_over="siblings", leave_one_out=True)
    expected = [a for rewards in groups for a in leave_one_out(rewards)]
    # rewards are float32: 0.35 less a mean of 0.35 is 5e-9
    np.testing.assert_allclose(grpo(several(groups), options), expected, rtol=1e-5, atol=1e-6)


def test_an_advantage_is_not_divided_where_the_other_siblings_are_equal():
    options = GrpoOptions(std_over="siblings", leave_one_out=True)
    for reward in (0.35, 1e6 / 3):  # a rounded deviation of equal rewards would divide
        found = grpo(outcomes([reward] * 7 + [0.0]), options).tolist()
        assert found[-1] == pytest.approx(-reward)
        # the others: six of the reward and the 0 have mean 6/7 and variance 1/7 of its square
        assert found[:7] == pytest.approx([reward / 7 / (reward / math.sqrt(7) + 1e-6)] * 7)
    assert grpo(outcomes([1.0, 0.0]), options).tolist() == [1.0, -1.0]
    assert grpo(outcomes([2.0, 2.0, 2.0]), options).tolist() == [0.0] * 3


@proves(maxrl, against=DEFINITION)
def test_maxrl_divides_by_the_mean_reward():
    found = maxrl(several([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0], [1.0]]), NONE)
    # success rates 1/4 and 3/4: a right answer to a hard prompt has three times the weight
    expected = [3.0, -1.0, -1.0, -1.0, 1 / 3, 1 / 3, 1 / 3, -1.0, 0.0, 0.0, 0.0]
    assert found.tolist() == pytest.approx(expected)


def test_maxrl_refuses_rewards_whose_mean_is_no_rate():
    with pytest.raises(ValueError, match="maxrl needs rewards >= 0, got -1"):
        maxrl(several([[1.0, -1.0]]), NONE)


def stated_gdpo(parts: list[list[list[float]]], weights: list[float], eps: float) -> list[float]:
    """Normalize each part within its group, add them up, normalize over all trajectories."""
    sums: list[float] = []
    for g in range(len(parts[0])):
        for i in range(len(parts[0][g])):
            total = 0.0
            for weight, part in zip(weights, parts, strict=True):
                there = [r for r in part[g] if not math.isnan(r)]
                if math.isnan(part[g][i]) or len(there) < 2:
                    continue
                total += weight * (part[g][i] - np.mean(there)) / (np.std(there, ddof=1) + eps)
            sums.append(total)
    return [(s - np.mean(sums)) / (np.std(sums, ddof=1) + eps) for s in sums]


RIGHT = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]]
SHORT = [[0.9, 0.1, 0.5, 0.5], [0.2, 0.2, 0.2, 0.2]]
STYLE = [[1.0, 2.0, math.nan, 4.0], [math.nan, 1.0, math.nan, math.nan]]


@proves(gdpo, against=DEFINITION)
def test_gdpo_normalizes_each_part_of_the_reward_before_it_adds_them():
    for weights in [
        {"right": 1.0, "short": 1.0, "style": 1.0},
        {"right": 1.0, "short": 0.25},
        {"right": 1.0, "short": 0.25, "of another source": 3.0},
    ]:
        step = several(RIGHT, right=RIGHT, short=SHORT, style=STYLE, score=RIGHT)
        found = gdpo(step, GdpoOptions(weights=weights, epsilon=1e-3))
        parts = {"right": RIGHT, "short": SHORT, "style": STYLE}
        there = [name for name in weights if name in parts]
        expected = stated_gdpo([parts[n] for n in there], [weights[n] for n in there], 1e-3)
        assert found.tolist() == pytest.approx(expected)


def test_what_does_not_deviate_is_0_without_an_epsilon():
    """A part that a whole group has alike is usual, and 0 / 0 would reject the step."""
    step = several([[1.0, 1.0], [0.0, 1.0]], right=[[1.0, 1.0], [0.0, 1.0]], style=[[2.0] * 2] * 2)
    none = {"epsilon": 0.0}
    assert grpo(step, GrpoOptions(**none)).tolist()[:2] == [0.0, 0.0]
    assert pass_at_k(step, PassAtKOptions(**none)).tolist()[:2] == [0.0, 0.0]
    weighed = gdpo(step, GdpoOptions(weights={"right": 1.0, "style": 1.0}, **none)).tolist()
    assert weighed == pytest.approx([0.0, 0.0, -math.sqrt(1.5), math.sqrt(1.5)])
    assert gdpo(step, GdpoOptions(weights={"style": 1.0}, **none)).tolist() == [0.0] * 4
    whole = GrpoOptions(std_over="batch", **none)
    assert grpo(several([[3.0, 3.0], [3.0, 3.0]]), whole).tolist() == [0.0] * 4


@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
def test_a_reward_that_is_no_number_makes_none_of_its_group(epsilon: float):
    """The learner rejects such a step: a 0 in its place would be trained."""
    step = several([[math.nan, 1.0], [0.0, 1.0]])
    for found in (
        grpo(step, GrpoOptions(epsilon=epsilon)),
        grpo(step, GrpoOptions(epsilon=epsilon, std_over="batch")),
    ):
        assert all(math.isnan(value) for value in found.tolist()[:2])


def test_gdpo_names_the_missing_parts():
    for parts, weights, message in [
        ({}, {"right": 1.0}, "names right; the parts of these rewards are none"),
        (
            {"right": RIGHT, "score": RIGHT},
            {"rihgt": 1.0, "shrot": 1.0},
            "weights names rihgt, shrot; the parts of these rewards are right, score",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            gdpo(several(RIGHT, **parts), GdpoOptions(weights=weights))


@proves(zero, against=DEFINITION)
def test_zero_is_zero():
    assert zero(several(RIGHT), NONE).tolist() == [0.0] * 8


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"part 'right' has shape \(3,\), expected \(8,\)"):
        several(RIGHT, right=[[1.0, 2.0, 3.0]])
