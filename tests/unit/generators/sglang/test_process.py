import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from slipstream.generators.sglang.process import SglangProcess, reason_in
from tests.support.waiting import HANG_S


def test_what_is_printed_of_a_server_holds_no_key():
    server = SglangProcess(cast("Any", None), "http://h:1", "s3cret", Path("log"), Path("scratch"))
    assert server.api_key == "s3cret"
    assert "s3cret" not in repr(server)


def test_the_error_of_a_child_is_why_a_server_ended():
    for log, reason in [
        (
            "Traceback ...\nKeyError: 'added_tokens'\n\n[08:02] Received sigquit from a child\n",
            "KeyError: 'added_tokens'",
        ),
        ("a\ntorch.OutOfMemoryError: full\nb\n", "torch.OutOfMemoryError: full"),
        ("loading\nunknown flag\n\n", "unknown flag"),
        ("", "it printed nothing"),
    ]:
        assert reason_in(log) == reason


@pytest.mark.parametrize(("status", "freezes"), [(200, True), (500, True), (200, False)])
async def test_a_server_that_answers_is_asked_to_freeze_its_collectors(
    status: int, *, freezes: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == "/freeze_gc":
            return web.Response(text="frozen", status=status)
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    server = SglangProcess(
        cast("Any", SimpleNamespace(pid=os.getpid(), poll=lambda: None)),
        url,
        "s3cret",
        tmp_path / "log",
        tmp_path,
        ready_url=f"{url}/model_info",
        freezes_collectors=freezes,
    )
    try:
        await server.until_ready(HANG_S)
    finally:
        await runner.cleanup()
    assert asked == ["/model_info", *["/freeze_gc"] * freezes]
    assert ("garbage collectors are not frozen" in caplog.text) is (status != 200)
