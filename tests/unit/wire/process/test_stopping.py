import asyncio
import signal
from collections.abc import Iterator

import pytest

from slipstream.wire.process.stopping import STOP_SIGNALS, heeded_signals, stop_event
from tests.support.signals import signals_as_before


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    with signals_as_before():
        yield


async def hear() -> None:
    """Let the loop handle what has arrived."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("signum", STOP_SIGNALS)
async def test_each_of_them_asks_a_role_to_stop(signum: signal.Signals):
    stop = stop_event()
    signal.raise_signal(signum)
    await hear()
    assert stop.is_set()


async def test_a_closed_terminal_asks_once_though_shell_and_kernel_send_its_signal():
    stop_event()
    signal.raise_signal(signal.SIGHUP)
    await hear()
    again = stop_event()
    signal.raise_signal(signal.SIGHUP)
    await hear()
    assert not again.is_set()
    signal.raise_signal(signal.SIGTERM)
    await hear()
    assert again.is_set()


async def test_under_nohup_a_closed_terminal_stops_nothing():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert heeded_signals() == [signal.SIGINT, signal.SIGTERM]
    stop = stop_event()
    signal.raise_signal(signal.SIGHUP)
    await hear()
    assert not stop.is_set()
