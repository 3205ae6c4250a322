"""`slipstream top`: keys, signals and a broker that does not answer."""

import json
import os
import signal
import termios
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.broker.history.columns import StoredState, write_state
from slipstream.broker.history.history import RunHistory
from slipstream.deploy.commands.top import ends_in_order, keys_of, main
from slipstream.deploy.terminal.observe import outcome_of, trouble_of
from slipstream.deploy.terminal.recent import recent_of
from slipstream.wire.errors import ConfigError, PeerLostError
from slipstream.wire.files.run_folder import PAGE_STATE
from slipstream.wire.settings.sections import RunSection
from tests.support.commands import call_command
from tests.support.wire_samples import STATUS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = f'[run]\nname = "{tmp_path.name}"\ndir = "{tmp_path.parent}"\n'
    text = f'{run}[broker.redis]\nfsync = "everysec"\n'
    (tmp_path / "resolved.toml").write_text(text)
    return tmp_path


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = os.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def test_json_without_a_broker_reports_that_none_runs(folder: Path):
    with pytest.raises(PeerLostError, match="no broker runs"):
        call_command("top", folder, json=True)


def test_the_state_of_a_run_that_has_ended_is_what_the_broker_wrote_last(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    columns = RunHistory(began_s=0.0).columns()
    write_state(folder / PAGE_STATE, StoredState(at_s=0.0, status=STATUS, history=columns))
    (folder / "summary.json").write_text('{"outcome": "finished"}')
    assert call_command("top", folder, json=True) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["outcome"] == "finished"
    assert figures["steps"] == STATUS.steps
    assert [one["rule"] for one in figures["advisories"]] == ["fsync-too-weak"]


def test_the_screen_of_an_ended_run_is_printed_from_its_folder_wherever_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    columns = RunHistory(began_s=0.0).columns()
    write_state(folder / PAGE_STATE, StoredState(at_s=0.0, status=STATUS, history=columns))
    (folder / "summary.json").write_text('{"outcome": "failed: the disk is full"}')
    moved = folder.rename(folder.with_name("moved"))
    monkeypatch.chdir(moved)
    assert main(Namespace(folder=Path(), json=False, once=True)) == 0
    assert "the run has ended: failed: the disk is full" in capsys.readouterr().out
    (moved / "summary.json").unlink()  # its supervisor was killed
    assert main(Namespace(folder=Path(), json=True, once=False)) == 0
    assert "it was killed" in json.loads(capsys.readouterr().out)["outcome"]


def test_what_is_no_terminal_cannot_be_drawn_on(folder: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match="--json"):
        call_command("top", folder)
    assert capsys.readouterr().out == ""


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="not a run folder"):
        call_command("top", tmp_path, json=True)


def test_a_key_is_read_at_once_and_the_terminal_is_as_before(terminal: tuple[int, int]):
    ours, theirs = terminal
    before = termios.tcgetattr(theirs)
    with keys_of(theirs) as keys:
        lines = termios.tcgetattr(theirs)[3]
        assert not lines & (termios.ICANON | termios.ECHO)
        assert lines & termios.ISIG  # Ctrl-C is still a signal
        assert keys.pressed(0.0) == ""
        os.write(ours, b"q")
        assert keys.pressed(5.0) == "q"
    assert termios.tcgetattr(theirs) == before


def test_the_terminal_is_as_before_after_an_error_too(terminal: tuple[int, int]):
    _, theirs = terminal
    before = termios.tcgetattr(theirs)
    with pytest.raises(ZeroDivisionError), keys_of(theirs):
        raise ZeroDivisionError
    assert termios.tcgetattr(theirs) == before


def test_no_keys_are_read_without_a_terminal():
    with keys_of(None) as keys:
        assert keys.pressed(0.0) == ""


def test_ctrl_c_ends_in_order_and_a_signal_ends_the_process():
    with ends_in_order():
        raise KeyboardInterrupt
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, ends_in_order():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == handler


def test_unanswering_broker_and_ended_run_are_distinguished():
    assert trouble_of("", 0.9, "") == ""
    silent = trouble_of("", 4.0, "")
    assert "the broker has not answered for 4 s and is asked every second" in silent
    assert "start-broker" not in silent
    assert "start-broker; see logs/broker.log" in trouble_of("", 31.0, "")
    assert "gone" in trouble_of("gone", 1.0, "running")
    assert trouble_of("gone", 1.0, "finished") == "the run has ended: finished"


def test_the_outcome_of_a_run_is_read_from_its_summary(tmp_path: Path):
    run = RunSection(name="r", dir=str(tmp_path))
    assert outcome_of(run) == ""
    run.folder.mkdir()
    run.summary_file.write_text("{")
    assert outcome_of(run) == ""
    run.summary_file.write_text('{"outcome": "stopped"}')
    assert outcome_of(run) == "stopped"


def test_the_history_that_the_broker_wrote_is_continued(folder: Path):
    history = RunHistory(began_s=0.0)
    for point in STATUS.steps_history:
        history.step(point, point.at_s)
    stored = StoredState(at_s=1.0, status=STATUS, history=history.columns())
    write_state(folder / PAGE_STATE, stored)
    recent = recent_of(folder, stored)
    recent.evaluate(STATUS)
    assert recent.curve("policy/loss") == [0.1]
    assert [advisory.rule for advisory in recent.advisories()] == ["fsync-too-weak"]
