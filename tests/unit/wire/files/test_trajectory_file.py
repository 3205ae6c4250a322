"""What was appended is read again, whatever happened to the writer."""

import logging
import resource
import signal
from pathlib import Path

import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.trajectory_file import (
    HEADER,
    RecordedGroup,
    TrajectoryFileWriter,
    read_groups,
    read_steps,
)
from slipstream.wire.messages.broker import DeliveredGroup, DeliveredTrajectory
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.ledger_driver import header


def recorded(group_id: int, *, step: int = 3) -> RecordedGroup:
    sent = header(group_id, 0, PolicyVersion(1, 2), lease_id=1)
    trajectory = DeliveredTrajectory(header=sent, reward=0.5, parts={"exact": 1.0})
    return RecordedGroup(
        step=step,
        group=DeliveredGroup(group_id=group_id, trajectories=(trajectory,)),
        payloads=(b"payload" * group_id,),
        transcripts=(b"text",),
    )


def write(path: Path, *groups: RecordedGroup, max_bytes: int = 0) -> list[bool]:
    writer = TrajectoryFileWriter(path, max_bytes)
    written = [writer.append([group]) for group in groups]
    writer.close()
    return written


def test_groups_come_back_as_they_were_over_several_writers(tmp_path: Path):
    path = tmp_path / "new" / "train.trajectories"
    groups = [recorded(i, step=i - 1) for i in range(4)]
    assert write(path, *groups[:2]) == [True, True]
    assert write(path, *groups[2:]) == [True, True]
    assert list(read_groups(path)) == groups


@pytest.mark.parametrize("lost_bytes", [1, 30, 200])
def test_a_cut_off_last_record_is_left_out_and_written_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lost_bytes: int
):
    path = tmp_path / "a.trajectories"
    write(path, recorded(1))
    whole = path.stat().st_size
    write(path, recorded(2))
    cut = max(whole + 1, path.stat().st_size - lost_bytes)
    path.write_bytes(path.read_bytes()[:cut])
    with caplog.at_level(logging.WARNING):
        assert list(read_groups(path)) == [recorded(1)]
    assert "cut off" in caplog.text
    write(path, recorded(3))
    assert list(read_groups(path)) == [recorded(1), recorded(3)]


def test_past_the_limit_nothing_is_written(tmp_path: Path):
    path = tmp_path / "a.trajectories"
    write(path, recorded(1))
    size = path.stat().st_size
    room_for_one_more = 2 * size - len(HEADER)
    assert write(path, recorded(1), recorded(1), max_bytes=room_for_one_more) == [True, False]
    assert path.stat().st_size == room_for_one_more


def test_a_step_is_written_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "a.trajectories"
    steps = [[recorded(1, step=step), recorded(1, step=step)] for step in (0, 1)]
    write(path, *steps[0])
    whole = path.stat().st_size
    room_for_three = whole + (whole - len(HEADER)) // 2
    path.unlink()
    writer = TrajectoryFileWriter(path, room_for_three)
    assert [writer.append(step) for step in steps] == [True, False]
    writer.close()
    assert path.stat().st_size == whole
    assert list(read_groups(path)) == steps[0]
    assert list(read_steps(path)) == [0, 0]


def test_a_step_that_the_disk_did_not_take_leaves_the_file_as_it_was(tmp_path: Path):
    path = tmp_path / "a.trajectories"
    write(path, recorded(1))
    size = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = TrajectoryFileWriter(path)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            writer.append([recorded(2), recorded(3)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert path.stat().st_size == size
    assert writer.append([recorded(4)])
    writer.close()
    assert list(read_groups(path)) == [recorded(1), recorded(4)]


def test_a_foreign_file_is_refused_and_left_as_it_is(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.txt is no trajectory file"):
        list(read_groups(path))
    with pytest.raises(ConfigError, match=r"notes\.txt is no trajectory file"):
        TrajectoryFileWriter(path)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot read trajectories"):
        list(read_groups(tmp_path / "nothing"))


def test_a_damaged_record_is_named(tmp_path: Path):
    path = tmp_path / "a.trajectories"
    write(path, recorded(1), recorded(2))
    content = bytearray(path.read_bytes())
    content[len(HEADER) + 8] = 0xC1  # no msgpack begins like this
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"record 0 of .*a\.trajectories is damaged"):
        list(read_groups(path))


def test_a_group_needs_one_payload_per_trajectory():
    group = recorded(1).group
    with pytest.raises(ValueError, match="1 trajectories, 0 payloads"):
        RecordedGroup(step=0, group=group, payloads=(), transcripts=(b"",))
