from pathlib import Path

import msgspec
import pytest

from slipstream.deploy.launch.resume import (
    ResumePoint,
    find_resume_point,
    refuse_taken,
    resumed_table,
)
from slipstream.learner.checkpoints.digests import DIGESTS_FILE, damage_of, write_digests
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import INFO_FILE, LEDGER_FILE, ledger_file
from slipstream.wire.files.remote_checkpoints import RemoteCheckpoints
from slipstream.wire.files.run_folder import SETTINGS, SUMMARY
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.sections import RunSection
from tests.support.checkpoint_infos import saved_checkpoint, write_checkpoint


def save(run_folder: Path, step: int) -> Path:
    return write_checkpoint(run_folder, 1, step)


def section(folder: Path, steps: int = 100) -> RunSection:
    return RunSection(name="first", dir=str(folder), steps=steps)


def found(run: RunSection, word: str, url: str = "") -> ResumePoint:
    point = find_resume_point(run, word, url)
    assert point is not None
    return point


def test_auto_takes_the_newest_checkpoint_of_the_newest_run_that_has_one(tmp_path: Path):
    save(tmp_path / "first", 10)
    save(tmp_path / "first-2", 4)
    wanted = save(tmp_path / "first-2", 6)
    (tmp_path / "first-3").mkdir()  # ended before its first checkpoint
    save(tmp_path / "second", 50)
    point = found(section(tmp_path), "auto")
    assert (point.run_folder, point.checkpoint) == (tmp_path / "first-2", wanted)


def test_auto_skips_damaged_checkpoints_and_logs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = tmp_path / "first"
    whole, cut, unreadable = save(run, 2), save(run, 4), save(run, 6)
    for folder in (whole, cut):
        (folder / "__0_0.distcp").write_bytes(bytes(1000))
        write_digests(folder)
    (cut / "__0_0.distcp").write_bytes(bytes(499))
    (unreadable / INFO_FILE).write_text("{")
    point = found(section(tmp_path), "auto")
    assert point.checkpoint == whole
    assert "step-000006 is passed over" in caplog.text
    assert "step-000004 is passed over: __0_0.distcp is not as it was written" in caplog.text
    with pytest.raises(ConfigError, match=r"step-000004 is damaged: __0_0\.distcp.*--resume auto"):
        find_resume_point(section(tmp_path), str(cut))
    (whole / "__0_0.distcp").unlink()
    with pytest.raises(ConfigError, match=r"no checkpoint of .* is whole; the newest is .*000004"):
        find_resume_point(section(tmp_path), "auto")


def test_auto_starts_nothing_anew_where_no_checkpoint_can_be_read(tmp_path: Path):
    (save(tmp_path / "first", 2) / INFO_FILE).write_text("")
    (tmp_path / "first" / SUMMARY).write_text('{"outcome": "finished"}')
    with pytest.raises(ConfigError, match=r"no checkpoint of .*first can be read, not even step-0"):
        find_resume_point(section(tmp_path), "auto")


@pytest.mark.parametrize("summary", [None, "[]", "[" * 100_000], ids=["none", "list", "deep"])
def test_auto_begins_a_run_where_there_is_nothing_to_resume(tmp_path: Path, summary: str | None):
    (tmp_path / "first").mkdir()
    if summary is not None:
        (tmp_path / "first" / SUMMARY).write_text(summary)
    assert find_resume_point(section(tmp_path), "auto") is None


def test_a_file_that_no_digest_is_of_is_damage(tmp_path: Path):
    folder = save(tmp_path / "first", 2)
    (folder / "common.pt").write_bytes(bytes(10))
    (folder / DIGESTS_FILE).write_text("{}")
    assert damage_of(folder) == "common.pt is not in digests.json"


def test_one_bit_that_flipped_is_damage(tmp_path: Path):
    folder = save(tmp_path / "first", 2)
    file = folder / "common.pt"
    file.write_bytes(bytes(100))
    assert damage_of(folder) == "", "written before there were digests"
    write_digests(folder)
    assert damage_of(folder) == ""
    for bit in (0, 399, 799):
        data = bytearray(100)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        assert damage_of(folder) == "common.pt is not as it was written"
    file.write_bytes(bytes(100))
    (folder / LEDGER_FILE).write_bytes(ledger_file(b"ledger")[:-1])
    assert "ledger.bin is damaged" in damage_of(folder)
    (folder / LEDGER_FILE).write_bytes(ledger_file(b"ledger"))
    file.unlink()
    assert damage_of(folder) == "common.pt: No such file or directory"
    (folder / DIGESTS_FILE).write_text("{")
    assert "digests.json cannot be read" in damage_of(folder)
    (folder / DIGESTS_FILE).unlink()
    info = msgspec.json.decode((folder / INFO_FILE).read_bytes()) | {"has_digests": True}
    (folder / INFO_FILE).write_bytes(msgspec.json.encode(info))
    assert damage_of(folder) == "no digests.json"


@pytest.mark.parametrize(("outcome", "resumes"), [("running", True), ("finished", False)])
def test_auto_resumes_the_ledger_of_a_run_cut_off_before_a_checkpoint(
    tmp_path: Path, outcome: str, resumes: bool
):
    (tmp_path / "first" / "ledger").mkdir(parents=True)
    (tmp_path / "first" / "summary.json").write_text(f'{{"outcome": "{outcome}"}}')
    point = find_resume_point(section(tmp_path), "auto")
    if not resumes:
        assert point is None
        return
    assert point is not None
    assert (point.run_folder, point.checkpoint) == (tmp_path / "first", None)
    table = resumed_table({"run": {"name": "first"}}, point)
    assert (table["run"]["name"], table["run"]["resume_from"]) == ("first", "")


def test_a_run_folder_and_a_checkpoint_can_be_named(tmp_path: Path):
    early, late = save(tmp_path / "other", 2), save(tmp_path / "other", 4)
    for wanted, checkpoint in ((tmp_path / "other", late), (early, early)):
        point = find_resume_point(section(tmp_path), str(wanted))
        assert point is not None
        assert (point.run_folder, point.checkpoint) == (tmp_path / "other", checkpoint)


def test_complete_run_names_the_setting_to_raise(tmp_path: Path):
    save(tmp_path / "first", 10)
    with pytest.raises(ConfigError, match=r"step 10 of run\.steps = 10: raise run\.steps"):
        find_resume_point(section(tmp_path, steps=10), "auto")


def test_a_folder_without_checkpoint_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="is no checkpoint"):
        find_resume_point(section(tmp_path), str(tmp_path))


def test_resumed_run_keeps_its_settings_and_its_folder(tmp_path: Path):
    checkpoint = save(tmp_path / "first-2", 6)
    point = found(section(tmp_path), "auto")
    table = resumed_table({"run": {"name": "first", "steps": 9}, "learner": {"lr": 0.1}}, point)
    assert table == {
        "run": {
            "name": "first-2",
            "steps": 9,
            "dir": str(tmp_path),
            "resume_from": str(checkpoint),
        },
        "learner": {"lr": 0.1},
    }


def test_a_cut_ledger_has_auto_take_the_checkpoint_before(tmp_path: Path):
    older, newer = (save(tmp_path / "first", step) for step in (2, 4))
    write_digests(newer)
    (newer / LEDGER_FILE).write_bytes(ledger_file(b"ledger")[:-1])
    assert find_resume_point(section(tmp_path), "auto") == ResumePoint(tmp_path / "first", older)


def bucket(tmp_path: Path, *versions: tuple[int, int], run_id: str = "1f") -> str:
    """Return a URL with checkpoints of run "first"."""
    url = f"file://{tmp_path}/bucket"
    for version in versions:
        saved = saved_checkpoint(
            tmp_path / "lost" / "first", PolicyVersion(*version), run_id=run_id
        )
        RemoteCheckpoints(url).upload(*saved, None)
    return url


def saved_here(folder: Path, epoch: int, step: int) -> Path:
    version = PolicyVersion(epoch, step)
    return saved_checkpoint(folder / "first", version, run_id="1f")[0]


def test_auto_fetches_a_checkpoint_that_this_host_lacks(tmp_path: Path):
    url = bucket(tmp_path, (1, 2), (1, 4))
    point = found(section(tmp_path / "runs"), "auto", url)
    assert point.run_folder == tmp_path / "runs" / "first"
    assert point.checkpoint == point.run_folder / "checkpoints" / "step-000004"
    assert damage_of(point.checkpoint) == ""


@pytest.mark.parametrize(
    ("local", "remote", "newest"),
    [
        ((1, 4), (1, 6), "tensors of v1.6"),
        ((1, 6), (1, 4), "tensors of v1.6"),
        ((2, 4), (1, 6), "tensors of v2.4"),  # the run went back since
        ((1, 4), (1, 4), "tensors of v1.4"),
    ],
)
def test_auto_takes_the_newest_of_local_and_remote_checkpoints(
    tmp_path: Path, local: tuple[int, int], remote: tuple[int, int], newest: str
):
    url = bucket(tmp_path, remote)
    saved_here(tmp_path, *local)
    point = found(section(tmp_path), "auto", url)
    assert point.checkpoint is not None
    assert (point.checkpoint / "__0_0.distcp").read_text() == newest


def test_damaged_local_checkpoint_is_replaced_by_the_remote_one(tmp_path: Path):
    url = bucket(tmp_path, (1, 4))
    (saved_here(tmp_path, 1, 4) / "__0_0.distcp").write_bytes(b"")
    point = found(section(tmp_path), "auto", url)
    assert point.checkpoint is not None
    assert damage_of(point.checkpoint) == ""


def test_remote_checkpoints_of_another_run_are_refused_and_nothing_is_fetched(tmp_path: Path):
    url = bucket(tmp_path, (5, 40), run_id="2e")
    saved_here(tmp_path, 1, 4)
    with pytest.raises(ConfigError, match=r"holds checkpoints of another run, 'first'"):
        find_resume_point(section(tmp_path), "auto", url)
    with pytest.raises(ConfigError, match=r"--resume auto, or choose another URL"):
        refuse_taken(url)
    assert [path.name for path in (tmp_path / "first" / "checkpoints").iterdir()] == ["step-000004"]


def test_run_name_in_a_bucket_that_leads_elsewhere_is_refused(tmp_path: Path):
    url = f"file://{tmp_path}/bucket"
    path, info = saved_checkpoint(tmp_path / "lost", PolicyVersion(1, 1))
    RemoteCheckpoints(url).upload(path, msgspec.structs.replace(info, run_name="../evil"), None)
    with pytest.raises(ConfigError, match=r"run\.name must be a plain folder name"):
        find_resume_point(section(tmp_path / "runs"), "auto", url)


def test_empty_or_fresh_place_starts_a_run_there(tmp_path: Path):
    url = bucket(tmp_path)
    refuse_taken(url)
    refuse_taken("")
    assert find_resume_point(section(tmp_path / "runs"), "auto", url) is None


def test_resumed_run_uses_the_content_that_it_was_started_with_unless_told_otherwise(
    tmp_path: Path,
):
    (tmp_path / SETTINGS).write_text('[run.contents]\n"s3://b/m" = "1f"\n')
    point = ResumePoint(tmp_path, None)
    assert resumed_table({"run": {}}, point)["run"]["contents"] == {"s3://b/m": "1f"}
    assert resumed_table({"run": {"contents": {}}}, point)["run"]["contents"] == {}
    (tmp_path / SETTINGS).unlink()
    assert "contents" not in resumed_table({}, point)["run"]
