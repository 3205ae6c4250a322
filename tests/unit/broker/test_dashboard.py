"""The page over a real loopback connection: who gets in, and what they see."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from broker.dashboard.metrics import render_metrics
from broker.dashboard.web import Dashboard
from broker.scoring import ScoringQueue
from broker.telemetry import Telemetry
from tests.unit.broker.ledger_driver import lease, make_ledger, make_ready, train_step
from wire.control import Hello, RoleReport
from wire.run_settings import RunSection
from wire.status import RunStatus
from wire.versions import PolicyVersion


def make_status() -> RunStatus:
    ledger = make_ledger()
    ledger.take_over(0)
    make_ready(ledger, lease(ledger, max_sequences=4))
    train_step(ledger)
    lease(ledger)
    telemetry = Telemetry(RunSection(name="run"), now=lambda: 0.0)
    telemetry.hello(Hello(role="generator", name="generator-0"))
    adopted = PolicyVersion(1, 1)
    telemetry.report(
        "generator-0", RoleReport(phase_seconds={"generate": 1.0}, counters={}, adopted=adopted)
    )
    telemetry.step(1, {"policy/loss": -0.25})
    return telemetry.status(ledger, ScoringQueue(lease_s=1.0))


@asynccontextmanager
async def dashboard() -> AsyncIterator[tuple[aiohttp.ClientSession, URL]]:
    """Yield a session without cookies, and the address with the token in it."""
    page = Dashboard(make_status, port=0)
    address = URL(await page.start())
    jar = aiohttp.DummyCookieJar()
    try:
        async with aiohttp.ClientSession(cookie_jar=jar) as session:
            yield session, address
    finally:
        await page.stop()


@pytest.mark.parametrize("path", ["/", "/events", "/status.json", "/metrics", "/static/page.js"])
def test_nobody_gets_in_without_the_token(path: str):
    async def body() -> list[int]:
        async with dashboard() as (session, address):
            url = address.origin() / path.lstrip("/")
            wrong = url.with_query(token="wrong")  # noqa: S106 no secret
            return [(await session.get(u)).status for u in (url, wrong)]

    assert asyncio.run(body()) == [401, 401]


def test_another_host_name_is_refused_even_with_the_token():
    async def body() -> int:
        async with dashboard() as (session, address):
            reply = await session.get(address, headers={"Host": "evil.example:80"})
            return reply.status

    assert asyncio.run(body()) == 403


def test_the_page_allows_its_own_files_only_and_leaves_a_private_cookie():
    async def body() -> tuple[int, str, str, list[int]]:
        async with dashboard() as (session, address):
            reply = await session.get(address)
            policy = reply.headers["Content-Security-Policy"]
            cookie = reply.headers["Set-Cookie"]
            headers = {"Cookie": cookie.partition(";")[0]}
            files = [
                (await session.get(address.origin() / "static" / name, headers=headers)).status
                for name in ("page.js", "page.css", "page.html", "..%2fweb.py")
            ]
            return reply.status, policy, cookie, files

    status, policy, cookie, files = asyncio.run(body())
    assert status == 200
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert files == [200, 200, 404, 404]


def test_metrics_are_what_prometheus_reads():
    async def body() -> str:
        async with dashboard() as (session, address):
            token = {"Authorization": f"Bearer {address.query['token']}"}
            reply = await session.get(address.origin() / "metrics", headers=token)
            assert reply.status == 200
            return await reply.text()

    text = asyncio.run(body())
    families = {family.name: family for family in text_string_to_metric_families(text)}

    def values(name: str) -> dict[tuple[str, ...], float]:
        return {tuple(s.labels.values()): s.value for s in families[name].samples}

    assert values("slipstream_learner_steps") == {(): 1.0}
    assert values("slipstream_groups_unaccounted") == {(): 0.0}
    assert values("slipstream_groups_in_flight")["leased",] == 4.0
    assert values("slipstream_trained_tokens") == {("0",): 16.0}
    assert values("slipstream_adopted_step") == {("generator-0",): 1.0}
    assert values("slipstream_last_step") == {("policy/loss",): -0.25}
    assert families["slipstream_groups_issued"].type == "counter"


def test_metrics_of_a_run_that_has_not_begun_hold_no_evaluation():
    telemetry = Telemetry(RunSection(), now=lambda: 0.0)
    body, content_type = render_metrics(telemetry.status(make_ledger(), ScoringQueue(lease_s=1.0)))
    assert content_type.startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(body.decode())}
    assert "slipstream_groups_issued" in names
    assert "slipstream_evaluation" not in names


def test_the_first_event_is_the_state_of_the_run():
    async def body() -> tuple[str, bytes]:
        async with (
            dashboard() as (session, address),
            session.get(address.with_path("/events", keep_query=True)) as reply,
        ):
            return reply.headers["Content-Type"], await reply.content.readuntil(b"\n\n")

    content_type, event = asyncio.run(body())
    assert content_type == "text/event-stream"
    kind, _, data = event.partition(b": ")
    assert kind == b"data"
    assert msgspec.json.decode(data, type=RunStatus) == make_status()


def test_the_state_is_there_for_programs_too():
    async def body() -> bytes:
        async with dashboard() as (session, address):
            reply = await session.get(address.with_path("/status.json", keep_query=True))
            return await reply.read()

    assert msgspec.json.decode(asyncio.run(body()), type=RunStatus).run_name == "run"
