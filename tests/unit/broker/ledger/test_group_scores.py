"""Rewards of siblings, of parts and of turns, and what filters make of them."""

import msgspec
import pytest

from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.events import decode_event, encode_event
from slipstream.broker.ledger.groups import as_delivered
from slipstream.wire.messages.trajectory import Score, Turn
from tests.support.begun_ledgers import (
    V0,
    answered,
    begun,
    delivered,
    in_flight,
    leased,
    score,
    trained_steps,
)
from tests.support.ledger_driver import (
    generate,
    header,
    lease,
    make_ready,
    reward,
    submit,
    train_step,
)

# ---- scoring -----------------------------------------------------------------


def test_equal_rewards_drop_the_group_and_another_prompt_takes_its_place():
    ledger = begun(groups_per_step=1, max_staleness_steps=0)
    (group,) = lease(ledger)
    assert lease(ledger) == []
    generate(ledger, group)
    reward(ledger, group.group_id, [1.0, 1.0])
    assert ledger.book.state.dropped == {"zero_variance": 1}
    assert ledger.book.unaccounted() == 0
    (other,) = lease(ledger)
    assert other.prompt.prompt == "train 1"
    _, released = ledger.drain()
    assert sorted(released) == [(0, 0), (0, 1)]


def test_equal_rewards_are_trained_where_the_filter_is_off():
    ledger, group = answered(groups_per_step=1, drop_zero_variance=False)
    reward(ledger, group.group_id, [1.0, 1.0])
    assert [g.group_id for g in train_step(ledger)] == [group.group_id]


def test_the_first_reward_of_a_sibling_counts_and_a_reward_without_trajectory_does_not():
    ledger, group = leased()
    submit(ledger, header(group.group_id, 0, V0))
    for sibling, value in ((0, 0.25), (0, 0.75), (1, 1.0)):
        score(ledger, group.group_id, sibling, reward=value)
    assert ledger.book.groups[group.group_id].rewards == [0.25]


def test_a_reward_that_stays_unavailable_drops_the_group_and_is_never_zero():
    ledger, group = answered()
    no_reward = Score(group_id=group.group_id, sibling=1, lease_id=0, unavailable="raised")
    for _ in range(2):
        ledger.score(no_reward)
    assert ledger.book.groups[group.group_id].rewards == []
    assert ledger.book.state.dropped == {}
    ledger.score(no_reward)
    assert ledger.book.state.dropped == {"reward_unavailable": 1}
    assert ledger.book.unaccounted() == 0


# ---- limits ------------------------------------------------------------------


def test_filter_can_use_one_part_of_the_reward():
    ledger = begun(zero_variance_of="correct")
    for correct, shaped in (((1.0, 1.0), (0.5, 0.7)), ((0.0, 1.0), (0.5, 0.5))):
        (group,) = lease(ledger, max_sequences=2)
        generate(ledger, group)
        for sibling in (0, 1):
            parts = {"correct": correct[sibling]}
            score(ledger, group.group_id, sibling, reward=shaped[sibling], parts=parts)
    assert ledger.book.state.dropped == {"zero_variance": 1}
    assert in_flight(ledger) == {"ready": 1}


def of_two_turns(ledger: Ledger) -> int:
    """Generate a group of trajectories of two turns each."""
    (group,) = lease(ledger, max_sequences=2)
    for sibling in group.siblings:
        sent = header(group.group_id, sibling, V0)
        one = Turn(2, 1)
        sent = msgspec.structs.replace(
            sent, turns=(one, Turn(4, sent.num_tokens - 4)), num_tokens=sent.num_tokens
        )
        submit(ledger, sent)
    return group.group_id


def test_rewards_of_turns_reach_the_learner():
    ledger = begun(groups_per_step=1, total_steps=1)
    group_id = of_two_turns(ledger)
    given = [(1.0, -0.5), ()]
    for sibling, turns in enumerate(given):
        score(ledger, group_id, sibling, reward=0.5 + sibling, turn_rewards=turns)
    batch = delivered(ledger, V0)
    assert [one.turn_rewards for one in as_delivered(batch[0]).trajectories] == given
    events, _ = ledger.drain()
    again = [decode_event(encode_event(event)) for event in events]
    assert again == events


def test_rewards_of_other_turns_are_no_reward_and_say_why():
    for turns, why in [
        ((1.0,), "turn_rewards has 1 numbers, the trajectory 2 turns"),
        ((1.0, 2.0, 3.0), "turn_rewards has 3 numbers, the trajectory 2 turns"),
        ((1.0, float("nan")), "the reward of turn 2 is nan; it may be at most 1e+15"),
        ((1e16, 0.0), "the reward of turn 1 is 1e+16; it may be at most 1e+15"),
    ]:
        ledger = begun(max_attempts=2)
        group_id = of_two_turns(ledger)
        score = Score(group_id=group_id, sibling=0, lease_id=0, reward=1.0, turn_rewards=turns)
        ledger.score(score)
        (failure,) = ledger.book.groups[group_id].failures
        assert failure.reason == f"invalid: {why}"
        ledger.score(score)
        assert ledger.book.state.dropped == {"reward_unavailable": 1}


# ---- dead letters ------------------------------------------------------------


def test_a_reward_that_is_no_number_to_sum_is_none_and_parts_that_are_none_are_left_out():
    for value in [float("nan"), float("inf"), -float("inf"), 1e308, -1e308]:
        ledger, group = answered()
        parts = {"format": 1.0, "bad": value, "n" * 300: 2.0}
        score(ledger, group.group_id, 0, reward=value, parts=parts)
        score(ledger, group.group_id, 1, reward=1.0, parts=parts)
        kept = ledger.book.groups[group.group_id]
        assert list(kept.scores) == [1]
        assert kept.failed_scorings == {0: 1}
        assert kept.scores[1].parts == {"format": 1.0, "n" * 100: 2.0}
        assert "at most 1e+15" in kept.failures[-1].reason
        assert ledger.book.sampled_reward() == 1.0


# ---- memory ------------------------------------------------------------------


def test_the_reward_of_sampled_answers_is_that_of_a_step_and_holds_what_filters_drop():
    ledger = begun()
    assert ledger.book.sampled_reward() is None
    ready, *equal = lease(ledger)
    make_ready(ledger, [ready])  # rewards 0 and 1
    for group in equal:
        generate(ledger, group)
        reward(ledger, group.group_id, [2.0, 2.0])
    answers = [0.0, 1.0, *[2.0] * (2 * len(equal))]
    assert ledger.book.state.dropped["zero_variance"] == len(equal) > 0
    assert ledger.book.sampled_reward() == pytest.approx(sum(answers) / len(answers))
    trained_steps(ledger, 1)
    assert ledger.book.sampled_reward() is None
    (one,) = lease(ledger)[:1]
    generate(ledger, one)
    reward(ledger, one.group_id, [0.25, 0.75])
    assert ledger.book.sampled_reward() == pytest.approx(0.5)
