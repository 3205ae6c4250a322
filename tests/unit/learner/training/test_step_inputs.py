"""Teachers and right answers, and what surrogates and corrections are shown."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.algos.compose import Algorithm, LossInputs, PolicyOutputs, Prepared
from slipstream.algos.corrections import Correction, CorrectionInputs
from slipstream.algos.diagnostics import Sums
from slipstream.algos.parts import NoOptions, correction
from slipstream.learner.batches.packing import PackedBatch, pack
from slipstream.learner.batches.plan import MinibatchPlan
from slipstream.learner.training.microbatch import known
from slipstream.learner.training.prepare import PreparedMinibatch, prepare
from slipstream.learner.training.step_data import StepData, step_data
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.broker import DeliveredGroup
from tests.support.bigrams import (
    CPU,
    Alone,
    Bigrams,
    algorithm,
    data,
    descend,
    minibatch,
    minibatches,
    sequences,
    train,
    with_reference,
)
from tests.support.delivered_groups import trajectory
from tests.support.own_parts import SHOWN
from tests.support.waiting import HANG_S


def prepare_part(given: StepData, shaped: Prepared, chosen: Algorithm) -> PreparedMinibatch:
    part = minibatch((0, 1), (2, 3))
    policy = Bigrams()
    (prepared,) = prepare(policy, [part.batches], [part.plan], given, shaped, chosen)  # type: ignore[arg-type]  # a fake
    return prepared


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


def test_groups_are_divided_by_their_tokens_of_the_minibatch_or_by_those_kept():
    chosen = algorithm(
        preset="scalerl", correction={f"{__name__}:every_third": {}}, reduce={"denominator": "kept"}
    )
    given, copies = data(1), torch.tensor([1, 2, 1, 0])
    share = prepare_part(given, Prepared(rewards=given.outcomes.rewards, copies=copies), chosen)
    for one, tokens, kept in zip(share.microbatches, (18, 6), (4 + 2 * 4, 0), strict=True):
        assert one.kept is not None
        assert one.denominators.group_mean is not None
        assert one.kept.group_mean is not None
        assert one.denominators.group_mean.tolist() == [tokens * 2] * 2  # of two groups
        assert one.kept.group_mean.tolist() == [kept] * 2  # of one: all of the other is rejected


class OneOfTwo(Alone):
    """A replica whose sums are with those of another thread."""

    def __init__(self, rank: int, meet: threading.Barrier, held: dict[int, Tensor]) -> None:
        self.rank, self._meet, self._held = rank, meet, held

    def summed(self, values: Tensor) -> Tensor:
        self._held[self.rank] = values
        self._meet.wait(HANG_S)
        total = self._held[0] + self._held[1]
        self._meet.wait(HANG_S)
        return total


def test_groups_are_counted_over_all_replicas():
    chosen = algorithm(
        preset="scalerl",
        correction={"rejection": {"low": 0.9, "high": 1.1}},
        reduce={"denominator": "kept"},
    )
    given, part = data(2), minibatch((0, 5), (1, 6))  # siblings apart
    shaped = chosen.prepared(given.outcomes, given.is_truncated, given.step_generator())
    meet, held = threading.Barrier(2), dict[int, Tensor]()

    def counted(policy: Bigrams, batches: list[PackedBatch], plan: MinibatchPlan) -> list[float]:
        (share,) = prepare(policy, [batches], [plan], given, shaped, chosen)  # type: ignore[arg-type]  # a fake
        divisors = [(one.denominators, one.kept) for one in share.microbatches]
        return [
            number
            for each in zip(*divisors, strict=True)
            for one in each
            if one is not None
            for number in (one.num_tokens, *known(one.group_mean, "divisors").tolist())
        ]

    def on_replica(rank: int) -> list[float]:
        policy = Bigrams()
        policy.replicas = OneOfTwo(rank, meet, held)
        shares = tuple((indices,) for indices in part.plan.microbatches[0])
        return counted(policy, [part.batches[rank]], MinibatchPlan(shares))

    alone = counted(Bigrams(), part.batches, part.plan)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(on_replica, range(2))
    # of all tokens and of those kept, by microbatch: their number, then the divisor of each group
    assert [*first[:3], *second[:3], *first[3:], *second[3:]] == alone
    assert alone[:3] == [24, 12 * 3, 6 * 3]  # two of group 0, one of 2, one of 3
    assert 0 < alone[6] < 24


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
