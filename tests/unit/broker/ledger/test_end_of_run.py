"""The last steps of a run: groups to spare, data that ends, and stops."""

from collections import Counter
from typing import Any

import msgspec
import pytest

from slipstream.broker.ledger.admission import NotYet
from slipstream.broker.ledger.commands import Ledger
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.begun_ledgers import (
    V0,
    begun,
    delivered,
    evaluated_ledger,
    leased,
    score,
    trained_steps,
)
from tests.support.ledger_driver import (
    generate,
    header,
    lease,
    make_ledger,
    make_ready,
    reward,
    stored,
    submit,
    train_step,
)

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


# ---- limits ------------------------------------------------------------------


def test_the_end_of_the_run_admits_no_more_groups_than_the_last_steps_train():
    ledger = begun(max_staleness_steps=5, total_steps=2)
    assert len(lease(ledger)) == 4
    make_ready(ledger, lease(ledger))
    assert ledger.book.state.issued == 4


# ---- events ------------------------------------------------------------------


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
