"""What the client of an engine does with a connection on which nothing is sent."""

import asyncio

import pytest
from aiohttp import web

from slipstream.generators.sglang.engine import KEPT_S, SglangEngine
from slipstream.generators.sglang.start_order import SERVER_KEEPS_S
from tests.support.waiting import HANG_S, until_async


async def test_a_connection_that_was_idle_for_longer_than_the_server_keeps_it_is_not_used_again():
    """The server ends one after a time, as the next request arrives: that failed, and counted.

    A loop that stands still between taking a connection and writing must not fail either.
    """
    assert KEPT_S <= SERVER_KEEPS_S / 1000
    ports: list[int] = []
    paths: list[str] = []

    async def answer_to(request: web.Request) -> web.Response:
        ports.append(request.transport.get_extra_info("peername")[1])
        paths.append(request.path)
        return web.json_response({"version": "x"})

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer_to)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    engine = SglangEngine(
        f"http://127.0.0.1:{port}",
        "key",
        request_timeout_s=HANG_S,
        control_timeout_s=HANG_S,
        kept_s=0.2,
    )
    try:
        for pause_s in (0.0, 0.6):
            async with engine._http.get(f"http://127.0.0.1:{port}/health") as answer:
                await answer.read()
            await asyncio.sleep(pause_s)
        await engine.resume()
    finally:
        await engine.close()
        await runner.cleanup()
    assert paths == ["/health", "/health", "/continue_generation"]
    assert ports[0] == ports[1], "a connection is used again"
    assert ports[2] != ports[1], "not one that has been idle"


@pytest.mark.parametrize("status", [200, 500])
async def test_the_end_of_a_session_is_told_without_waiting_and_may_fail(status: int):
    told: list[object] = []
    may_answer, has_told = asyncio.Event(), asyncio.Event()

    async def answer_to(request: web.Request) -> web.Response:
        told.append((request.path, await request.json()))
        has_told.set()
        await may_answer.wait()
        return web.Response(status=status)  # without a body

    app = web.Application()
    app.router.add_post("/{rest:.*}", answer_to)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    engine = SglangEngine(url, "key", request_timeout_s=HANG_S, control_timeout_s=HANG_S)
    without = SglangEngine(
        url, "key", request_timeout_s=HANG_S, control_timeout_s=HANG_S, keeps_sessions=False
    )
    try:
        without.end_session("has no prefixes")
        engine.end_session("a")
        async with asyncio.timeout(HANG_S):
            await has_told.wait()
            may_answer.set()
            await until_async(lambda: not engine._ending)
        may_answer.clear()
        engine.end_session("b")  # goes on while the engine is left
    finally:
        async with asyncio.timeout(HANG_S):
            await engine.close()
            await without.close()
        may_answer.set()
        await runner.cleanup()
    assert told[0] == ("/close_session", {"session_id": "a"})
    assert "has no prefixes" not in str(told)
