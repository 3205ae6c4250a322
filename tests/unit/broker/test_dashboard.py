"""The page over a real loopback connection: who gets in, and what they see."""

import asyncio
import itertools
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from broker.dashboard.history import read_state
from broker.dashboard.items import RecordedItems
from broker.dashboard.metrics import render_metrics
from broker.dashboard.recorder import FinishedRun, Recorder
from broker.dashboard.web import Dashboard
from broker.scoring import ScoringQueue
from broker.telemetry import Telemetry
from tests.unit.broker.ledger_driver import lease, make_ledger, make_ready, train_step
from wire.control import Hello, RoleReport
from wire.run_folder import PAGE_STATE, TRAINED
from wire.run_settings import RunSection
from wire.status import RunStatus
from wire.versions import PolicyVersion

SCRIPT = "<script>alert(1)</script>"


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


def write_rows(folder: Path) -> None:
    """Write two recorded trajectories of group 7; the second has tokens of two versions."""
    row = {
        "step": 3,
        "group_id": 7,
        "sibling": 0,
        "prompt": "12+34=",
        "answer": "46<eos>",
        "reward": 1.0,
        "parts": {"format": 1.0},
        "finish_reason": "stop",
        "temperature": 1.0,
        "num_prompt_tokens": 2,
        "token_ids": [1, 2, 3, 4, 5],
        "token_texts": ["4", "6", "<eos>"],
        "version_runs": [{"first_token": 2, "version": "v1.3", "step": 3}],
        "logprob_diffs": [0.0, 0.5, -0.25],
    }
    runs = [
        {"first_token": 2, "version": "v1.1", "step": 1},
        {"first_token": 4, "version": "v1.2", "step": 2},
    ]
    other = row | {"sibling": 1, "version_runs": runs, "reward": 0.0, "prompt": SCRIPT}
    (folder / TRAINED).parent.mkdir(parents=True)
    lines = (json.dumps(one) + "\n" for one in (row, other))
    (folder / TRAINED).write_text("".join(lines) + '{"step": 4, "gro')


@asynccontextmanager
async def dashboard() -> AsyncIterator[tuple[aiohttp.ClientSession, URL]]:
    """Yield a session without cookies, and the address with the token in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder)
        recorder = Recorder(make_status, folder / PAGE_STATE, high_water_bytes=0, fsync="always")
        page = Dashboard(recorder, RecordedItems(folder), host="127.0.0.1", port=0)
        address = URL(await page.start())
        jar = aiohttp.DummyCookieJar()
        looking = asyncio.create_task(recorder.run())
        try:
            async with aiohttp.ClientSession(cookie_jar=jar) as session:
                yield session, address
        finally:
            await page.stop()
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking


@pytest.mark.parametrize(
    "path",
    ["/", "/events", "/state.json", "/items", "/trajectory", "/metrics", "/static/page.js"],
)
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
                for name in ("page.js", "uplot.js", "page.html", "..%2fweb.py")
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
    sent = msgspec.json.decode(data)
    assert sent.keys() == {"status", "advisories", "live", "point", "steps"}
    assert sent["status"]["issued"] == make_status().issued
    assert (sent["live"], sent["point"]["trained"]) == (True, make_status().trained)


async def answer(
    session: aiohttp.ClientSession, address: URL, path: str, **query: str
) -> dict[str, Any]:
    url = address.with_path(path).with_query({**address.query, **query})
    return msgspec.json.decode(await (await session.get(url)).read())


def test_the_state_holds_how_the_run_came_to_it():
    async def body() -> dict[str, Any]:
        async with dashboard() as (session, address):
            return await answer(session, address, "/state.json")

    state = asyncio.run(body())
    expected = make_status()
    equation = ("issued", "trained", "dropped", "in_flight", "unaccounted")
    assert {name: state["status"][name] for name in equation} == {
        name: getattr(expected, name) for name in equation
    }
    assert state["history"]["steps"]["step"] == [1.0]
    assert state["history"]["steps"]["series"] == {"policy/loss": [-0.25]}
    assert state["history"]["time"]["series"]["busy:generator-0"] == [1.0]
    assert state["live"] is True


@pytest.mark.parametrize(
    ("query", "siblings"),
    [
        ({}, [1, 0]),
        ({"q": "g7"}, [1, 0]),
        ({"q": "7"}, [1, 0]),
        ({"q": "12+34"}, [0]),
        ({"q": "<SCRIPT>"}, [1]),
        ({"q": "g8"}, []),
        ({"lag": "2"}, [1]),
        ({"lag": "0"}, [0]),
        ({"lag": "5"}, []),
    ],
)
def test_recorded_trajectories_are_found(query: dict[str, str], siblings: list[int]):
    async def body() -> dict[str, Any]:
        async with dashboard() as (session, address):
            return await answer(session, address, "/items", **query)

    found = asyncio.run(body())
    assert [one["sibling"] for one in found["items"]] == siblings
    assert found["more"] is False


def test_every_token_of_a_trajectory_has_its_version_and_the_difference():
    async def body() -> dict[str, Any]:
        async with dashboard() as (session, address):
            return await answer(session, address, "/trajectory", group="7", sibling="1")

    found = asyncio.run(body())
    assert found["prompt"] == SCRIPT
    assert found["tokens"] == [
        {"text": "4", "version": "v1.1", "lag": 2, "diff": 0.0},
        {"text": "6", "version": "v1.1", "lag": 2, "diff": 0.5},
        {"text": "<eos>", "version": "v1.2", "lag": 1, "diff": -0.25},
    ]
    assert found["siblings"] == [{"sibling": 0, "reward": 1.0}, {"sibling": 1, "reward": 0.0}]


def test_a_trajectory_that_was_not_recorded_says_so():
    async def body() -> tuple[dict[str, Any], int]:
        async with dashboard() as (session, address):
            found = await answer(session, address, "/trajectory", group="9", sibling="0")
            url = address.with_path("/trajectory").with_query({**address.query, "group": "x"})
            return found, (await session.get(url)).status

    found, refused = asyncio.run(body())
    assert (found["found"], found["tokens"], refused) == (False, [], 400)


def test_rows_that_are_written_later_are_found_and_a_file_that_was_cut_is_read_anew(
    tmp_path: Path,
):
    write_rows(tmp_path)
    items, path = RecordedItems(tmp_path), tmp_path / TRAINED
    assert len(items.find().items) == 2
    row = json.loads(path.read_text().splitlines()[0])
    whole = "".join(line + "\n" for line in path.read_text().splitlines()[:2])
    path.write_text(whole + json.dumps(row | {"group_id": 8}) + "\n")
    assert [one.group_id for one in items.find().items] == [8, 7, 7]
    path.write_text(json.dumps(row | {"group_id": 9}) + "\n")
    assert [one.group_id for one in items.find().items] == [9]
    assert items.trajectory(9, 0).found


def test_a_broker_that_starts_again_goes_on_with_the_history(tmp_path: Path):
    now = itertools.count(1_763_786_000)

    def recorder() -> Recorder:
        return Recorder(
            make_status,
            tmp_path / PAGE_STATE,
            high_water_bytes=0,
            fsync="always",
            now=lambda: float(next(now)),
        )

    async def run_for_a_moment(one: Recorder) -> None:
        task = asyncio.create_task(one.run())
        await asyncio.sleep(0.05)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    first = recorder()
    asyncio.run(run_for_a_moment(first))
    second = recorder()
    before, after = first.columns(), second.columns()
    assert after.began_s == before.began_s
    assert after.time.at_s[: len(before.time.at_s)] == before.time.at_s
    assert after.steps == before.steps  # the same step is not counted twice
    stored = read_state(tmp_path / PAGE_STATE)
    assert stored is not None
    page = FinishedRun(stored, high_water_bytes=0, fsync="always")
    assert (page.look.live, page.look.status.issued) == (False, make_status().issued)
    assert page.columns() == before


def test_the_state_is_there_for_programs_too():
    async def body() -> bytes:
        async with dashboard() as (session, address):
            reply = await session.get(address.with_path("/status.json", keep_query=True))
            return await reply.read()

    assert msgspec.json.decode(asyncio.run(body()), type=RunStatus).run_name == "run"
