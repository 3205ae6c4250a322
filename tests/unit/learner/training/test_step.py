import numpy as np
import pytest
import torch

from slipstream.learner.batches.orders import NonFiniteError
from slipstream.learner.training.step import TrainedMinibatch
from tests.support.bigrams import (
    NUM_TOKENS,
    Bigrams,
    Values,
    algorithm,
    data,
    minibatches,
    train,
    train_parts,
    with_critic,
)


def step_of(*bad: int) -> tuple[dict[str, float], list[TrainedMinibatch], Bigrams]:
    policy = Bigrams(*bad)
    figures, trained = train_parts(policy, minibatches(), data(), algorithm())
    assert policy.updates == 3, "a minibatch was not tried"
    return figures, trained, policy


def test_minibatches_that_are_not_finite_are_counted_and_are_in_no_other_figure():
    for bad in [(), (0,), (1,), (0, 2)]:
        figures, trained, _ = step_of(*bad)
        assert [one.number for one in trained] == [n for n in range(3) if n not in bad]
        assert figures["policy/skipped_minibatches"] == len(bad)
        assert figures["policy/tokens"] == 24 * (3 - len(bad))
        assert 0.0 < figures["policy/entropy"] < np.log(NUM_TOKENS)


def test_a_step_of_which_no_minibatch_is_finite_is_none():
    with pytest.raises(NonFiniteError, match="update 0 is not finite"):
        step_of(0, 1, 2)


def test_the_first_minibatch_costs_no_proximal_pass_and_the_others_are_of_the_start_of_the_step():
    start = Bigrams()
    _, trained, policy = step_of()
    assert policy.forwards == 4
    for one, minibatch in zip(trained, minibatches(), strict=True):
        for got, expected in zip(one.proximal, start.logprobs(minibatch.batches), strict=True):
            assert torch.equal(got, expected)


def test_rewarded_tokens_become_likelier_under_their_policy():
    policy = Bigrams()
    batch = minibatches(1)[0].batches[0]
    before = policy.outputs(batch).logprobs.detach()
    train(policy, algorithm(reduce="token-sum"))
    moved = (policy.outputs(batch).logprobs.detach() - before)[batch.loss_mask]
    assert moved[:6].sum() > 0 > moved[6:].sum()


def test_critic_warm_up_trains_the_critic_and_not_the_policy():
    critic = Values()
    policy = with_critic(Bigrams(), critic)
    before = policy.logits.detach().clone()
    chosen = algorithm(preset="ppo", critic={"warmup_steps": 6})
    figures = train(policy, chosen)
    assert torch.equal(policy.logits, before)
    assert critic.updates == 1
    assert critic.table.abs().max() > 0
    # Of values 0 and lambda 0.95, the reward on the last of six tokens; rewards are 0.5 and 0.
    expected = np.mean([0.5, 0.0, 1.5, 0.0]) * np.mean([0.95**k for k in range(6)])
    assert figures["critic/return"] == pytest.approx(expected)
    train(policy, chosen, data(1, step=6))
    assert not torch.equal(policy.logits, before)


@pytest.mark.parametrize("bad", [(0,), (0, 1, 2)])
def test_a_critic_that_is_not_finite_is_counted_and_the_policy_is_trained(bad: tuple[int, ...]):
    critic, alone = Values(*bad), Bigrams()
    policy = with_critic(Bigrams(), critic)
    figures = train(policy, algorithm(preset="ppo"), data(), minibatches())
    train(with_critic(alone, Values()), algorithm(preset="ppo"), data(), minibatches())
    assert critic.updates == 3
    assert figures["critic/skipped_minibatches"] == len(bad)
    assert figures["policy/skipped_minibatches"] == 0
    assert ("critic/loss" in figures) is (len(bad) < 3)
    assert torch.equal(policy.logits, alone.logits)
    assert not torch.equal(policy.logits, Bigrams().logits)


def test_a_step_that_the_policy_refuses_leaves_its_critic_as_it_was():
    critic = Values()
    policy = with_critic(Bigrams(0, 1, 2), critic)
    with pytest.raises(NonFiniteError, match="update 0 is not finite"):
        train(policy, algorithm(preset="ppo"), data(), minibatches())
    assert policy.updates == 3
    assert critic.updates == 0
    assert torch.equal(critic.table, torch.zeros(NUM_TOKENS))


def test_a_step_of_the_critic_alone_of_which_nothing_is_finite_is_none():
    critic = Values(0, 1, 2)
    warming = algorithm(preset="ppo", critic={"warmup_steps": 6})
    with pytest.raises(NonFiniteError, match="the critic's update 0 is not finite"):
        train(with_critic(Bigrams(), critic), warming, data(), minibatches())
    assert critic.updates == 3
