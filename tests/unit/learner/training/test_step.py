from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.algos.compose import Algorithm, LossInputs, PolicyOutputs, Prepared
from slipstream.algos.config import choice_of
from slipstream.algos.corrections import Correction, CorrectionInputs
from slipstream.algos.diagnostics import Sums, add_sums
from slipstream.algos.parts import NoOptions, correction
from slipstream.algos.section import AlgoSection
from slipstream.learner.batches.orders import NonFiniteError
from slipstream.learner.batches.packing import PackedBatch, TrainTrajectory, pack
from slipstream.learner.batches.plan import MinibatchPlan
from slipstream.learner.training.prepare import PreparedMinibatch, prepare
from slipstream.learner.training.step import TrainedMinibatch, train_step
from slipstream.learner.training.step_data import StepData, batch_figures, step_data
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.broker import DeliveredGroup, DeliveredTrajectory
from slipstream.wire.messages.trajectory import Turn
from slipstream.wire.process.phases import PhaseClock
from tests.support.delivered_groups import groups, trajectory
from tests.support.own_parts import SHOWN

CPU = torch.device("cpu")
NUM_TOKENS = 7


def test_outcomes_come_in_the_order_of_groups_and_siblings():
    data = step_data(groups(), step=5, seed=3)
    assert data.outcomes.rewards.tolist() == [1.0, 0.0, 0.5, 0.5]
    assert data.outcomes.groups.tolist() == [0, 0, 1, 1]
    assert data.outcomes.lengths.tolist() == [6, 6, 6, 6]
    assert data.is_truncated.tolist() == [True, False, True, False]


def test_batch_figures_weigh_staleness_by_tokens():
    figures = batch_figures(groups(), step=5)
    assert figures["reward/mean"] == pytest.approx(0.5)
    assert figures["response/tokens"] == 6
    assert figures["response/truncated"] == 0.5
    assert figures["staleness/oldest"] == 2
    # 6 tokens at lag 2, then 3 at 2 and 3 at 0, 6 at 0, 6 at 1
    assert figures["staleness/mean"] == pytest.approx((12 + 6 + 0 + 0 + 6) / 24)


def test_batch_figures_have_the_mean_of_each_number_that_rewards_come_with():
    group, other = groups()
    first, second = group.trajectories
    parts = [{"score": 1.0, "off_by": 2.0, "a.b": 0.0}, {"score": 0.0, "off_by": 5.0}]
    both = [
        msgspec.structs.replace(one, parts=own)
        for one, own in zip((first, second), parts, strict=True)
    ]
    figures = batch_figures([msgspec.structs.replace(group, trajectories=both), other], step=5)
    of_parts = {name: value for name, value in figures.items() if "/part/" in name}
    assert of_parts == {"reward/part/a.b": 0.0, "reward/part/off_by": 3.5}


def test_batch_figures_count_turns_and_branches():
    def of_turns(one: DeliveredTrajectory, *branches: int) -> DeliveredTrajectory:
        first, end = one.header.num_prompt_tokens, one.header.num_tokens
        turns = (Turn(first, 1), Turn(first + 2, 1), Turn(first + 4, end - first - 4))
        header = msgspec.structs.replace(
            one.header, turns=turns, branches=branches, version_runs=one.header.version_runs[:1]
        )
        return msgspec.structs.replace(one, header=header)

    one, other = groups()
    figures = batch_figures([one, other], step=5)
    assert [figures[f"turns/{name}"] for name in ("mean", "max", "branched")] == [1.0, 1.0, 0.0]
    first, second = other.trajectories
    branch = first.header.num_prompt_tokens + 1
    mixed = msgspec.structs.replace(other, trajectories=(of_turns(first, branch), of_turns(second)))
    figures = batch_figures([one, mixed], step=5)
    assert [figures[f"turns/{name}"] for name in ("mean", "max", "branched")] == [2.0, 3.0, 0.25]


def test_the_variance_of_a_group_counts_to_the_lag_of_its_oldest_token():
    figures = batch_figures(groups(), step=5, num_lags=3)
    assert figures["reward/group_variance"] == pytest.approx(0.125)
    assert figures["reward/group_variance@lag2"] == pytest.approx(0.25)
    assert figures["reward/group_variance@lag1"] == pytest.approx(0.0)
    assert "reward/group_variance@lag0" not in figures


class Alone:
    """One replica's word is that of all."""

    rank = 0

    def summed(self, values: Tensor) -> Tensor:
        return values

    def gathered(self, values: Tensor) -> Tensor:
        return values


class Bigrams:
    """A policy of one logit per pair of tokens, under plain gradient descent. Updates named in
    ``bad`` are not finite."""

    critic = None
    reference = None
    teacher = None

    def __init__(self, *bad: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.logits = torch.randn(NUM_TOKENS, NUM_TOKENS, generator=generator).requires_grad_()
        self.replicas = Alone()
        self.updates = 0
        self.forwards = 0
        self._bad = bad

    def outputs(self, batch: PackedBatch) -> PolicyOutputs:
        rows = self.logits.log_softmax(-1)[batch.token_ids.roll(1)]
        chosen = rows.gather(-1, batch.token_ids.unsqueeze(-1)).squeeze(-1)
        entropy = -(rows.exp() * rows).sum(-1)
        squares = rows.exp().square().sum(-1)
        masked = [torch.where(batch.loss_mask, v, 0.0) for v in (chosen, entropy, squares)]
        return PolicyOutputs(masked[0], masked[1], squares=masked[2])

    def on_all_stages(self, values: Sequence[Tensor], _like: object) -> list[Tensor]:
        return list(values)

    @torch.no_grad()
    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        return [one.logprobs for one in self.proximal(batches)]

    @torch.no_grad()
    def proximal(self, batches: Sequence[PackedBatch]) -> list[PolicyOutputs]:
        self.forwards += len(batches)
        return [self.outputs(batch) for batch in batches]

    def update(
        self,
        batches: Sequence[PackedBatch],
        loss: Callable[[int, PackedBatch, PolicyOutputs], tuple[Tensor, Sums]],
    ) -> tuple[dict[str, float], float]:
        number, self.updates = self.updates, self.updates + 1
        if number in self._bad:
            raise NonFiniteError(f"update {number} is not finite")
        return descend(self.logits, [loss(i, b, self.outputs(b)) for i, b in enumerate(batches)])


class Values:
    """A critic of one value per token. Updates named in ``bad`` are not finite."""

    def __init__(self, *bad: int) -> None:
        self.table = torch.zeros(NUM_TOKENS, requires_grad=True)
        self.updates = 0
        self._bad = bad

    def outputs(self, batch: PackedBatch) -> Tensor:
        return torch.where(batch.loss_mask, self.table[batch.token_ids.roll(1)], 0.0)

    @torch.no_grad()
    def values(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        return [self.outputs(batch) for batch in batches]

    def update(
        self,
        batches: Sequence[PackedBatch],
        loss: Callable[[int, PackedBatch, Tensor], tuple[Tensor, Sums]],
    ) -> tuple[dict[str, float], float]:
        number, self.updates = self.updates, self.updates + 1
        if number in self._bad:
            raise NonFiniteError(f"the critic's update {number} is not finite")
        return descend(self.table, [loss(i, b, self.outputs(b)) for i, b in enumerate(batches)])


def descend(
    parameter: Tensor, results: Sequence[tuple[Tensor, Sums]]
) -> tuple[dict[str, float], float]:
    totals: Sums = {}
    for loss, sums in results:
        add_sums(totals, {**sums, "loss": loss.detach()})
    total = torch.stack([loss for loss, _ in results]).sum()
    (gradient,) = torch.autograd.grad(total, parameter)
    with torch.no_grad():
        parameter -= 0.5 * gradient
    figures = {name: float(total) for name, total in totals.items()}
    return figures, float(gradient.norm())


def algorithm(**settings: object) -> Algorithm:
    section = AlgoSection(**settings)  # type: ignore[arg-type]  # TOML's types
    return Algorithm(choice_of(section), max_response_tokens=6)


def sequences(count: int, step: int = 5) -> list[TrainTrajectory]:
    rng = np.random.default_rng(0)
    mask = np.arange(10) >= 4
    return [
        TrainTrajectory(
            token_ids=rng.integers(0, NUM_TOKENS, 10).astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -2.0 + 0.2 * rng.normal(size=10), 0.0).astype("f4"),
            temperature=1.0,
            version_steps=np.full(10, step - i % 2, np.int32),
        )
        for i in range(count)
    ]


class Minibatch(NamedTuple):
    """A minibatch of one replica."""

    batches: list[PackedBatch]
    plan: MinibatchPlan


def minibatches(num: int = 3) -> list[Minibatch]:
    return [minibatch((i, i + 1), (i + 2, i + 3)) for i in range(0, 4 * num, 4)]


def minibatch(*indices: Sequence[int]) -> Minibatch:
    """Make a minibatch of these trajectories of a step, one microbatch of each argument."""
    plan = MinibatchPlan((tuple(map(tuple, indices)),))
    everything = sequences(max(plan.members) + 1)
    return Minibatch(
        batches=[pack([everything[i] for i in share], CPU) for share in indices], plan=plan
    )


def data(num: int = 3, *, step: int = 5) -> StepData:
    delivered = [
        DeliveredGroup(
            group_id=g,
            trajectories=(trajectory(g, 0, g % 2 + 0.5, (4, 5)), trajectory(g, 1, 0.0, (4, 4))),
        )
        for g in range(2 * num)
    ]
    return step_data(delivered, step=step, seed=0)


def train_parts(
    policy: Bigrams, parts: Sequence[Minibatch], given: StepData, chosen: Algorithm
) -> tuple[dict[str, float], list[TrainedMinibatch]]:
    batches, plans = [part.batches for part in parts], [part.plan for part in parts]
    return train_step(policy, batches, plans, given, chosen, PhaseClock())  # type: ignore[arg-type]  # a fake


def prepare_part(given: StepData, shaped: Prepared, chosen: Algorithm) -> PreparedMinibatch:
    part = minibatch((0, 1), (2, 3))
    policy = Bigrams()
    (prepared,) = prepare(policy, [part.batches], [part.plan], given, shaped, chosen)  # type: ignore[arg-type]  # a fake
    return prepared


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


def train(
    policy: Bigrams,
    chosen: Algorithm,
    given: StepData | None = None,
    parts: Sequence[Minibatch] | None = None,
) -> dict[str, float]:
    figures, _ = train_parts(policy, parts or minibatches(1), given or data(1), chosen)
    return figures


def truncated(given: StepData, *which: int) -> StepData:
    """Return the same step, in which these trajectories and no others were cut off."""
    is_truncated = torch.tensor([i in which for i in range(len(given.is_truncated))])
    return replace(given, is_truncated=is_truncated)


def with_critic(policy: Bigrams, critic: Values) -> Bigrams:
    policy.critic = critic  # type: ignore[assignment]  # a fake
    return policy


def with_reference(policy: Bigrams) -> Bigrams:
    """Give the policy a reference other than itself."""
    reference = Bigrams()
    with torch.no_grad():
        reference.logits += torch.randn(7, 7, generator=torch.Generator().manual_seed(2))
    policy.reference = reference  # type: ignore[assignment]  # a fake
    return policy


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


# ---- teachers, right answers, and what parts are shown ----


def teacher_of(policy: Bigrams) -> Bigrams:
    teacher = Bigrams()
    with torch.no_grad():
        teacher.logits.copy_(policy.logits.flip(0) * 1.5)
    return teacher


def taught(policy: Bigrams, chosen: Algorithm, given: StepData | None = None) -> dict[str, float]:
    policy.teacher = teacher_of(policy)  # type: ignore[assignment]  # a fake of a fake
    return train(policy, chosen, given or data(), minibatches())


def gap_of(policy: Bigrams, teacher: Bigrams) -> float:
    """Return KL(policy || teacher), averaged over the tokens before."""
    q, p = policy.logits.log_softmax(-1), teacher.logits.log_softmax(-1)
    return (q.exp() * (q - p)).sum(-1).mean().item()


def test_a_teacher_alone_draws_the_policy_to_itself():
    policy = Bigrams()
    chosen = algorithm(preset="distill", teacher={"coefficient": 1.0, "model": "/t"})
    given = data()
    given = replace(given, outcomes=replace(given.outcomes, rewards=torch.zeros(12)))
    before = gap_of(policy, teacher_of(Bigrams()))
    figures = taught(policy, chosen, given)
    assert gap_of(policy, teacher_of(Bigrams())) < before
    tokens = [batch for part in minibatches() for batch in part.batches]
    with torch.no_grad():
        gaps = [
            Bigrams().outputs(b).logprobs - teacher_of(Bigrams()).outputs(b).logprobs
            for b in tokens
        ]
    mean = float(torch.cat([g[b.loss_mask] for g, b in zip(gaps, tokens, strict=True)]).mean())
    assert figures["policy/kl_teacher"] == pytest.approx(mean, rel=1e-5)


def test_a_teacher_beside_rewards_adds_to_their_advantages():
    chosen = algorithm(reduce="token-sum", teacher={"coefficient": 0.3, "model": "/t"})
    policy, by_hand = Bigrams(), Bigrams()
    taught(policy, chosen)
    teacher = teacher_of(Bigrams())
    seen: list[Tensor] = []

    class Reported(Algorithm):
        def loss(
            self, given: LossInputs, current: PolicyOutputs, *, num_lags: int = 0
        ) -> tuple[Tensor, Sums]:
            batch = batches[len(seen)]
            with torch.no_grad():
                difference = teacher.outputs(batch).logprobs - Bigrams().outputs(batch).logprobs
            seen.append(difference)
            more = 0.3 * torch.where(batch.loss_mask, difference, 0.0)
            return super().loss(
                replace(given, advantages=given.advantages + more), current, num_lags=num_lags
            )

    batches = [batch for part in minibatches() for batch in part.batches]
    reported = Reported(algorithm(reduce="token-sum").choice, max_response_tokens=6)
    train(by_hand, reported, data(), minibatches())
    assert len(seen) == len(batches)
    assert torch.allclose(policy.logits, by_hand.logits, atol=1e-5)
    plain = Bigrams()
    train(plain, algorithm(reduce="token-sum"), data(), minibatches())
    assert (plain.logits - policy.logits).abs().max() > 1e-2


def test_right_answers_become_likelier_whatever_their_advantage_is():
    chosen = algorithm(advantage="zero", likelihood={"coefficient": 1.0, "least_reward": 1.5})
    given = data()
    rewards = given.outcomes.rewards
    assert 0 < (rewards >= 1.5).sum() < len(rewards)
    policy, by_hand = Bigrams(), Bigrams()
    train(policy, chosen, given, minibatches())
    for part in minibatches():
        right = [i for i in part.plan.members if rewards[i] >= 1.5]
        if not right:
            continue
        batch = pack([sequences(12)[i] for i in right], CPU)
        logprobs = by_hand.outputs(batch).logprobs
        descend(by_hand.logits, [(-logprobs.sum() / batch.loss_mask.sum(), {})])
    assert torch.allclose(policy.logits, by_hand.logits, atol=1e-5)


def test_right_answers_are_counted_as_often_as_they_are_trained():
    chosen = algorithm(likelihood={"coefficient": 1.0, "least_reward": 0.5})
    given, copies = data(1), torch.tensor([2, 1, 3, 0])
    assert given.outcomes.rewards.tolist() == [0.5, 0.0, 1.5, 0.0]
    share = prepare_part(given, Prepared(rewards=given.outcomes.rewards, copies=copies), chosen)
    assert [one.right and one.right.num_tokens for one in share.microbatches] == [6 * (2 + 3)] * 2


def test_a_surrogate_is_not_shown_what_is_not_trained():
    chosen = algorithm(surrogate="tests.support.own_parts:shown", correction="none")
    given, copies = data(1), torch.tensor([1, 0, 2, 1])
    share = prepare_part(given, Prepared(rewards=given.outcomes.rewards, copies=copies), chosen)
    trained = [sequences(4)[i] for i in (0, 2, 3)]
    behavior = np.concatenate([one.behavior_logprobs[one.loss_mask] for one in trained])
    for one in share.microbatches:
        assert one.minibatch is not None
        assert one.minibatch.behavior.tolist() == behavior.tolist()
        assert len(one.minibatch.proximal) == len(one.minibatch.advantages) == len(behavior)


def test_a_surrogate_is_shown_what_it_needs():
    SHOWN.clear()
    policy = with_reference(Bigrams())
    chosen = algorithm(surrogate="tests.support.own_parts:shown", correction="none")
    train(policy, chosen, data(), minibatches())
    assert len(SHOWN) == 6
    parts = minibatches()
    for number, shown in enumerate(SHOWN):
        batch = parts[number // 2].batches[number % 2]
        mask = batch.loss_mask
        assert shown.entropy is not None
        assert shown.reference is not None
        assert shown.lags is not None
        assert shown.minibatch is not None
        assert (shown.entropy[mask] > 0).all()
        expected = policy.reference.outputs(batch).logprobs
        assert torch.equal(shown.reference, expected)
        assert shown.lags[mask].tolist() == (5 - batch.version_steps[mask]).tolist()
        whole = parts[number // 2].batches
        behavior = torch.cat([one.behavior_logprobs[one.loss_mask] for one in whole])
        assert torch.equal(shown.minibatch.behavior, behavior)
        assert len(shown.minibatch.proximal) == len(shown.minibatch.advantages) == len(behavior)
    SHOWN.clear()


def test_a_surrogate_logs_a_figure_of_its_own():
    policy = Bigrams()
    part = minibatches(1)[0]
    own, num_tokens = 0.0, 0
    for batch in part.batches:
        mask = batch.loss_mask
        shift = policy.outputs(batch).logprobs.detach() - batch.behavior_logprobs
        own, num_tokens = own + float(shift[mask].sum()), num_tokens + int(mask.sum())
    chosen = algorithm(surrogate="tests.support.own_parts:square", correction="none")
    figures = train(policy, chosen, parts=[part])
    assert figures["own/shift"] == pytest.approx(own / num_tokens, rel=1e-4)


SEEN: list[CorrectionInputs] = []


@correction("probe", needs=("entropy", "reference", "whole_minibatch"))
def probe(inputs: CorrectionInputs, _: NoOptions) -> Correction:
    """Note what it is shown, and correct nothing."""
    SEEN.append(inputs)
    return Correction(weights=torch.ones_like(inputs.log_ratios), keep=inputs.packing.mask)


def test_a_correction_of_a_minibatch_is_shown_what_it_needs():
    SEEN.clear()
    policy = with_reference(Bigrams())
    name = f"{__name__}:probe"
    train(policy, algorithm(correction={name: {}}), data(), minibatches())
    assert len(SEEN) == 3
    for seen, part in zip(SEEN, minibatches(), strict=True):
        with torch.no_grad():
            first = Bigrams()
            entropy = torch.cat([first.outputs(batch).entropy for batch in part.batches])
            reference = torch.cat([policy.reference.outputs(b).logprobs for b in part.batches])
        assert seen.entropy is not None
        assert seen.reference is not None
        assert torch.equal(seen.entropy, entropy)
        assert torch.equal(seen.reference, reference)
    SEEN.clear()


@correction("every-third", needs=("whole_minibatch",))
def every_third(inputs: CorrectionInputs, _: NoOptions) -> Correction:
    """Reject every third token of the minibatch; return other values for each token."""
    numbers = torch.arange(len(inputs.packing.mask))
    return Correction(
        weights=numbers.float(),
        keep=inputs.packing.mask & (numbers % 3 > 0) & (inputs.packing.sequence != 2),
        proximal=-numbers.float(),
        penalty=10.0 * numbers,
    )


def test_a_correction_of_a_minibatch_is_divided_among_its_microbatches():
    chosen = algorithm(
        preset="grpo",
        correction={f"{__name__}:every_third": {}},
        reduce={"name": "token-mean", "denominator": "kept"},
    )
    given = data(1)
    copies = torch.tensor([1, 2, 1, 0])  # all of 2 is rejected, 3 was not drawn
    share = prepare_part(given, Prepared(rewards=given.outcomes.rewards, copies=copies), chosen)
    numbers = torch.arange(40).reshape(4, 10)  # of 4 trajectories, whose responses begin at 4
    is_response = torch.arange(10) >= 4
    keep = is_response & (numbers % 3 > 0) & (torch.arange(4) < 2).unsqueeze(-1)
    for at, one in enumerate(share.microbatches):
        of_one = numbers[2 * at : 2 * at + 2].flatten()
        assert one.correction is not None
        assert one.correction.proximal is not None
        assert one.correction.penalty is not None
        is_kept = keep[2 * at : 2 * at + 2].flatten()
        assert one.correction.keep.tolist() == is_kept.tolist()
        assert torch.equal(one.correction.proximal, -of_one.float())
        assert torch.equal(one.correction.weights, of_one.float())
        assert torch.equal(one.correction.penalty, 10.0 * of_one)
    kept = share.microbatches[0].kept
    assert kept is not None
    by_trajectory = keep.sum(-1)
    assert by_trajectory.tolist() == [4, 4, 0, 0]
    assert kept.num_tokens == (copies * by_trajectory).sum() == 12
    assert kept.num_sequences == 3
    assert (share.denominators.num_tokens, share.denominators.num_sequences) == (24, 4)


@pytest.mark.parametrize("over", ["batch", "group"])
@pytest.mark.parametrize("how", ["", "-mean", "-leave-one-out"])
def test_advantages_are_shifted_and_scaled_by_the_setting(over: str, how: str):
    chosen = algorithm(advantage="discounted-returns", correction="none", whiten=over + how)
    plain = algorithm(advantage="discounted-returns", correction="none", whiten="none")
    given = data(1)
    given = replace(
        given,
        outcomes=replace(
            given.outcomes, rewards=torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
        ),
    )

    def advantages(of: Algorithm) -> np.ndarray:
        prepared = of.prepared(given.outcomes, given.is_truncated, given.step_generator())
        share = prepare_part(given, prepared, of)
        return torch.cat([one.advantages for one in share.microbatches]).numpy().reshape(4, 10)

    before, after = advantages(plain), advantages(chosen)
    for rows in [(0, 1, 2, 3)] if over == "batch" else [(0, 1), (2, 3)]:
        x = before[list(rows), 4:].flatten().astype(np.float64)
        centered = x - x.mean()
        expected = {
            "": centered / np.sqrt(x.var(ddof=1) + 1e-8),
            "-mean": centered,
            "-leave-one-out": np.array([v - np.delete(x, i).mean() for i, v in enumerate(x)]),
        }[how]
        assert after[list(rows), 4:].flatten() == pytest.approx(expected, abs=1e-5)
        assert (after[list(rows), :4] == 0).all()


def test_the_loss_of_a_step_is_the_mean_of_its_minibatches():
    chosen = algorithm(surrogate="policy-gradient", correction="none", reduce="token-sum")
    given, parts = data(2), minibatches(2)
    figures = train(Bigrams(), chosen, given, parts)
    policy, losses = Bigrams(), []
    advantages = chosen.trajectory_advantages(given.outcomes).float()
    for part in parts:
        logprobs = [policy.outputs(batch).logprobs for batch in part.batches]
        each = torch.stack(
            [one[:10].sum() for one in logprobs] + [one[10:].sum() for one in logprobs]
        )
        members = [*part.plan.members[::2], *part.plan.members[1::2]]
        losses.append(-(advantages[members] * each).sum())
        descend(policy.logits, [(losses[-1], {})])
    assert figures["policy/loss"] == pytest.approx(sum(one.item() for one in losses) / 2, rel=1e-5)
    assert abs(figures["policy/loss"]) > 0.1


def test_an_optimal_token_baseline_compares_siblings_in_other_microbatches():
    """However siblings are spread over microbatches, the step is the same."""
    given = data(2)
    chosen = algorithm(advantage="optimal-token-baseline", reduce="token-sum", correction="none")
    together, apart, plain = Bigrams(), Bigrams(), Bigrams()
    train(together, chosen, given, [minibatch((0, 1, 2, 3, 4, 5, 6, 7))])
    train(apart, chosen, given, [minibatch((0, 4), (5, 2), (7, 1), (3, 6))])
    assert torch.allclose(together.logits, apart.logits, atol=1e-5)
    train(
        plain,
        algorithm(advantage="reinforce++-baseline", reduce="token-sum", correction="none"),
        given,
        [minibatch((0, 1, 2, 3, 4, 5, 6, 7))],
    )
    assert (plain.logits - together.logits).abs().max() > 1e-2


def test_parts_of_rewards_reach_the_advantage():
    delivered = [
        DeliveredGroup(
            group_id=g,
            trajectories=tuple(
                msgspec.structs.replace(
                    trajectory(g, sibling, 1.0, (4, 5)),
                    parts={"right": float(sibling), "short": 1.0 - sibling}
                    if g
                    else {"right": 1.0},
                )
                for sibling in range(2)
            ),
        )
        for g in range(2)
    ]
    parts = step_data(delivered, step=5, seed=0).outcomes.parts
    assert sorted(parts) == ["right", "short"]
    assert parts["right"].tolist() == [1.0, 1.0, 0.0, 1.0]
    assert parts["short"].isnan().tolist() == [True, True, False, False]
    assert parts["short"][2:].tolist() == [1.0, 0.0]


def test_an_advantage_that_the_rewards_are_not_for_is_an_error_of_the_settings():
    for advantage, message in [
        (
            {"name": "gdpo", "weights": {"right": 1.0}},
            "algo.advantage = 'gdpo' cannot be taken here: algo.advantage.weights names right; the",
        ),
        ("maxrl", "algo.advantage = 'maxrl' cannot be taken here: maxrl needs rewards >= 0"),
    ]:
        given = data(1)
        given = replace(
            given, outcomes=replace(given.outcomes, rewards=-given.outcomes.rewards - 1.0)
        )
        with pytest.raises(ConfigError, match=message):
            train(Bigrams(), algorithm(advantage=advantage), given)
