"""Trajectories that are filtered, resampled or charged for their divergence."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.algos.compose import Algorithm
from slipstream.learner.batches.packing import pack
from slipstream.learner.training.step_data import StepData
from tests.support.bigrams import (
    CPU,
    NUM_TOKENS,
    Bigrams,
    Minibatch,
    Values,
    algorithm,
    data,
    descend,
    minibatch,
    minibatches,
    sequences,
    train,
    train_parts,
    with_critic,
    with_reference,
)


def truncated(given: StepData, *which: int) -> StepData:
    """Return the same step, in which these trajectories and no others were cut off."""
    is_truncated = torch.tensor([i in which for i in range(len(given.is_truncated))])
    return replace(given, is_truncated=is_truncated)


FILTERED = {
    "preset": "dr-grpo",
    "reduce": {"name": "sequence-mean-token-sum"},
    "data": {"overlong_filter": True},
}


def test_filtered_trajectories_train_nothing_and_leave_the_denominators_of_their_minibatch():
    policy = Bigrams()
    given = truncated(data(2), 1, 3, 4, 5, 7)  # one is left in the second minibatch
    figures = train(policy, algorithm(**FILTERED), given, minibatches(2))
    assert figures["policy/trained_share"] == 3 / 8
    assert figures["policy/tokens"] == 6 * 3

    other, unfiltered = Bigrams(), algorithm(**{**FILTERED, "data": {}})
    train(other, unfiltered, given, [minibatch((0,), (2,)), minibatch((6,))])
    assert torch.allclose(policy.logits, other.logits, atol=1e-6)
    assert (policy.logits - Bigrams().logits).abs().max() > 1e-2


def test_every_group_weighs_the_same_in_a_minibatch_whatever_of_it_is_there():
    chosen = algorithm(
        surrogate="policy-gradient",
        correction="none",
        reduce="group-mean-token-mean",
        data={"overlong_filter": True},
    )
    given = truncated(data(2), 3)
    parts = [minibatch((0, 4), (5, 2)), minibatch((7, 1), (3, 6))]  # two of each group
    policy, by_hand = Bigrams(), Bigrams()
    train(policy, chosen, given, parts)
    advantages = chosen.trajectory_advantages(given.outcomes).float()
    for of_minibatch in ([(0,), (2,), (4, 5)], [(1,), (6, 7)]):  # siblings that are trained
        means = []
        for siblings in of_minibatch:
            batches = [pack([sequences(8)[i]], CPU) for i in siblings]
            sums = [by_hand.outputs(batch).logprobs.sum() for batch in batches]
            losses = [-advantages[i] * of_one for i, of_one in zip(siblings, sums, strict=True)]
            means.append(torch.stack(losses).sum() / (6 * len(siblings)))
        descend(by_hand.logits, [(torch.stack(means).mean(), {})])
    assert torch.allclose(policy.logits, by_hand.logits, atol=1e-6)
    assert (policy.logits - Bigrams().logits).abs().max() > 1e-2


def test_a_minibatch_of_filtered_trajectories_makes_no_update_and_the_others_do():
    policy, other = Bigrams(), Bigrams()
    given = truncated(data(2), 0, 1, 2, 3)
    figures, trained = train_parts(policy, minibatches(2), given, algorithm(**FILTERED))
    assert policy.updates == 1
    assert [one.number for one in trained] == [1]
    assert figures["policy/skipped_minibatches"] == 0
    train(other, algorithm(**FILTERED), given, minibatches(2)[1:])
    assert torch.allclose(policy.logits, other.logits, atol=1e-6)
    assert not torch.equal(policy.logits, Bigrams().logits)


def test_a_step_of_filtered_trajectories_trains_nothing():
    critic = Values()
    policy = with_critic(Bigrams(), critic)
    figures, trained = train_parts(
        policy,
        minibatches(2),
        truncated(data(2), *range(8)),
        algorithm(preset="ppo", data={"overlong_filter": True}),
    )
    assert trained == []
    assert (policy.updates, critic.updates) == (0, 0)
    assert torch.equal(policy.logits, Bigrams().logits)
    assert figures == {
        "policy/trained_share": 0.0,
        "policy/skipped_minibatches": 0.0,
        "critic/skipped_minibatches": 0.0,
    }


def test_a_critic_neither_learns_from_filtered_trajectories_nor_counts_them():
    def trained(chosen: Algorithm, part: Minibatch) -> tuple[dict[str, float], Tensor]:
        critic = Values()
        with torch.no_grad():
            critic.table += torch.linspace(-1.0, 1.0, NUM_TOKENS)
        policy = with_critic(Bigrams(), critic)
        figures = train(policy, chosen, truncated(data(1), 1, 2), [part])
        of_critic = {name: value for name, value in figures.items() if name.startswith("critic/")}
        return of_critic, critic.table

    figures, table = trained(
        algorithm(preset="ppo", data={"overlong_filter": True}), minibatch((0, 1), (2, 3))
    )
    expected, expected_table = trained(algorithm(preset="ppo"), minibatch((0,), (3,)))
    assert len(figures) == 7
    assert figures == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(table, expected_table, atol=1e-6)
    everyone, _ = trained(algorithm(preset="ppo"), minibatch((0, 1), (2, 3)))
    for name in ("critic/value", "critic/return", "critic/explained_variance", "critic/loss"):
        assert everyone[name] != pytest.approx(figures[name], rel=1e-2), "the filter hides nothing"


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="group-relative"),
        pytest.param({"advantage": "discounted-returns", "whiten": "batch"}, id="whitened"),
        pytest.param(
            {"advantage": "discounted-returns", "whiten": "group"}, id="whitened by group"
        ),
    ],
)
def test_resampled_trajectories_count_as_often_as_they_were_drawn(settings: dict[str, object]):
    sampling = {"resample": "max-random", "resample_share": 0.7}
    chosen = algorithm(**settings, reduce="token-sum", data=sampling)
    policy, given = Bigrams(), data(2)
    rewards = torch.linspace(-1.0, 2.0, 8, dtype=torch.float64).square()
    given = replace(given, outcomes=replace(given.outcomes, rewards=rewards))
    parts = [minibatch((0, 4), (5, 7)), minibatch((2, 6), (1, 3))]
    figures = train(policy, chosen, given, parts)
    copies = chosen.prepared(
        given.outcomes, given.is_truncated, given.step_generator()
    ).copies.tolist()
    assert sum(copies) == 8
    assert min(copies) == 0 < 1 < max(copies)
    assert figures["policy/trained_share"] == sum(c > 0 for c in copies) / 8

    by_hand = Bigrams()
    drawn = [[i for i in part.plan.members for _ in range(copies[i])] for part in parts]
    train(
        by_hand,
        algorithm(**settings, reduce="token-sum"),
        given,
        [minibatch(indices) for indices in drawn if indices],
    )
    assert torch.allclose(policy.logits, by_hand.logits, atol=1e-5)
    assert (policy.logits - Bigrams().logits).abs().max() > 1e-2


def test_a_penalty_in_the_reward_pulls_towards_the_reference():
    policy = with_reference(Bigrams())
    reference = policy.reference
    batches = minibatches(1)[0].batches

    def distance() -> float:
        with torch.no_grad():
            gaps = [policy.outputs(b).logprobs - reference.outputs(b).logprobs for b in batches]
        return float(torch.cat(gaps).square().sum())

    before = distance()
    kl = {"coefficient": 10.0, "name": "k1", "place": "reward"}
    figures = train(policy, algorithm(preset="reinforce++", kl=kl, reduce="token-mean"))
    assert distance() < before
    assert "policy/kl_reference" in figures


def test_a_group_is_compared_by_rewards_that_were_charged_with_the_divergence():
    coefficient = 0.3
    given = data(2)
    parts = [minibatch((0, 4), (7, 2)), minibatch((5, 3), (6, 1))]  # siblings apart
    policy = with_reference(Bigrams())
    charged = given.outcomes.rewards.clone()
    for i, alone in enumerate(sequences(8)):
        batch = pack([alone], CPU)
        with torch.no_grad():
            q, ref = policy.outputs(batch).logprobs, policy.reference.outputs(batch).logprobs
        charged[i] -= coefficient * sum((q - ref)[batch.loss_mask].tolist())
    assert (charged - given.outcomes.rewards).abs().min() > 1e-2

    kl = {"coefficient": coefficient, "name": "k1", "place": "reward"}
    train(policy, algorithm(preset="grpo", kl=kl), given, parts)
    by_hand, uncharged = Bigrams(), Bigrams()
    without = algorithm(preset="grpo", kl={"coefficient": 0.0})
    outcomes = replace(given.outcomes, rewards=charged)
    train(by_hand, without, replace(given, outcomes=outcomes), parts)
    assert torch.allclose(policy.logits, by_hand.logits, atol=1e-5)
    train(uncharged, without, given, parts)
    assert (by_hand.logits - uncharged.logits).abs().max() > 1e-2
