"""The end of each log, plain and bounded."""

from pathlib import Path

from slipstream.broker.dashboard.logs import MAX_CHARS, MAX_LINES, lines_of, newest_lines


def test_every_log_of_a_run_is_shown_with_its_newest_lines(tmp_path: Path):
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "learner.log").write_text("".join(f"line {i}\n" for i in range(10_000)))
    (folder / "broker.log").write_text("one\ntwo")
    (folder / "notes.txt").write_text("no log")
    (folder / "elsewhere.log").symlink_to("/etc/passwd")
    broker, learner = newest_lines(tmp_path)
    assert (broker.name, broker.lines) == ("broker", ["one", "two"])
    assert learner.name == "learner"
    assert learner.lines == [f"line {i}" for i in range(10_000 - MAX_LINES, 10_000)]


def test_a_line_is_cut_and_what_controls_a_terminal_is_replaced():
    long, colored, turned = lines_of(b"x" * 9_999 + b"\n\x1b[31mred\xff\n" + "\u202eleft".encode())
    assert long == "x" * MAX_CHARS + "..."
    assert colored == "\ufffd[31mred\ufffd"
    assert turned == "\ufffdleft"


def test_a_line_longer_than_what_is_read_is_not_shown_in_part(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_bytes(b"y" * 100_000 + b"\nlast\n")
    (log,) = newest_lines(tmp_path)
    assert log.lines == ["last"]


def test_a_run_without_logs_has_none(tmp_path: Path):
    assert newest_lines(tmp_path) == []
