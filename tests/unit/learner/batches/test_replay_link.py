from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.learner.batches.replay_link import recorded_batches, refuse_partial_steps
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.trajectory_file import NOT_TRAINED, RecordedGroup
from slipstream.wire.messages.broker import DeliveredGroup


def recorded(*steps: int) -> Iterator[RecordedGroup]:
    for number, step in enumerate(steps):
        group = DeliveredGroup(group_id=number, trajectories=())
        yield RecordedGroup(step=step, group=group, payloads=(), transcripts=())


def batches(*steps: int) -> list[tuple[int, list[int]]]:
    found = recorded_batches(recorded(*steps), groups_per_step=2)
    return [(batch.step, [g.group.group_id for g in batch.groups]) for batch in found]


def test_groups_come_in_the_batches_they_were_trained_in():
    assert batches(0, 0, 1, 1, 1, 2) == [(0, [0, 1]), (1, [2, 3, 4]), (2, [5])]


def test_groups_that_were_never_trained_fill_batches_and_a_rest_is_left_out():
    never = NOT_TRAINED
    assert batches(never, never, never, never, never) == [(0, [0, 1]), (1, [2, 3])]
    assert batches(0, 0, never, never) == [(0, [0, 1]), (1, [2, 3])]


def test_a_step_that_was_trained_again_comes_once():
    assert batches(0, 1, 2, 1, 2, 3) == [(0, [0]), (1, [1]), (2, [2]), (3, [5])]


def test_gap_between_steps_is_kept():
    assert batches(3, 3, 5) == [(3, [0, 1]), (5, [2])]


def check(*steps: int, until: int = 100) -> None:
    refuse_partial_steps(steps, path=Path("a.trajectories"), until=until)


def test_a_recording_of_whole_steps_in_a_row_is_taken():
    check()
    check(3, 3, 4, 4, 5, 5)
    check(0, 0, 1, 1, 0, 0, 1, 1, 2, 2)  # trained again after a failure
    check(NOT_TRAINED, NOT_TRAINED, NOT_TRAINED)
    check(0, 0, NOT_TRAINED)


def test_the_last_step_may_be_smaller_as_at_the_end_of_the_data():
    check(0, 0, 1, 1, 2)
    check(0, 0, 0, 1, NOT_TRAINED)


def test_a_step_that_was_not_recorded_whole_is_refused_unless_the_run_ends_before_it():
    with pytest.raises(
        ConfigError,
        match=r"step 1 of a\.trajectories has 1 groups, step 0 has 2: .*; run\.steps=1 ends before",
    ):
        check(0, 0, 1, 2, 2)
    with pytest.raises(ConfigError, match=r"step 1 of a\.trajectories has 3 groups, step 0 has 2"):
        check(0, 0, 1, 1, 1)
    check(0, 0, 1, 2, 2, until=1)
    with pytest.raises(ConfigError, match=r"a\.trajectories holds step 5 but not step 4"):
        check(3, 3, 5, 5)
