"""Signals of a run."""

import os
import signal
from contextlib import suppress

import pytest

from slipstream.deploy.launch.signals import Signals, StopRequestedError


def send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


def test_a_signal_is_raised_where_it_may_be_and_kept_elsewhere():
    signals, forked = Signals(), []

    def fork() -> None:
        with signals.held():
            send(signal.SIGTERM)
            forked.append("child")
        forked.append("more")

    with signals.handled():
        with pytest.raises(StopRequestedError, match="SIGTERM"), signals.raising():
            fork()
        assert forked == ["child"]
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
