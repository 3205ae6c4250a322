"""The judge against a server that answers as scripted (a real one: test_sglang_server.py)."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slipstream.broker.rewards.judge import LlmJudge
from slipstream.broker.rewards.sdk import Transcript, Unavailable
from slipstream.wire.files.keys import write_private
from slipstream.wire.messages.trajectory import Prompt
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
KEY = "judge-key-4711"


def transcript(answer: str = "12") -> Transcript:
    return Transcript(
        prompt=Prompt(prompt="6+6=", ground_truth="12"),
        response=answer,
        num_response_tokens=2,
        finish_reason="stop",
    )


@asynccontextmanager
async def endpoint(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]):
    """Yield the URL of a server with one answer."""
    app = web.Application()
    app.router.add_post("/v1/{api:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()


def asked(
    reply: Callable[[dict[str, Any]], web.Response], **options: object
) -> tuple[float | str, list[dict[str, Any]]]:
    """Return the reward or why there is none, and what the server was asked."""
    seen: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        headers = request.headers.get("Authorization")
        seen.append({"path": request.path, "key": headers, **body})
        if reply is SILENCE:
            await asyncio.sleep(1000)
        return reply(body)

    async def body() -> float | str:
        async with endpoint(handler) as url:
            judge = LlmJudge(url=url, **options)  # type: ignore[arg-type]  # any options
            try:
                return await judge.score(transcript())
            except Unavailable as why:
                return str(why)
            finally:
                await judge.close()

    return asyncio.run(body()), seen


def answering(
    text: str | None, finish_reason: str = "stop"
) -> Callable[[dict[str, Any]], web.Response]:
    message = {"role": "assistant", "content": text}
    choice = {"message": message, "finish_reason": finish_reason}
    return lambda _: web.json_response({"id": "x", "choices": [choice]})


def SILENCE(_: dict[str, Any]) -> web.Response:  # noqa: N802 a constant of the tests
    return web.Response()


def test_a_chat_judge_is_asked_with_its_key_and_its_last_number_counts(tmp_path: Path):
    write_private(tmp_path / "judge.key", KEY + "\n")
    reward, seen = asked(
        answering("Score: 2 was my first thought.\nScore: 7.5"),
        model="grader",
        api_key_file=str(tmp_path / "judge.key"),
        extra={"seed": 1},
    )
    assert reward == 0.75
    (request,) = seen
    assert request["path"] == "/v1/chat/completions"
    assert request["key"] == f"Bearer {KEY}"
    assert (request["model"], request["temperature"], request["seed"]) == ("grader", 0.0, 1)
    (message,) = request["messages"]
    assert "6+6=" in message["content"]


def test_a_completions_judge_gets_a_prompt():
    reward, seen = asked(
        lambda _: web.json_response({"choices": [{"text": " 3"}]}),
        api="completions",
        template="{answer} of {scale}:",
        pattern=r"(\d+)",
        scale=4,
    )
    assert reward == 0.75
    assert seen[0]["path"] == "/v1/completions"
    assert seen[0]["prompt"].endswith("of 4:")


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (answering("very good"), "no number: very good"),
        (answering(None), "no number"),
        (
            answering("Score: 8. But wait", "length"),
            "cut off, raise max_tokens: Score: 8. But wait",
        ),
        (
            lambda _: web.json_response({"choices": [{"text": "7", "finish_reason": "length"}]}),
            "cut off",
        ),
        (answering("Score: 11"), r"11 is not in \[0, 10\]"),
        (answering("Score: -1"), r"-1 is not in \[0, 10\]"),
        (lambda _: web.Response(status=500, text="out of memory"), "HTTP 500: out of memory"),
        (lambda _: web.Response(status=401), "HTTP 401"),
        (lambda _: web.Response(status=302, headers={"Location": "/v1/x"}), "HTTP 302"),
        (lambda _: web.Response(text="<html>"), "cannot be read"),
        (lambda _: web.json_response({"choices": []}), "no choices"),
        (lambda _: web.json_response({"choices": [{"message": 3}]}), "cannot be read"),
        (lambda _: web.Response(body=b"x" * 3_000_000), "longer than"),
        (SILENCE, r"longer than \d"),
    ],
)
def test_whatever_is_no_number_gives_no_reward(
    reply: Callable[[dict[str, Any]], web.Response], why: str
):
    for timeout_s in (0.3, 3.0, 30.0) if reply is SILENCE else (HANG_S,):
        reason, seen = asked(reply, timeout_s=timeout_s)
        if seen:  # else the machine was too slow to ask in this time
            break
    assert isinstance(reason, str)
    assert re.search(why, reason), reason
    assert len(seen) == 1
