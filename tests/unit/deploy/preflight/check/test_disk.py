from pathlib import Path

from slipstream.deploy.preflight.check.disk import SeenDisk, judge_space, judge_sync, see_disk


def test_a_slow_disk_is_a_warning_and_never_a_failure():
    assert judge_sync(SeenDisk(Path("/d"), 0.002, 0)).found == "2.0 ms for 4 KiB in /d"
    slow = judge_sync(SeenDisk(Path("/d"), 7.0, 0))
    assert (slow.outcome, slow.setting) == ("warn", "run.dir, broker.redis.fsync")


def test_checkpoints_that_do_not_fit_are_a_failure():
    mib = 1 << 20
    assert judge_space(30 * mib, 10 * mib, 3).outcome == "ok"
    found = judge_space(29 * mib, 10 * mib, 3)
    assert found.line == (
        "fail disk space: 29 MiB are free; 3 checkpoints of 10.0 MiB take 30 MiB "
        "(run.dir, checkpoint.keep_last)"
    )


def test_a_disk_is_seen_without_a_file_left(tmp_path: Path):
    seen = see_disk(tmp_path / "runs" / "x")
    assert seen.folder == tmp_path
    assert seen.free_bytes > 0
    assert not list(tmp_path.iterdir())
