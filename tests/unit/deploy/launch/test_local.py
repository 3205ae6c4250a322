"""Signals of a run, and its temporary folder."""

import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from slipstream.deploy.launch.local import _OWNER, remove_scratch_of_killed_run
from slipstream.deploy.launch.signals import Signals, StopRequestedError
from slipstream.wire.settings.sections import RunSection


def send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


def test_a_signal_is_raised_where_it_may_be_and_kept_elsewhere():
    signals, is_forking = Signals(), True
    signals.held_while(lambda: is_forking)

    def fork() -> None:
        nonlocal is_forking
        send(signal.SIGTERM)
        is_forking = False
        signals.raise_received()

    with signals.handled():
        with pytest.raises(StopRequestedError, match="SIGTERM"), signals.raising():
            fork()
        send(signal.SIGINT)  # the clean-up goes on
        with pytest.raises(StopRequestedError, match="SIGINT"), signals.raising():
            raise AssertionError("it arrived before the block")
        send(signal.SIGINT)
        signals.forget()
        with signals.raising():
            pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_comes_twice_is_raised_once():
    def twice() -> None:
        try:
            send(signal.SIGINT)
        finally:
            send(signal.SIGINT)

    signals = Signals()
    with signals.handled(), pytest.raises(StopRequestedError), signals.raising():
        twice()


def test_a_closed_terminal_stops_a_run_once_though_shell_and_kernel_send_its_signal():
    signals = Signals()
    with signals.handled():
        with pytest.raises(StopRequestedError) as stopped, signals.raising():
            send(signal.SIGHUP)
        with signals.raising():  # the learner saves
            send(signal.SIGHUP)
    assert (str(stopped.value), stopped.value.exit_code) == ("SIGHUP", 129)


@pytest.mark.parametrize("first", [[signal.SIGINT], [signal.SIGTERM], []])
def test_a_terminal_that_is_closed_does_not_cut_off_the_save(first: list[signal.Signals]):
    """It counted as a second Ctrl-C, also where the run had failed by itself."""
    signals = Signals()
    with signals.handled():
        with suppress(StopRequestedError), signals.raising():
            for signum in first:
                send(signum)
        signals.forget()
        with signals.raising():  # the learner saves
            send(signal.SIGHUP)
        with pytest.raises(StopRequestedError, match="SIGINT"), signals.raising():
            send(signal.SIGINT)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.parametrize("owner", ["this", "another", "none"])
def test_a_copy_of_a_run_folder_removes_nothing_of_the_original(tmp_path: Path, owner: str):
    run = RunSection(name="copy", dir=str(tmp_path))
    run.folder.mkdir()
    scratch = Path(tempfile.mkdtemp(prefix="slipstream-"))
    if owner != "none":
        named = run.folder if owner == "this" else tmp_path / "original"
        (scratch / _OWNER).write_text(str(named))
    (run.folder / "resolved.toml").write_text(f'[run]\nsocket_dir = "{scratch}/sockets"\n')
    try:
        remove_scratch_of_killed_run(run)
        assert scratch.exists() == (owner != "this")
    finally:
        if scratch.exists():
            (scratch / _OWNER).unlink(missing_ok=True)
            scratch.rmdir()


@pytest.mark.parametrize("content", [b"[run", b"\xff\xfe", b""])
def test_settings_that_were_cut_off_do_not_keep_a_run_from_resuming(tmp_path: Path, content: bytes):
    run = RunSection(name="cut", dir=str(tmp_path))
    run.folder.mkdir()
    (run.folder / "resolved.toml").write_bytes(content)
    remove_scratch_of_killed_run(run)
