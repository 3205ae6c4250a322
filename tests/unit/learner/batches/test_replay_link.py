import re
from collections.abc import Iterator
from pathlib import Path

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


def test_steps_that_were_not_recorded_whole_are_refused_unless_the_run_ends_before_them():
    for steps, until, why in [
        ((), 100, ""),
        ((3, 3, 4, 4, 5, 5), 100, ""),
        ((0, 0, 1, 1, 0, 0, 1, 1, 2, 2), 100, ""),  # trained again after a failure
        ((NOT_TRAINED, NOT_TRAINED, NOT_TRAINED), 100, ""),
        ((0, 0, NOT_TRAINED), 100, ""),
        ((0, 0, 1, 1, 2), 100, ""),  # the last may be smaller, as at the end of the data
        ((0, 0, 0, 1, NOT_TRAINED), 100, ""),
        (
            (0, 0, 1, 2, 2),
            100,
            r"step 1 of a\.trajectories has 1 groups, step 0 has 2: .*; run\.steps=1 ends before",
        ),
        ((0, 0, 1, 2, 2), 1, ""),
        ((0, 0, 1, 1, 1), 100, r"step 1 of a\.trajectories has 3 groups, step 0 has 2"),
        ((3, 3, 5, 5), 100, r"a\.trajectories holds step 5 but not step 4"),
    ]:
        try:
            refuse_partial_steps(steps, path=Path("a.trajectories"), until=until)
            found = ""
        except ConfigError as refusal:
            found = str(refusal)
        assert re.search(why or "^$", found), found
