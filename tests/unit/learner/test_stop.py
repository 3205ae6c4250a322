import signal
from collections.abc import Iterator

import pytest

from slipstream.learner.stop import StopRequest
from slipstream.wire.process.stopping import STOP_SIGNALS
from tests.support.signals import signals_as_before


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    with signals_as_before():
        request = StopRequest()
        request.listen()
        yield request
        request.close()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_noted_and_the_second_ends(stop: StopRequest, signum: signal.Signals):
    with stop.deferred():
        assert not stop.requested
        signal.raise_signal(signum)
        assert stop.requested
        with pytest.raises(SystemExit, match="0"):
            signal.raise_signal(signum)


def test_a_terminal_that_is_closed_after_ctrl_c_asks_for_nothing_more(stop: StopRequest):
    with stop.deferred():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGHUP)
        assert (stop.requested, stop.arrived) == (True, 1)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_both_are_one_stop_though_the_later_one_is_handled_first(
    stop: StopRequest, signum: signal.Signals
):
    """So it is where both came while the main thread was in a collective."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    with stop.deferred():
        signal.raise_signal(signum)
        signal.raise_signal(signal.SIGHUP)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        assert stop.requested
        with pytest.raises(SystemExit, match="0"):
            signal.raise_signal(signal.SIGTERM)


def test_a_terminal_that_is_closed_asks_once_though_shell_and_kernel_send_its_signal(
    stop: StopRequest,
):
    with stop.deferred():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert stop.requested
        with pytest.raises(SystemExit, match="0"):
            signal.raise_signal(signal.SIGTERM)


def test_a_signal_ends_at_once_where_nothing_would_be_saved(stop: StopRequest):
    with pytest.raises(SystemExit, match="0"):
        signal.raise_signal(signal.SIGTERM)
    with stop.deferred(when=False), pytest.raises(SystemExit, match="0"):
        signal.raise_signal(signal.SIGTERM)
    assert not stop.requested


def test_signals_are_counted_as_they_arrive(stop: StopRequest):
    assert (StopRequest().arrived, stop.arrived) == (0, 0)
    others = (*STOP_SIGNALS, signal.SIGUSR1)
    before = {signum: signal.getsignal(signum) for signum in others}
    for signum in before:  # its handler may come much later, if the main thread is in a collective
        signal.signal(signum, lambda *_: None)
    try:
        signal.raise_signal(signal.SIGUSR1)
        assert stop.arrived == 0
        signal.raise_signal(signal.SIGTERM)
        assert stop.arrived == 1
        signal.raise_signal(signal.SIGTERM)
        assert (stop.arrived, stop.requested) == (2, False)
        signal.raise_signal(signal.SIGHUP)
        assert stop.arrived == 2, "a terminal that is closed then asks for nothing more"
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
