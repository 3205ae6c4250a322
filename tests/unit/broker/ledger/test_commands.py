"""The life of an item, one decision at a time. Random schedules are in tests/property."""

from collections import Counter
from typing import Any

import msgspec
import pytest

from slipstream.broker.ledger.admission import NotYet
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.effects import apply
from slipstream.broker.ledger.events import LeaseEnd, decode_event, encode_event
from slipstream.broker.ledger.groups import Group, as_delivered
from slipstream.broker.ledger.view import describe_wait
from slipstream.wire.errors import RefusedError
from slipstream.wire.messages.broker import LeasedGroup
from slipstream.wire.messages.trajectory import Score, Turn, VersionRun
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.ledger_driver import (
    LEASE_S,
    RESPONSE_TOKENS,
    eval_plan,
    generate,
    header,
    lease,
    make_ledger,
    make_ready,
    make_rules,
    reward,
    state_of,
    stored,
    submit,
    train_step,
    with_a_dead_letter,
)

V0 = PolicyVersion(1, 0)


def started(ledger: Ledger) -> Ledger:
    ledger.training.take_over(ledger.book.step)
    return ledger


def begun(**rules: Any) -> Ledger:  # noqa: ANN401 values of rules
    return started(make_ledger(make_rules(**rules)))


def leased(**rules: Any) -> tuple[Ledger, LeasedGroup]:  # noqa: ANN401
    """Return a ledger of a generator that has one group."""
    ledger = begun(**rules)
    (group,) = lease(ledger, max_sequences=2)
    return ledger, group


def answered(**rules: Any) -> tuple[Ledger, LeasedGroup]:  # noqa: ANN401
    """Return a ledger with one group that waits for its rewards."""
    ledger, group = leased(**rules)
    generate(ledger, group)
    return ledger, group


def score(ledger: Ledger, group_id: int, sibling: int, **result: Any) -> None:  # noqa: ANN401
    ledger.score(Score(group_id=group_id, sibling=sibling, lease_id=0, **result))


def delivered(ledger: Ledger, version: PolicyVersion, step: int | None = None) -> list[Group]:
    batch = ledger.training.deliver(version, step)
    assert isinstance(batch, list)
    return batch


def trained_steps(ledger: Ledger, count: int) -> list[list[int]]:
    """Train so many steps; return the groups of each."""
    batches = []
    for _ in range(count):
        make_ready(ledger, lease(ledger))
        batches.append([group.group_id for group in train_step(ledger)])
    return batches


def in_flight(ledger: Ledger) -> dict[str, int]:
    return {state: count for state, count in ledger.book.in_flight().items() if count}


def evaluated_ledger(num_problems: int = 2, total_steps: int = 1, **section: float) -> Ledger:
    return begun(
        total_steps=total_steps,
        groups_per_step=1,
        max_staleness_steps=0,
        max_in_flight=8,
        plan=eval_plan(num_problems, **section),
    )


# ---- the life cycle ----------------------------------------------------------


def test_a_group_goes_from_leased_to_trained_and_every_state_counts_it_once():
    ledger = begun(groups_per_step=1, total_steps=1)
    (group,) = lease(ledger)
    assert group.siblings == (0, 1)
    assert group.prompt.prompt == "train 0"
    assert in_flight(ledger) == {"leased": 1}
    generate(ledger, group)
    assert in_flight(ledger) == {"generated": 1}
    assert ledger.book.leases == {}
    reward(ledger, group.group_id, [0.0, 1.0])
    assert in_flight(ledger) == {"ready": 1}
    batch = delivered(ledger, V0)
    assert [g.rewards for g in batch] == [[0.0, 1.0]]
    assert in_flight(ledger) == {"delivered": 1}
    ledger.training.commit(PolicyVersion(1, 1), {})
    assert (in_flight(ledger), ledger.book.state.trained, ledger.book.state.issued) == ({}, 1, 1)
    assert ledger.book.state.staleness == {0: 2 * RESPONSE_TOKENS}
    assert ledger.book.finished
    assert ledger.training.deliver(ledger.book.version) is None


def test_work_needs_a_learner_and_weights_of_its_epoch():
    ledger = make_ledger()
    assert lease(ledger, adopted=V0) == []
    started(ledger)
    assert len(lease(ledger, adopted=V0, max_sequences=2)) == 1
    started(ledger)
    assert lease(ledger, adopted=V0) == []
    assert len(lease(ledger, adopted=PolicyVersion(2, 0), max_sequences=2)) == 1


def test_a_lease_takes_whole_groups_that_fit_into_the_free_lanes():
    ledger = begun(group_size=3)
    assert [g.group_id for g in lease(ledger, max_sequences=8)] == [0, 1]
    assert lease(ledger, max_sequences=2) == []


def test_generators_share_what_there_is_and_whoever_asks_again_gets_more():
    ledger = begun(groups_per_step=6, max_staleness_steps=0)
    assert len(lease(ledger, "generator-0", num_sharing=4)) == 2  # of 6
    assert len(lease(ledger, "generator-1", num_sharing=4)) == 1  # of 4
    assert len(lease(ledger, "generator-2", num_sharing=4)) == 1  # of 3
    assert [len(lease(ledger, "generator-3", num_sharing=4)) for _ in range(3)] == [1, 1, 0]


# ---- leases that end ---------------------------------------------------------


def test_a_lapsed_lease_is_granted_again_for_the_missing_siblings_only():
    ledger = begun(group_size=3)
    (group,) = lease(ledger, max_sequences=3)
    submit(ledger, header(group.group_id, 1, V0))
    assert ledger.expire(LEASE_S) == 0
    assert ledger.expire(LEASE_S + 0.1) == 1
    assert in_flight(ledger) == {"issued": 1}
    (again,) = lease(ledger, "generator-1", max_sequences=2)
    assert (again.group_id, again.siblings) == (group.group_id, (0, 2))
    assert again.lease_id != group.lease_id
    assert ledger.book.state.ended_leases == {"lapsed": 1}
    assert ledger.book.state.restarted_trajectories == 2


def test_a_heartbeat_keeps_a_lease_and_names_the_ones_that_are_lost():
    ledger = begun()
    first, second = lease(ledger, max_sequences=4)
    ids = (first.lease_id, second.lease_id, 99)
    assert ledger.heartbeat("generator-0", ids[:1] + ids[2:], now_s=5.0) == [99]
    assert ledger.heartbeat("generator-1", ids[:1], now_s=100.0) == [first.lease_id]
    assert ledger.expire(LEASE_S + 1.0) == 1
    assert list(ledger.book.leases) == [first.lease_id]


def test_handing_back_is_for_the_holder_only():
    ledger = begun()
    first, second = lease(ledger, max_sequences=4)
    ledger.release("generator-1", first.lease_id, "failed")
    assert len(ledger.book.leases) == 2
    ledger.release("generator-0", first.lease_id, "failed", "its world has ended")
    assert list(ledger.book.leases) == [second.lease_id]
    assert [one.reason for one in ledger.book.groups[first.group_id].failures] == [
        "its lease of generation failed: its world has ended"
    ]
    ledger.release_all("generator-0", "restarted")
    assert ledger.book.leases == {}
    assert ledger.book.state.ended_leases == {"failed": 1, "restarted": 1}


def test_unfinished_group_is_dropped_after_max_attempts_and_replaced():
    ledger = begun(groups_per_step=1, max_staleness_steps=0)
    for attempt in range(3):
        now = attempt * 100.0
        (group,) = lease(ledger, now_s=now)
        assert group.group_id == 0
        ledger.expire(now + 50.0)
    assert ledger.book.state.dropped == {"poison": 1}
    assert ledger.book.unaccounted() == 0
    assert [g.prompt.prompt for g in lease(ledger)] == ["train 1"]


def test_a_lapsed_group_waits_for_a_generator_at_least_as_new_as_its_first():
    ledger = begun(max_staleness_steps=2)
    make_ready(ledger, lease(ledger, max_sequences=4))
    train_step(ledger)
    (group,) = lease(ledger, max_sequences=2)
    ledger.release("generator-0", group.lease_id, "failed")
    behind = lease(ledger, adopted=V0, max_sequences=2)
    assert [g.group_id for g in behind] == [group.group_id + 1]
    (again,) = lease(ledger, max_sequences=2)
    assert again.group_id == group.group_id


# ---- what generators send ----------------------------------------------------


def test_the_answer_of_a_lapsed_lease_is_taken_once_and_completes_the_group():
    ledger, group = leased()
    ledger.expire(LEASE_S + 1.0)
    (again,) = lease(ledger, "generator-1", max_sequences=2)
    assert submit(ledger, header(group.group_id, 0, V0))
    assert submit(ledger, header(group.group_id, 1, V0))
    assert ledger.book.leases == {}
    assert not submit(ledger, header(again.group_id, 0, V0))
    assert set(ledger.book.groups[group.group_id].headers) == {0, 1}
    assert in_flight(ledger) == {"generated": 1}


def test_a_trajectory_of_a_group_that_ended_or_outside_its_group_is_refused():
    ledger, group = leased()
    with pytest.raises(RefusedError, match="group 7 has ended"):
        submit(ledger, header(7, 0, V0))
    with pytest.raises(RefusedError, match="sibling 2 of a group of 2"):
        submit(ledger, header(group.group_id, 2, V0))


def test_tokens_older_than_the_admission_or_newer_than_the_learner_are_refused():
    ledger = begun()
    make_ready(ledger, lease(ledger, max_sequences=4))
    train_step(ledger)
    (group,) = lease(ledger, max_sequences=2)
    with pytest.raises(RefusedError, match=r"token chosen by v1\.0.*admitted at v1\.1"):
        submit(ledger, header(group.group_id, 0, V0, PolicyVersion(1, 1)))
    with pytest.raises(RefusedError, match=r"token of v1\.2, the learner is at v1\.1"):
        submit(ledger, header(group.group_id, 0, PolicyVersion(1, 1), PolicyVersion(1, 2)))


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


# ---- evaluation --------------------------------------------------------------


def test_an_evaluation_takes_no_permit_and_goes_before_new_prompts():
    ledger = evaluated_ledger(num_problems=2)
    granted = lease(ledger)
    assert [(g.item, g.prompt.prompt, g.siblings) for g in granted] == [
        ("eval", "held out 0", (0,)),
        ("eval", "held out 1", (0,)),
        ("train", "train 0", (0, 1)),
    ]
    assert ledger.issuing.permits(V0) == 0
    assert (ledger.book.state.issued, ledger.book.unaccounted()) == (1, 0)


def test_the_last_answer_closes_the_round_and_a_dropped_problem_is_not_a_wrong_answer():
    ledger = evaluated_ledger(num_problems=3)
    first, second, third, _ = lease(ledger)
    for group in (first, second):
        generate(ledger, group)
    reward(ledger, first.group_id, [1.0])
    reward(ledger, second.group_id, [0.0])
    assert ledger.book.state.eval_points == []
    for attempt in range(3):
        lease_id = third.lease_id if attempt == 0 else lease(ledger, max_sequences=1)[0].lease_id
        ledger.release("generator-0", lease_id, "failed")
    (point,) = ledger.book.state.eval_points
    overall = point.overall
    assert (point.step, point.mean, overall.num_answers, overall.num_dropped) == (0, 0.5, 2, 1)
    assert point.versions == (V0,)
    assert ledger.book.state.dropped == {}
    assert ledger.book.state.eval_rounds == {}


def test_a_round_waits_for_a_generator_with_the_weights_of_its_step():
    ledger = evaluated_ledger(num_problems=1)
    problem, group = lease(ledger)
    make_ready(ledger, [problem, group])
    train_step(ledger)
    assert not ledger.book.finished
    assert lease(ledger, adopted=V0) == []
    (last,) = lease(ledger)
    assert (last.item, ledger.book.groups[last.group_id].eval_step) == ("eval", 1)
    assert isinstance(ledger.training.deliver(ledger.book.version), NotYet)
    make_ready(ledger, [last])
    assert ledger.book.finished
    assert [point.step for point in ledger.book.state.eval_points] == [0, 1]


def test_every_sample_of_a_problem_counts_and_belongs_to_one_item():
    ledger = evaluated_ledger(num_problems=1, samples=4, temperature=1.0)
    problem, _ = lease(ledger)
    assert (problem.item, problem.siblings) == ("eval", (0, 1, 2, 3))
    generate(ledger, problem)
    reward(ledger, problem.group_id, [1.0, 0.0, 0.0])
    assert ledger.book.state.eval_points == []
    score(ledger, problem.group_id, 3, reward=1.0)
    metrics = ledger.book.state.eval_points[0].overall.metrics
    assert (metrics["mean@4"], metrics["pass@1"], metrics["pass@4"]) == (0.5, 0.5, 1.0)
    assert metrics["pass@2"] == pytest.approx(1 - 1 / 6)


def test_a_round_that_needs_many_lanes_waits_for_them_and_is_not_starved():
    ledger = begun(group_size=2, total_steps=9, plan=eval_plan(1, samples=4, temperature=1.0))
    assert lease(ledger, max_sequences=3) == [], "training took the lanes that the round needs"
    (problem,) = lease(ledger, max_sequences=4)
    assert (problem.item, len(problem.siblings)) == ("eval", 4)
    ledger.release("generator-0", problem.lease_id, "failed")
    assert lease(ledger, max_sequences=2) == []
    assert lease(ledger, max_sequences=4)[0].item == "eval"


def test_leases_that_lapse_together_may_end_the_run_between_them():
    ledger = evaluated_ledger(num_problems=2, total_steps=9, target=0.0)
    first, second, _ = lease(ledger)
    generate(ledger, first)
    for _ in range(2):  # the second problem is at its last attempt
        lease_id = next(
            i for i, one in ledger.book.leases.items() if one.group_id == second.group_id
        )
        ledger.release("generator-0", lease_id, "failed")
        lease(ledger)
    reward(ledger, first.group_id, [1.0])
    assert len(ledger.book.leases) == 2
    assert ledger.expire(1_000.0) == 2
    assert "eval.target" in ledger.book.state.stop_reason
    assert (ledger.book.leases, ledger.book.groups, ledger.book.unaccounted()) == ({}, {}, 0)


def test_drops_in_a_row_are_counted_until_a_group_can_be_trained():
    ledger = begun(groups_per_step=1, total_steps=9)
    for _ in range(3):
        (group,) = lease(ledger, max_sequences=2)
        generate(ledger, group)
        reward(ledger, group.group_id, [1.0, 1.0])
    assert ledger.book.state.drops_in_a_row == 3
    said = "; the last 3 groups were all dropped (zero_variance: 3)"
    assert describe_wait(ledger.book, ()).endswith(said)
    make_ready(ledger, lease(ledger, max_sequences=2))
    assert ledger.book.state.drops_in_a_row == 0


# ---- the end -----------------------------------------------------------------


def test_the_target_ends_the_run_with_the_batch_that_the_learner_holds():
    ledger = evaluated_ledger(num_problems=1, total_steps=9, target=1.0)
    problem, group = lease(ledger)
    make_ready(ledger, [group])
    assert isinstance(ledger.training.deliver(V0), list)
    generate(ledger, problem)
    reward(ledger, problem.group_id, [1.0])
    assert "eval.target" in ledger.book.state.stop_reason
    assert ledger.book.state.last_step == 1
    assert lease(ledger) == []
    ledger.training.commit(PolicyVersion(1, 1), {})
    (last,) = lease(ledger)
    assert last.item == "eval"
    make_ready(ledger, [last])
    assert ledger.book.finished
    assert ledger.training.deliver(ledger.book.version) is None
    book = ledger.book
    assert (book.state.trained, book.state.issued, book.unaccounted()) == (1, 1, 0)


def at_the_last_step(num_hanging: int, **rules: Any) -> tuple[Ledger, list[int]]:  # noqa: ANN401
    """Return a ledger whose last batch lacks groups that were leased before the newest weights."""
    ledger = begun(groups_per_step=4, total_steps=2, **rules)
    granted = lease(ledger, max_sequences=16)
    make_ready(ledger, granted[: 8 - num_hanging])
    train_step(ledger)
    assert lease(ledger) == []
    return ledger, [group.group_id for group in granted[8 - num_hanging :]]


@pytest.mark.parametrize("reserves", [True, False], ids=["wait", "drop"])
def test_a_last_batch_does_not_wait_for_a_group_that_hangs(reserves: bool):
    ledger, hanging = at_the_last_step(1, reserves=reserves)
    assert lease(ledger, now_s=9.0) == []
    spare = lease(ledger, now_s=10.0)
    assert [len(group.siblings) for group in spare] == [2]
    assert lease(ledger, now_s=19.0) == []
    make_ready(ledger, spare)
    batch = delivered(ledger, ledger.book.version)
    assert [group.group_id for group in batch] == [4, 5, 6, spare[0].group_id]
    assert not {*hanging} & {*ledger.book.groups}, "it would be generated for nobody"
    assert ledger.book.state.dropped == {"run_ended": 1}
    ledger.training.commit(ledger.book.version.next(), {})
    assert ledger.book.finished
    assert (ledger.book.state.trained, ledger.book.unaccounted()) == (8, 0)


@pytest.mark.parametrize("reserves", [True, False], ids=["wait", "drop"])
def test_a_group_to_spare_that_is_not_needed_is_dropped(reserves: bool):
    ledger, hanging = at_the_last_step(1, reserves=reserves)
    (spare,) = lease(ledger, now_s=10.0)
    for sibling in range(2):
        submit(ledger, header(hanging[0], sibling, PolicyVersion(1, 0)))
    reward(ledger, hanging[0], [0.0, 1.0])
    assert hanging[0] in [group.group_id for group in delivered(ledger, ledger.book.version)]
    assert spare.group_id not in ledger.book.groups
    assert ledger.book.state.dropped == {"run_ended": 1}


def test_groups_to_spare_are_few_and_begun_for_what_is_missing_alone():
    ledger, hanging = at_the_last_step(3)
    assert len(lease(ledger, now_s=10.0)) == 2
    assert lease(ledger, now_s=30.0) == [], "a quarter of a step's groups, or two"
    ledger.reject("generator-0", ledger.book.groups[hanging[0]].lease_id, "overlong_prompt")
    assert lease(ledger, now_s=31.0) == []
    assert len(lease(ledger, now_s=41.0)) == 1


def test_no_group_is_begun_to_spare_while_answers_or_rewards_come_or_nothing_is_missing():
    ledger, (hanging,) = at_the_last_step(1)
    submit(ledger, header(hanging, 0, PolicyVersion(1, 0)))
    assert lease(ledger, now_s=10.0) == []
    score(ledger, hanging, 0, reward=1.0)
    assert lease(ledger, now_s=15.0) == []
    submit(ledger, header(hanging, 1, PolicyVersion(1, 0)))
    assert lease(ledger, now_s=20.0) == []
    score(ledger, hanging, 1, reward=0.0)
    assert lease(ledger, now_s=25.0) == []
    assert lease(ledger, now_s=1_000.0) == []


@pytest.mark.parametrize(("reserves", "num_spare"), [(True, 0), (False, 1)], ids=["wait", "drop"])
def test_without_staleness_in_wait_mode_no_group_is_to_spare(reserves: bool, num_spare: int):
    """All that is under way has to fit into its step."""
    ledger = begun(
        groups_per_step=2, total_steps=1, max_staleness_steps=0, max_in_flight=9, reserves=reserves
    )
    make_ready(ledger, lease(ledger)[:1])
    assert lease(ledger) == []
    assert len(lease(ledger, now_s=10.0)) == num_spare


def test_stop_drops_untrained_groups_and_accounts_for_them():
    ledger = begun(groups_per_step=2)
    granted = lease(ledger)
    make_ready(ledger, granted[:1])
    ledger.plan_stop("run.max_hours")
    assert ledger.book.state.dropped == {"run_ended": 4}
    assert (ledger.book.groups, ledger.book.leases, ledger.book.unaccounted()) == ({}, {}, 0)
    assert ledger.book.finished
    ledger.plan_stop("again")
    assert ledger.book.state.stop_reason == "run.max_hours"


def test_the_last_step_of_the_data_takes_what_is_ready_if_that_is_enough():
    for min_groups, trained in [(1, 5), (2, 4)]:
        ledger = begun(groups_per_step=2, total_steps=9, max_prompts=5, min_groups=min_groups)
        while not ledger.book.finished:
            make_ready(ledger, lease(ledger))
            if ledger.training.deliver(ledger.book.version) is not None:
                train_step(ledger)
        assert (ledger.book.state.issued, ledger.book.state.trained) == (5, trained)
        assert ledger.book.state.dropped == Counter({"end_of_data": 5 - trained})
        assert ledger.book.unaccounted() == 0
        assert "all 5 prompts" in ledger.book.state.stop_reason


def test_data_that_ends_waits_for_what_is_still_being_answered():
    ledger = begun(groups_per_step=2, total_steps=9, max_prompts=2)
    first, second = lease(ledger)
    make_ready(ledger, [first])
    assert isinstance(ledger.training.deliver(V0), NotYet)
    assert not ledger.book.state.stop_reason
    make_ready(ledger, [second])
    assert len(train_step(ledger)) == 2


def test_a_cut_off_answer_drops_its_group_where_asked_and_another_prompt_is_issued():
    ledger, group = leased(drop_overlong=True, groups_per_step=1)
    cut_off = msgspec.structs.replace(header(group.group_id, 0, V0), finish_reason="length")
    submit(ledger, cut_off)
    assert ledger.book.state.dropped == {"overlong_response": 1}
    assert ledger.heartbeat("generator-0", (group.lease_id,), now_s=0.0) == [group.lease_id]
    assert lease(ledger, max_sequences=2)[0].prompt.prompt == "train 1"


def test_only_the_holder_can_reject_a_prompt_and_it_is_dropped_at_once():
    ledger, group = leased()
    ledger.reject("generator-1", group.lease_id, "overlong_prompt")
    assert ledger.book.state.dropped == {}
    ledger.reject("generator-0", group.lease_id, "overlong_prompt")
    assert ledger.book.state.dropped == {"overlong_prompt": 1}
    assert ledger.book.unaccounted() == 0


# ---- checkpoints -------------------------------------------------------------


def test_a_restored_run_asks_what_was_in_flight_again_and_skips_no_prompt():
    ledger = begun(groups_per_step=2, total_steps=4)
    trained_steps(ledger, 1)
    make_ready(ledger, lease(ledger)[:1])
    ledger.training.deliver(ledger.book.version)
    snapshot = stored(ledger.training.snapshot(ledger.book.version))
    waiting = list(snapshot.groups)
    assert waiting == [2, 3, 4, 5]

    restored = make_ledger(ledger.book.rules, stored(snapshot))
    assert restored.book.unaccounted() == 0
    assert restored.training.take_over(1) == PolicyVersion(2, 1)
    again = lease(restored)
    assert [g.group_id for g in again] == waiting
    assert [g.prompt.prompt for g in again] == [f"train {i}" for i in waiting]
    while not restored.book.finished:
        make_ready(restored, [*again, *lease(restored)])
        again = []
        train_step(restored)
    book = restored.book
    assert (book.step, book.state.issued, book.state.trained) == (4, 8, 8)
    assert set(restored.book.state.staleness) <= {0, 1}

    rebuilt = make_ledger(ledger.book.rules, stored(snapshot))
    for event in restored.drain()[0]:
        apply(rebuilt.book, decode_event(encode_event(event)))
    assert state_of(rebuilt) == state_of(restored)


def test_a_restored_run_with_a_smaller_bound_still_keeps_it():
    ledger = begun(max_staleness_steps=3, groups_per_step=1)
    lease(ledger)
    snapshot = stored(ledger.training.snapshot(V0))
    assert len(snapshot.groups) == 3
    restored = make_ledger(make_rules(max_staleness_steps=0, groups_per_step=1), snapshot)
    restored.training.take_over(0)
    assert len(lease(restored)) == 1


def test_a_restored_run_evaluates_again_what_was_not_complete_and_keeps_the_curve():
    ledger = evaluated_ledger(num_problems=1, total_steps=2, every_steps=1)
    trained_steps(ledger, 1)
    assert (
        [p.step for p in ledger.book.state.eval_points],
        list(ledger.book.state.eval_rounds),
    ) == ([0], [1])
    restored = make_ledger(ledger.book.rules, stored(ledger.training.snapshot(ledger.book.version)))
    restored.training.take_over(1)
    trained_steps(restored, 1)
    make_ready(restored, lease(restored))
    assert [p.step for p in restored.book.state.eval_points] == [0, 1, 2]
    assert restored.book.finished


# ---- the learner -------------------------------------------------------------


def test_a_batch_asked_for_ahead_is_answered_though_the_commit_came_meanwhile():
    ledger = begun()
    make_ready(ledger, lease(ledger, max_sequences=8))
    ledger.training.deliver(V0)
    ledger.training.commit(V0.next(), {})
    batch = ledger.training.deliver(V0, step=1)
    assert batch == ledger.training.deliver(V0.next(), step=1)
    with pytest.raises(RefusedError, match=r"the learner is at v1\.0"):
        ledger.training.deliver(V0, step=0)
    with pytest.raises(RefusedError, match=r"the learner is at v1\.0"):
        ledger.training.deliver(V0, step=2)


def test_no_batch_names_the_groups_that_have_to_get_ready():
    ledger = begun()
    granted = lease(ledger, max_sequences=4)
    make_ready(ledger, granted[:1])
    not_yet = ledger.training.deliver(V0)
    assert not_yet == NotYet(missing=1)
    assert ledger.training.waiting_for(not_yet) == (1,)


def test_repeated_commit_counts_once():
    ledger = begun()
    trained_steps(ledger, 1)
    ledger.training.commit(PolicyVersion(1, 1), {})
    assert (ledger.book.step, ledger.book.state.trained) == (1, 2)


def test_a_commit_of_what_was_never_delivered_is_refused():
    ledger = begun()
    make_ready(ledger, lease(ledger))
    with pytest.raises(RefusedError, match="commit of step 0, which was never delivered"):
        ledger.training.commit(PolicyVersion(1, 1), {})
    assert ledger.book.step == 0


def test_each_take_over_grants_the_next_epoch_and_a_learner_at_another_step_is_refused():
    ledger = make_ledger()
    assert ledger.training.take_over(0) == PolicyVersion(1, 0)
    assert ledger.training.take_over(0) == PolicyVersion(2, 0)
    with pytest.raises(RefusedError, match="holds step 4, this run is at step 0"):
        ledger.training.take_over(4)


def test_a_batch_that_three_learners_have_not_finished_becomes_dead_letters():
    ledger = begun()
    make_ready(ledger, lease(ledger, max_sequences=4))
    batch = ledger.training.deliver(ledger.book.version)
    assert isinstance(batch, list)
    ids = [one.group_id for one in batch]
    for end in range(3):
        again = ledger.training.deliver(ledger.book.version)
        assert isinstance(again, list)
        assert [one.group_id for one in again] == ids, "as it was"
        ledger = make_ledger(ledger.book.rules, state=stored(ledger.book.state))  # it ends, too
        ledger.training.take_over(0, learner=f"learner@{end}")
    letters = stored(ledger.book.state).dead_letters
    assert {one.group_id for one in batch} == set(letters)
    assert {one.reason for one in letters.values()} == {"unfinished"}
    reasons = [failure.reason for failure in letters[batch[0].group_id].failures]
    assert reasons == ["it ended while it trained step 0"] * 3
    assert letters[batch[0].group_id].failures[1].by == "learner"
    assert ledger.book.state.cut_off == {}
    make_ready(ledger, lease(ledger, max_sequences=4))
    again = ledger.training.deliver(ledger.book.version)
    assert isinstance(again, list)
    assert not {one.group_id for one in again} & set(letters)
    train_step(ledger)


def test_a_learner_that_had_no_batch_or_finished_it_or_left_in_order_counts_for_none():
    ledger = begun(total_steps=9)
    make_ready(ledger, lease(ledger, max_sequences=8))
    ledger.training.deliver(ledger.book.version)
    ledger.training.leave(is_stopped=True)
    ledger.training.take_over(0)  # the one before left in order, and this one asks for nothing
    ledger.training.take_over(0)
    assert ledger.book.state.cut_off == {}
    ledger.training.deliver(ledger.book.version)
    ledger.training.take_over(0)
    assert ledger.book.state.cut_off == {0: 1}
    train_step(ledger)
    ledger.training.take_over(1)
    assert ledger.book.state.cut_off == {}


def test_a_take_over_that_arrives_twice_is_granted_once():
    ledger = make_ledger(make_rules(total_steps=9))
    version = ledger.training.take_over(0, learner="learner@a1")
    trained_steps(ledger, 2)
    assert ledger.training.take_over(0, learner="learner@a1") == version
    assert ledger.book.step == 2
    assert ledger.training.take_over(0, learner="learner@b2") == PolicyVersion(2, 0)


def test_a_learner_of_an_older_epoch_is_refused_everywhere():
    ledger = begun()
    make_ready(ledger, lease(ledger))
    ledger.training.deliver(V0)
    ledger.training.take_over(0)
    with pytest.raises(RefusedError, match=r"the learner is at v1\.0, the run at v2\.0"):
        ledger.training.deliver(V0)
    with pytest.raises(RefusedError, match=r"the learner is at v1\.0, the run at v2\.0"):
        ledger.training.commit(PolicyVersion(1, 1), {})


def test_work_of_an_older_epoch_is_accepted_while_its_weights_are_ancestors():
    ledger, group = leased()
    assert ledger.training.take_over(0) == PolicyVersion(2, 0)
    assert submit(ledger, header(group.group_id, 0, V0))
    assert submit(ledger, header(group.group_id, 1, V0, PolicyVersion(2, 0)))


def test_what_abandoned_weights_sampled_is_dropped_refused_and_replaced():
    ledger = begun(total_steps=9)
    make_ready(ledger, lease(ledger, max_sequences=6))  # the third group waits
    train_step(ledger)
    late = lease(ledger)
    submit(ledger, header(late[0].group_id, 0, ledger.book.version))
    assert len(late) == 3
    version = ledger.training.take_over(0)
    assert ledger.book.state.dropped == {"orphaned": 3}
    assert (ledger.book.state.trained, ledger.book.free_step) == (0, 1)
    with pytest.raises(RefusedError, match="has ended"):
        submit(ledger, header(late[1].group_id, 0, PolicyVersion(1, 1)))
    assert [g.group_id for g in train_step(ledger)] == [0, 1]
    assert 2 in ledger.book.groups, "what ancestors sampled stays"
    assert ledger.book.version == version.next()
    assert len(lease(ledger)) == 3
    assert ledger.book.unaccounted() == 0


def test_a_sibling_with_a_token_of_abandoned_weights_is_answered_again():
    ledger = begun(total_steps=9, max_staleness_steps=2)
    first, second, straggler = lease(ledger, max_sequences=6)
    make_ready(ledger, [first, second])
    train_step(ledger)
    ledger.training.take_over(0)
    mixed = header(straggler.group_id, 0, V0, PolicyVersion(1, 1), lease_id=straggler.lease_id)
    with pytest.raises(RefusedError, match=r"v1\.1, which v2\.0 does not descend from"):
        submit(ledger, mixed)
    assert ledger.book.state.ended_leases == {"orphaned": 1}
    (again, *_) = lease(ledger, "generator-1")
    assert (again.group_id, again.siblings) == (straggler.group_id, (0, 1))
    assert ledger.book.groups[straggler.group_id].attempts == 0


# ---- going back --------------------------------------------------------------


def test_recorded_batches_are_delivered_again_as_they_were():
    ledger = begun(total_steps=9)
    batches = trained_steps(ledger, 4)
    before = dict(ledger.book.state.staleness)
    _, released = ledger.drain()
    assert released == [], "no checkpoint holds these steps"
    ledger.training.take_over(1, "step-1")
    assert (ledger.book.state.trained, ledger.book.in_flight()["delivered"]) == (2, 6)
    assert trained_steps(ledger, 3) == batches[1:]
    assert ledger.book.state.staleness == before
    assert ledger.book.state.redelivered_steps == 3
    assert (ledger.book.step, ledger.book.unaccounted()) == (4, 0)


def test_a_checkpoint_seals_its_steps_and_lets_their_payloads_go():
    ledger = begun(total_steps=9)
    trained_steps(ledger, 3)
    ledger.drain()
    ledger.training.seal(ledger.book.version, 2, oldest_kept=1)
    ledger.training.seal(ledger.book.version, 2, oldest_kept=1)
    events, released = ledger.drain()
    assert [type(event).__name__ for event in events] == ["Sealed"]
    assert sorted(released) == [(group, sibling) for group in range(4) for sibling in (0, 1)]
    assert (ledger.book.state.sealed, ledger.book.state.trained) == (4, 6)
    with pytest.raises(RefusedError, match="knows its batches from step 1 on"):
        ledger.training.take_over(0)
    ledger.training.take_over(1)
    assert (ledger.book.state.sealed, ledger.book.state.trained) == (2, 2)
    assert ledger.book.state.requeued == 2, "the payloads of step 1 are gone"
    assert list(ledger.book.state.batches) == [2]
    requeued = lease(ledger, max_sequences=4)
    assert [group.prompt.prompt for group in requeued] == ["train 2", "train 3"]


def test_past_the_replay_budget_the_oldest_steps_are_generated_again():
    ledger = begun(total_steps=6, replay_budget_bytes=100)
    for _ in range(3):
        for group in lease(ledger):
            for sibling in group.siblings:
                one = header(group.group_id, sibling, ledger.book.version)
                submit(ledger, one, num_bytes=20)
            reward(ledger, group.group_id, [0.0, 1.0])
        train_step(ledger)
    assert (list(ledger.book.state.replay), ledger.book.state.replay_bytes) == ([2], 80)
    ledger.training.take_over(0)
    state = ledger.book.state
    assert (state.requeued, list(state.batches), ledger.book.free_step) == (4, [2], 0)
    while not ledger.book.finished:
        trained_steps(ledger, 1)
    assert (ledger.book.state.trained, ledger.book.unaccounted()) == (12, 0)
    assert ledger.book.state.dropped == {"orphaned": 2}, "sampled by step 2, which was abandoned"
    assert set(ledger.book.state.staleness) <= {0, 1}


def test_the_next_batch_may_be_bound_while_this_one_trains():
    ledger = begun(total_steps=9)
    make_ready(ledger, lease(ledger))
    now, following = delivered(ledger, V0), delivered(ledger, V0, 1)
    assert [g.group_id for g in [*now, *following]] == [0, 1, 2, 3]
    with pytest.raises(RefusedError, match="batch of step 2 asked for by a learner at"):
        ledger.training.deliver(V0, 2)
    assert lease(ledger) == [], "nothing sampled by v1.0 may be trained at step 2"
    version = ledger.training.take_over(0)
    assert [g.group_id for g in train_step(ledger)] == [0, 1]
    assert [g.group_id for g in train_step(ledger)] == [2, 3]
    assert ledger.book.version == PolicyVersion(version.epoch, 2)


def test_a_rejected_batch_drops_what_is_named_and_the_others_wait_again():
    ledger = begun(total_steps=9)
    make_ready(ledger, lease(ledger, max_sequences=4))
    ledger.training.deliver(V0)
    ledger.training.reject_batch(V0, 0, "invalid", [1])
    ledger.training.reject_batch(V0, 0, "invalid", [1])
    assert ledger.book.state.dropped == {"invalid": 1}
    assert in_flight(ledger) == {"ready": 1}
    make_ready(ledger, lease(ledger, max_sequences=2))
    assert [g.group_id for g in train_step(ledger)] == [0, 2]
    assert ledger.book.unaccounted() == 0


def test_a_reject_leaves_the_batch_after_it_where_it_is():
    ledger = begun(total_steps=3)
    make_ready(ledger, lease(ledger))
    ledger.training.deliver(V0)
    ledger.training.deliver(V0, 1)
    ledger.training.reject_batch(V0, 0, "nonfinite", [0, 1])
    assert (ledger.book.state.dropped, ledger.book.free_step) == ({"nonfinite": 2}, 0)
    make_ready(ledger, lease(ledger, max_sequences=4))
    assert [g.group_id for g in train_step(ledger)] == [4, 5]
    assert [g.group_id for g in train_step(ledger)] == [2, 3]


# ---- limits ------------------------------------------------------------------


def test_drop_mode_lets_go_of_what_is_past_its_deadline_and_takes_other_prompts():
    ledger = begun(total_steps=9, max_staleness_steps=1, reserves=False, max_in_flight=6)
    granted = lease(ledger)
    assert len(granted) == 6, "nothing is reserved"
    make_ready(ledger, granted[:4])
    train_step(ledger)
    assert ledger.book.state.dropped == {}
    train_step(ledger)
    assert ledger.book.state.dropped == {"stale": 2}
    lost = ledger.heartbeat("generator-0", [g.lease_id for g in granted[4:]], now_s=0.0)
    assert len(lost) == 2, "their generator learns of it"
    assert [g.prompt.prompt for g in lease(ledger)] == [f"train {i}" for i in range(6, 12)]
    assert ledger.book.unaccounted() == 0


def test_past_the_high_water_no_more_groups_are_started_than_one_step_needs():
    ledger = begun(max_staleness_steps=3, total_steps=9, high_water_bytes=100)
    (group,) = lease(ledger, max_sequences=2)
    submit(ledger, header(group.group_id, 0, V0), num_bytes=101)
    assert len(lease(ledger)) == 1


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


def test_attempts_that_were_handed_back_are_not_called_poison():
    ledger = begun()
    for _ in range(3):
        (group,) = lease(ledger, max_sequences=2)
        ledger.release("generator-0", group.lease_id, "failed")
    assert ledger.book.state.dropped == {"lease_exhausted": 1}


def test_leaving_or_losing_the_grant_costs_no_attempt():
    ledger = begun(max_attempts=1)
    lease(ledger, max_sequences=4)
    ledger.release_all("generator-0", "lost", keep=[0])
    ledger.release("generator-0", 0, "stranded")
    assert [g.group_id for g in lease(ledger, max_sequences=4)] == [1, 0]
    ledger.release_all("generator-0", "left")
    assert ledger.book.state.dropped == {}
    assert [g.group_id for g in lease(ledger, max_sequences=4)] == [1, 0]


@pytest.mark.parametrize("ends", [["stranded"] * 20, ["failed", *["stranded"] * 10]])
def test_a_group_that_is_stranded_again_and_again_ends(ends: list[LeaseEnd]):
    """A trajectory that kills its environment server had its prompt begun anew for ever."""
    ledger = begun(max_attempts=2)
    for reason in ends:
        assert ledger.book.state.dropped == {}
        (group,) = lease(ledger, max_sequences=2)
        ledger.release("generator-0", group.lease_id, reason, "its server is lost")
    assert ledger.book.state.dropped == {"lease_exhausted": 1}
    letter = ledger.book.state.dead_letters[group.group_id]
    assert letter.failures[-1].reason == "its lease of generation stranded: its server is lost"


def test_the_end_of_the_run_admits_no_more_groups_than_the_last_steps_train():
    ledger = begun(max_staleness_steps=5, total_steps=2)
    assert len(lease(ledger)) == 4
    make_ready(ledger, lease(ledger))
    assert ledger.book.state.issued == 4


def test_each_token_counts_under_the_staleness_of_the_version_that_chose_it():
    ledger = begun(max_staleness_steps=1, groups_per_step=1)
    first, second = lease(ledger)
    make_ready(ledger, [first])
    train_step(ledger)
    newer = PolicyVersion(1, 1)
    runs = (VersionRun(2, V0), VersionRun(5, newer))
    mixed = msgspec.structs.replace(
        header(second.group_id, 0, V0, newer, lease_id=second.lease_id), version_runs=runs
    )
    submit(ledger, mixed)
    submit(ledger, header(second.group_id, 1, newer))
    reward(ledger, second.group_id, [0.0, 1.0])
    train_step(ledger)
    assert ledger.book.state.staleness == {0: 2 * RESPONSE_TOKENS + 5 + RESPONSE_TOKENS, 1: 3}


# ---- events ------------------------------------------------------------------


def test_replaying_the_stored_events_rebuilds_an_equal_state():
    ledger = evaluated_ledger(num_problems=2, total_steps=3)
    problem, _, group = lease(ledger)
    make_ready(ledger, [problem, group])
    train_step(ledger)
    started(ledger)
    granted = lease(ledger)
    submit(ledger, header(granted[-1].group_id, 1, ledger.book.version))
    ledger.score(Score(group_id=granted[-1].group_id, sibling=1, lease_id=0, unavailable="slow"))
    ledger.expire(1_000.0)
    lease(ledger, "generator-1")
    events, _ = ledger.drain()

    rebuilt = make_ledger(ledger.book.rules)
    for event in events:
        read = decode_event(encode_event(event))
        assert read == event
        apply(rebuilt.book, read)
    assert state_of(rebuilt) == state_of(ledger)


def test_a_problem_answered_by_abandoned_weights_is_answered_anew():
    ledger = begun(total_steps=9, groups_per_step=1, plan=eval_plan(1, every_steps=1, samples=2))
    trained_steps(ledger, 1)
    problem = next(group for group in lease(ledger) if group.item == "eval")
    train_step(ledger)
    submit(ledger, header(problem.group_id, 0, ledger.book.version))
    ledger.training.take_over(1)
    (again,) = [group for group in lease(ledger) if group.item == "eval"]
    assert (again.group_id, again.siblings) == (problem.group_id, (0, 1))


def test_a_run_that_was_made_shorter_lets_go_of_what_it_does_not_reach():
    ledger = begun(total_steps=9)
    trained_steps(ledger, 4)
    state = stored(ledger.book.state)
    state.last_step = 3
    shorter = make_ledger(ledger.book.rules, state)
    shorter.training.take_over(2)
    assert list(shorter.book.state.batches) == [2]
    train_step(shorter)
    assert shorter.book.finished
    book = shorter.book
    assert (book.state.trained, book.unaccounted(), book.groups) == (6, 0, {})


def test_nothing_is_leased_and_nothing_has_ended_while_a_resumed_run_awaits_its_learner():
    ledger = begun(total_steps=1)
    trained_steps(ledger, 1)
    assert ledger.book.finished
    state = stored(ledger.book.state)
    state.awaits_learner = True
    resumed = make_ledger(ledger.book.rules, state)
    assert not resumed.book.finished
    assert lease(resumed) == []
    resumed.training.take_over(0)
    trained_steps(resumed, 1)
    assert resumed.book.finished
    assert not resumed.book.over
    resumed.training.leave()
    assert resumed.book.over


def test_a_take_over_does_not_open_an_open_round_again():
    ledger = evaluated_ledger(num_problems=2)
    lease(ledger)
    ledger.training.take_over(0)
    ledger.release_all("generator-0", "restarted")
    evals = [group for group in lease(ledger) if group.item == "eval"]
    make_ready(ledger, evals)
    assert len(evals) == 2
    assert ledger.book.state.eval_points[0].overall.num_answers == 2


# ---- dead letters ------------------------------------------------------------


def test_group_without_a_reward_becomes_a_dead_letter_with_all_failures():
    ledger, group_id = with_a_dead_letter()
    assert ledger.book.state.dropped == {"reward_unavailable": 1}
    letter = stored(ledger.book.state).dead_letters[group_id]
    named = (letter.reason, letter.prompt.prompt, letter.step)
    assert named == ("reward_unavailable", "train 0", 0)
    assert [(one.by, one.sibling, one.version) for one in letter.failures] == [
        ("a@1", 1, "7"),
        ("b@1", 1, "7"),
    ]
    assert len(letter.failures[0].excerpt) == 500


def test_a_dead_letter_is_issued_again_as_a_new_item_and_every_count_holds():
    ledger, group_id = with_a_dead_letter()
    done, refused = ledger.retry([group_id, 77])
    assert refused == {77: "no such dead letter"}
    new = done[group_id]
    assert (ledger.book.groups[new].retry_of, ledger.book.state.dead_letters) == (group_id, {})
    assert (ledger.book.state.issued, ledger.book.unaccounted()) == (2, 0)
    (again,) = lease(ledger, max_sequences=2)
    assert (again.group_id, again.prompt.prompt, again.position) == (new, "train 0", 0)
    make_ready(ledger, [again])
    (trained,) = train_step(ledger)
    assert trained.group_id == new
    assert ledger.book.state.retried == 1


def test_a_dead_letter_is_not_issued_again_when_the_run_takes_no_more_prompts():
    ledger, group_id = with_a_dead_letter()
    ledger.plan_stop("enough")
    assert ledger.retry([group_id]) == ({}, {group_id: "the run takes no more prompts"})
    assert ledger.drop_letters([group_id, 5]) == ({group_id: -1}, {5: "no such dead letter"})
    assert ledger.book.state.dead_letters == {}


def test_poisonous_prompt_is_a_dead_letter_that_names_its_victims():
    ledger = begun(groups_per_step=1, max_attempts=2)
    for holder in ("generator-0@1", "generator-1@1"):
        lease(ledger, holder, max_sequences=2)
        ledger.release_all(holder, "restarted")
    (letter,) = ledger.book.state.dead_letters.values()
    assert letter.reason == "poison"
    assert [one.by for one in letter.failures] == ["generator-0@1", "generator-1@1"]


def test_the_oldest_dead_letters_make_room_and_are_counted():
    ledger, first = with_a_dead_letter(max_dead_letters=1)
    (group,) = lease(ledger, max_sequences=2)
    generate(ledger, group)
    for _ in range(2):
        score(ledger, group.group_id, 0, unavailable="no")
    assert list(ledger.book.state.dead_letters) == [group.group_id] != [first]
    assert ledger.book.state.letters_forgotten == 1


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


def test_held_out_answers_that_wait_for_rewards_are_bounded_and_the_round_still_ends():
    ledger = begun(
        total_steps=1,
        groups_per_step=1,
        max_staleness_steps=0,
        max_in_flight=3,
        plan=eval_plan(40, samples=2),
    )  # an evaluation at step 0: 40 problems of 2 answers
    answered: list[int] = []

    def answer_all() -> None:
        while (groups := lease(ledger, max_sequences=2)) and groups[0].item == "eval":
            generate(ledger, groups[0])
            answered.append(groups[0].group_id)

    answer_all()
    assert len(answered) == 3  # max_in_flight groups of group_size answers
    for _ in range(40):
        reward(ledger, answered.pop(0), [0.0, 1.0])
        answer_all()
    assert [point.step for point in ledger.book.state.eval_points] == [0]


def test_a_generator_with_many_lanes_is_given_no_more_held_out_problems_than_fit():
    ledger = begun(groups_per_step=1, max_staleness_steps=0, max_in_flight=3, plan=eval_plan(40))
    groups = [one for one in lease(ledger, max_sequences=80) if one.item == "eval"]
    assert len(groups) == 3 * ledger.book.rules.group_size
    ledger.expire(LEASE_S + 1.0)
    again = [one for one in lease(ledger, max_sequences=80, now_s=20.0) if one.item == "eval"]
    assert sorted(one.group_id for one in again) == sorted(one.group_id for one in groups)
    ledger = begun(
        groups_per_step=1,
        max_staleness_steps=0,
        max_in_flight=8,
        high_water_bytes=100,
        plan=eval_plan(4),
    )
    (first,) = [one for one in lease(ledger, max_sequences=1) if one.item == "eval"]
    submit(ledger, header(first.group_id, 0, ledger.book.version, lease_id=first.lease_id), 200)
    assert [one for one in lease(ledger, max_sequences=80) if one.item == "eval"] == []
    reward(ledger, first.group_id, [1.0])
    ledger.book.state.untrained_bytes += 200  # others have filled it
    assert len([one for one in lease(ledger, max_sequences=80) if one.item == "eval"]) == 1


def test_what_waits_for_rewards_is_counted_the_same_by_a_broker_that_takes_over():
    ledger = evaluated_ledger(num_problems=3)
    first, second = lease(ledger, max_sequences=2)
    generate(ledger, first)
    generate(ledger, second)
    reward(ledger, first.group_id, [1.0])
    assert ledger.book.index.eval_unscored == 1
    assert make_ledger(ledger.book.rules, state_of(ledger)).book.index.eval_unscored == 1
    ledger.book.restart(ledger.book.groups[second.group_id])
    assert ledger.book.index.eval_unscored == 0


def test_run_without_checkpoints_keeps_max_history_steps_and_names_the_first():
    ledger = begun(total_steps=9, groups_per_step=1, max_staleness_steps=0, max_history=4)
    for _ in range(7):
        make_ready(ledger, lease(ledger, max_sequences=2))
        train_step(ledger)
    assert sorted(ledger.book.state.history) == [3, 4, 5, 6]
    with pytest.raises(RefusedError, match="knows its batches from step 3 on"):
        ledger.training.take_over(0)
    assert ledger.training.take_over(3).step == 3


def test_time_in_which_the_broker_was_blocked_counts_in_no_lease():
    ledger = begun()
    first, second = lease(ledger, max_sequences=4, now_s=0.0)
    for tick in range(1, 8):  # late each time: every term was given anew, and nothing ever lapsed
        ledger.postpone(1.5)
        ledger.heartbeat("generator-0", [second.lease_id], now_s=tick * 2.0)
        assert ledger.expire(tick * 2.0) == 0
    ledger.heartbeat("generator-0", [second.lease_id], now_s=20.0)
    assert ledger.expire(LEASE_S + 7 * 1.5 - 0.1) == 0
    assert ledger.expire(LEASE_S + 7 * 1.5 + 0.1) == 1
    assert list(ledger.book.leases) == [second.lease_id]
    assert first.lease_id not in ledger.book.leases


def test_heartbeats_without_answers_do_not_keep_a_lease_for_ever():
    ledger = begun(max_lease_s=35.0)
    (first,) = lease(ledger, max_sequences=2, now_s=0.0)
    lost_at = {
        now: ledger.heartbeat("generator-0", [first.lease_id], now_s=now)
        for now in (8.0, 16.0, 24.0, 32.0, 40.0)
    }
    assert [now for now, lost in lost_at.items() if lost] == [40.0]
    assert ledger.expire(41.0) == 0
    assert ledger.expire(32.0 + LEASE_S + 0.1) == 1
    (again,) = lease(ledger, "generator-1", max_sequences=2, now_s=43.0)
    assert again.group_id == first.group_id
    assert ledger.heartbeat("generator-1", [again.lease_id], now_s=50.0) == []


def test_what_a_revoked_key_delivered_is_not_trained_after_a_step_back_either():
    ledger = begun(groups_per_step=2, max_staleness_steps=0)
    (stolen,) = lease(ledger, "thief/g@1", max_sequences=2)
    (honest,) = lease(ledger, "g@1", max_sequences=2)
    make_ready(ledger, [stolen, honest])
    train_step(ledger)
    assert ledger.discard_answers_of("thief") == (0, 0)
    ledger.training.take_over(0)  # its batch is recorded, and would be delivered again
    assert ledger.discard_answers_of("thief") == (0, 1)
    assert ledger.discard_answers_of("thief", takes_over=True) == (1, 0)
    assert ledger.book.state.dropped == {"revoked": 1}
    assert honest.group_id in ledger.book.groups
    assert ledger.book.unaccounted() == 0


def test_after_a_restart_of_the_broker_every_lease_has_one_full_term_again():
    before = begun()
    granted = lease(before, now_s=0.0)
    assert len(granted) > 1
    ledger = make_ledger(before.book.rules, state_of(before))
    ledger.restarted(1_000.0)
    assert ledger.expire(1_000.0 + LEASE_S) == 0
    assert ledger.book.leases.keys() == {group.lease_id for group in granted}
    assert ledger.expire(1_000.0 + LEASE_S + 0.1) == len(granted)
    assert not ledger.book.leases


def test_renewed_leases_may_be_held_for_their_whole_time_again():
    ledger = begun(max_lease_s=3 * LEASE_S)
    granted = [group.lease_id for group in lease(ledger, now_s=0.0)]
    ledger.renew_leases(1_000.0)
    for late_s in (LEASE_S, 2 * LEASE_S, 3 * LEASE_S):
        assert ledger.heartbeat("generator-0", granted, now_s=1_000.0 + late_s) == []
    assert ledger.heartbeat("generator-0", granted, now_s=1_000.1 + 3 * LEASE_S) == granted


def test_history_is_forgotten_at_a_seal_that_holds_nothing_new():
    """As where an older checkpoint was removed: what no learner can go back to is not kept."""
    ledger = begun(groups_per_step=1)
    trained_steps(ledger, 3)
    ledger.training.seal(ledger.book.version, 3, oldest_kept=0)
    assert list(ledger.book.state.history) == [0, 1, 2]
    ledger.training.seal(ledger.book.version, 3, oldest_kept=2)
    assert list(ledger.book.state.history) == [2]
    ledger.drain()
    ledger.training.seal(ledger.book.version, 3, oldest_kept=2)
    assert ledger.drain() == ([], [])


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
