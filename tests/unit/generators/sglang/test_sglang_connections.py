"""What the client of an engine does with a connection on which nothing is sent."""

import asyncio

from aiohttp import web

from slipstream.generators.sglang.engine import KEPT_S, SglangEngine
from tests.support.waiting import HANG_S


async def test_a_connection_that_was_idle_for_longer_than_the_server_keeps_it_is_not_used_again():
    """SGLang's server ends one after 5 s, as the next request arrives: that failed, and counted."""
    assert KEPT_S <= 5.0 / 2
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
