import asyncio
import threading

import pytest

from slipstream.wire.errors import PeerLostError
from slipstream.wire.process.background import BackgroundLoop


async def answer() -> tuple[int, str]:
    return 42, threading.current_thread().name


async def fail(error: Exception) -> None:
    raise error


def test_a_coroutine_runs_on_another_thread_and_its_result_comes_back():
    with BackgroundLoop() as loop:
        assert loop.run(answer()) == (42, "io")


def test_an_error_of_a_coroutine_is_raised_where_it_was_asked():
    with BackgroundLoop() as loop, pytest.raises(PeerLostError, match="gone"):
        loop.run(fail(PeerLostError("gone")))


def test_what_runs_beside_the_caller_reports_its_death_at_the_next_check():
    async def body(ended: "asyncio.Future[None]") -> None:
        ended.set_result(None)
        raise PeerLostError("gone")

    async def make_future() -> "asyncio.Future[None]":
        return asyncio.get_running_loop().create_future()

    async def settle(future: "asyncio.Future[None]") -> None:
        await future
        await asyncio.sleep(0)  # let the task end

    with BackgroundLoop() as loop:
        loop.check()
        ended = loop.run(make_future())
        loop.start(body(ended))
        loop.run(settle(ended))
        for _ in range(2):
            with pytest.raises(PeerLostError, match="gone"):
                loop.check()


def test_leaving_cancels_what_still_runs_and_lets_it_clean_up():
    log: list[str] = []

    async def forever() -> None:
        log.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            log.append("cleaned up")

    with BackgroundLoop() as loop:
        loop.start(forever())
        loop.run(answer())
        assert log == ["began"]
    assert log == ["began", "cleaned up"]
    loop.check()


def test_a_function_is_called_on_the_thread_of_the_loop():
    names: list[str] = []
    with BackgroundLoop() as loop:
        loop.call(lambda: names.append(threading.current_thread().name))
        loop.run(answer())
    assert names == ["io"]
