"""The judge against a server that answers as scripted, and against a real SGLang server."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slipstream.broker.config import RewardSection
from slipstream.broker.reward_worker.pool import RewardPool
from slipstream.broker.rewards.judge import LlmJudge
from slipstream.broker.rewards.sdk import Transcript, Unavailable
from slipstream.generators.sglang.process import SglangProcess
from slipstream.wire.files.keys import write_private
from slipstream.wire.messages.broker import ScoringItem
from slipstream.wire.messages.trajectory import Prompt, Score
from tests.support.tiny_run import sglang_server
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


# ---- SGLang --------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[SglangProcess]:
    with sglang_server() as process:
        yield process


@pytest.fixture
def key_file(server: SglangProcess, tmp_path: Path) -> str:
    write_private(tmp_path / "sglang.key", server.api_key)
    return str(tmp_path / "sglang.key")


def scores(options: dict[str, Any], count: int = 4) -> list[Score]:
    settings = RewardSection(function="slipstream.broker.rewards.judge:LlmJudge", options=options)
    work = [
        (ScoringItem(group_id=0, sibling=n, lease_id=n), transcript(str(n))) for n in range(count)
    ]

    async def body() -> list[Score]:
        pool = await RewardPool.start(settings)
        try:
            return [score async for score in pool.score(work)]
        finally:
            await pool.close()

    return asyncio.run(body())


def test_a_model_of_sglang_grades(server: SglangProcess, key_file: str):
    found = scores(
        {
            "url": f"{server.url}/v1",
            "api": "completions",
            "template": "{answer}=",
            "pattern": r"(\d)",
            "scale": 9,
            "max_tokens": 64,
            "api_key_file": key_file,
            "extra": {"ignore_eos": True, "stop": list("0123456789"), "no_stop_trim": True},
        }
    )
    assert len(found) == 4
    for score in found:
        assert (score.reward is not None) or "the judge's reply" in score.unavailable
    assert any(score.reward is not None for score in found), found


def test_a_model_of_sglang_that_talks_nonsense_gives_no_reward(
    server: SglangProcess, key_file: str
):
    options = {
        "url": f"{server.url}/v1",
        "api": "completions",
        "template": "{answer}=",
        "max_tokens": 8,
        "api_key_file": key_file,
    }
    for score in scores(options):
        assert score.unavailable.startswith(
            ("the judge's reply holds no number", "the judge's reply was cut off")
        )


def test_sglang_without_the_key_gives_no_reward(server: SglangProcess):
    (score,) = scores({"url": f"{server.url}/v1", "template": "{answer}"}, count=1)
    assert "HTTP 401" in score.unavailable
