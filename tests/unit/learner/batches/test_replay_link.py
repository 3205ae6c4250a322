import re
from collections.abc import Iterator
from pathlib import Path

from slipstream.algos.section import AlgoSection
from slipstream.deploy.demonstrations import demonstrated_group
from slipstream.generators.turns.demonstrations import DemonstratedTokens
from slipstream.learner.batches.replay_link import (
    Demonstrations,
    recorded_batches,
    refuse_partial_steps,
)
from slipstream.learner.config import LearnerSection, LearnerSettings
from slipstream.weightbus.config import WeightBusSection
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.trajectory_file import NOT_TRAINED, RecordedGroup, TrajectoryFileWriter
from slipstream.wire.messages.broker import DeliveredGroup
from slipstream.wire.messages.codec import decode_transcript
from slipstream.wire.messages.trajectory import Turn
from slipstream.wire.settings.sections import RunSection


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


def demonstrations(
    path: Path, rows: int, *, shuffles: bool = True, seed: int = 0
) -> Demonstrations:
    if not path.exists():
        writer = TrajectoryFileWriter(path)
        for number in range(rows):
            tokens = DemonstratedTokens([7, 8, 9], (Turn(1, 2),), (), ("a", "b"))
            writer.append([demonstrated_group(tokens, number)])
        writer.close()
    settings = LearnerSettings(
        run=RunSection(groups_per_step=4, seed=seed),
        learner=LearnerSection(),
        algo=AlgoSection(),
        weightbus=WeightBusSection(),
        shuffles=shuffles,
    )
    return Demonstrations(path, settings)


def taken(file: Demonstrations, steps: range) -> list[int]:
    """Return the rows that some steps train, by the text that each was written with."""
    batches = [file.at(step) for step in steps]
    return [
        decode_transcript(memoryview(group.transcripts[0])).prompt.row
        for batch in batches
        for group in batch.groups
    ]


def test_demonstrations_come_once_per_epoch_in_an_order_of_the_seed(tmp_path: Path):
    path = tmp_path / "a.trajectories"
    file = demonstrations(path, 10)
    rows = taken(file, range(5))
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:]
    assert taken(demonstrations(path, 10), range(3, 5)) == rows[12:]
    assert taken(demonstrations(path, 10, seed=1), range(5)) != rows
    assert taken(demonstrations(path, 10, shuffles=False), range(5)) == [*range(10)] * 2
    batch = file.at(3)
    headers = [group.group.trajectories[0].header for group in batch.groups]
    assert [header.group_id for header in headers] == [12, 13, 14, 15]
    assert {header.oldest_version.step for header in headers} == {3}
