"""The page over a real loopback connection: access, and what is shown."""

import asyncio
import itertools
import json
import logging
import re
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from slipstream.broker.advisories.view import Advisory
from slipstream.broker.dashboard.items import RecordedItems
from slipstream.broker.dashboard.metrics import render_metrics
from slipstream.broker.dashboard.recorder import FinishedRun, Snapshot, SnapshotRecorder, fsync_of
from slipstream.broker.dashboard.web import MAX_VIEWERS, Dashboard
from slipstream.broker.history.columns import (
    HistoryColumns,
    StepColumns,
    StoredState,
    TimeColumns,
    read_state,
    write_state,
)
from slipstream.broker.history.history import RunHistory
from slipstream.broker.history.table import Row
from slipstream.broker.history.trajectories import Found, Letter
from slipstream.broker.ledger.events import Trained, encode_event
from slipstream.broker.ledger.scoring_queue import ScoringQueue
from slipstream.broker.listening.host_names import name_of
from slipstream.broker.report.telemetry import Telemetry
from slipstream.broker.service import trained_steps
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.files.run_folder import PAGE_PORT, PAGE_STATE, PAGE_TOKEN, TRAINED
from slipstream.wire.messages.broker import Hello, RoleReport
from slipstream.wire.messages.status import GONE_S, SILENT_S, RunStatus, StepPoint
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.pixels import checked_image
from slipstream.wire.settings.sections import RunSection
from tests.support.drawn_images import drawn
from tests.support.ledger_driver import lease, make_ledger, make_ready, train_step
from tests.support.waiting import HANG_S, until_async
from tests.support.wire_samples import STATUS

SCRIPT = "<script>alert(1)</script>"


def make_status() -> RunStatus:
    ledger = make_ledger()
    ledger.training.take_over(0)
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
    return telemetry.status(ledger.book, ScoringQueue(lease_s=1.0))


def recorder_in(
    folder: Path,
    status: Callable[[], RunStatus] = make_status,
    **options: Any,  # noqa: ANN401
) -> SnapshotRecorder:
    return SnapshotRecorder(
        status, folder / PAGE_STATE, high_water_bytes=0, fsync="always", **options
    )


async def cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


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
async def dashboard(
    *,
    host: str = "127.0.0.1",
    items: Callable[[Path], RecordedItems] = RecordedItems,
    status: Callable[[], RunStatus] = make_status,
    read_s: float = HANG_S,
) -> AsyncIterator[tuple[aiohttp.ClientSession, URL]]:
    """Yield a session without cookies, and the address with the token in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder)
        recorder = recorder_in(folder, status)
        page = Dashboard(recorder, items(folder), host=host, port=0, read_s=read_s)
        address = URL(await page.start())
        jar = aiohttp.DummyCookieJar()
        recording = asyncio.create_task(recorder.run())
        try:
            async with aiohttp.ClientSession(cookie_jar=jar) as session:
                yield session, address
        finally:
            await page.stop()
            await cancelled(recording)


@pytest.mark.parametrize(
    "path", ["/", "/events", "/state.json", "/items", "/trajectory", "/metrics", "/static/page.js"]
)
async def test_requests_without_the_right_token_are_refused(path: str):
    async with dashboard() as (session, address):
        url = address.origin() / path.lstrip("/")
        wrong = url.with_query(token="wrong")  # noqa: S106 no secret
        assert [(await session.get(u)).status for u in (url, wrong)] == [401, 401]


async def test_the_page_allows_its_own_files_only_and_leaves_a_private_cookie():
    async with dashboard() as (session, address):
        reply = await session.get(address)
        policy = reply.headers["Content-Security-Policy"]
        cookie = reply.headers["Set-Cookie"]
        headers = {"Cookie": cookie.partition(";")[0]}
        files = [
            (await session.get(address.origin() / "static" / name, headers=headers)).status
            for name in ("page.js", "uplot.js", "page.html", "..%2fweb.py")
        ]
    assert reply.status == 200
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert files == [200, 200, 404, 404]


async def test_a_cookie_opens_the_page_and_tells_nobody_the_token():
    """Browsers send it to what listens at other ports of the host, too."""

    async with dashboard() as (session, address):
        cookie = (await session.get(address)).headers["Set-Cookie"].partition(";")[0]
        value = cookie.partition("=")[2]
        asked = [
            (await session.get(address.origin() / "metrics", headers=headers)).status
            for headers in ({"Cookie": cookie}, {"Authorization": f"Bearer {value}"})
        ]
        asked.append((await session.get(address.with_query(token=value))).status)
    assert value != address.query["token"]
    assert asked == [200, 401, 401]


async def test_metrics_are_what_prometheus_reads():
    async with dashboard() as (session, address):
        token = {"Authorization": f"Bearer {address.query['token']}"}
        reply = await session.get(address.origin() / "metrics", headers=token)
        assert reply.status == 200
        text = await reply.text()
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


def test_metrics_of_environments_are_there_where_there_are_any():
    (acting,) = STATUS.roles
    plain = msgspec.structs.replace(acting, acting=None, name="plain")
    body, _ = render_metrics(msgspec.structs.replace(STATUS, roles=[plain, acting]))
    lines = body.decode().splitlines()
    assert 'slipstream_acting_trajectories{name="generator-0"} 3.0' in lines
    assert 'slipstream_environment_failures_total{name="generator-0"} 2.0' in lines
    assert (
        'slipstream_trajectory_seconds_total{name="generator-0",where="environment"} 1.5' in lines
    )
    assert 'slipstream_trajectory_seconds_total{name="generator-0",where="engine"} 6.0' in lines
    assert sum(line.startswith("slipstream_acting_trajectories{") for line in lines) == 1


def test_metrics_of_a_run_that_has_not_begun_hold_no_evaluation():
    telemetry = Telemetry(RunSection(), now=lambda: 0.0)
    body, content_type = render_metrics(
        telemetry.status(make_ledger().book, ScoringQueue(lease_s=1.0))
    )
    assert content_type.startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(body.decode())}
    assert "slipstream_groups_issued" in names
    assert "slipstream_evaluation" not in names


async def test_the_first_event_is_the_state_of_the_run():
    async with (
        dashboard() as (session, address),
        session.get(address.with_path("/events", keep_query=True)) as reply,
    ):
        content_type, event = reply.headers["Content-Type"], await reply.content.readuntil(b"\n\n")
    assert content_type == "text/event-stream"
    kind, _, data = event.partition(b": ")
    assert kind == b"data"
    sent = msgspec.json.decode(data)
    assert sent.keys() == {"status", "advisories", "advice_ready", "live", "point", "steps"}
    assert sent["status"]["issued"] == make_status().issued
    assert (sent["live"], sent["point"]["trained"]) == (True, make_status().trained)


async def answer(
    session: aiohttp.ClientSession, address: URL, path: str, **query: str
) -> dict[str, Any]:
    url = address.with_path(path).with_query({**address.query, **query})
    return msgspec.json.decode(await (await session.get(url)).read())


async def test_the_state_holds_how_the_run_came_to_it():
    async with dashboard() as (session, address):
        state = await answer(session, address, "/state.json")
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
        ({"q": "12+34"}, [0]),
        ({"q": "<SCRIPT>"}, [1]),
        ({"q": "g8"}, []),
        ({"lag": "2"}, [1]),
        ({"lag": "0"}, [0]),
        ({"lag": "5"}, []),
    ],
)
async def test_recorded_trajectories_are_found(query: dict[str, str], siblings: list[int]):
    async with dashboard() as (session, address):
        found = await answer(session, address, "/items", **query)
    assert [one["sibling"] for one in found["items"]] == siblings
    assert found["more"] is False


async def test_every_token_of_a_trajectory_has_its_version_and_the_difference():
    async with dashboard() as (session, address):
        found = await answer(session, address, "/trajectory", group="7", sibling="1")
    assert found["prompt"] == SCRIPT
    assert found["tokens"] == [
        {"text": "4", "version": "v1.1", "lag": 2, "diff": 0.0},
        {"text": "6", "version": "v1.1", "lag": 2, "diff": 0.5},
        {"text": "<eos>", "version": "v1.2", "lag": 1, "diff": -0.25},
    ]
    assert found["siblings"] == [{"sibling": 0, "reward": 1.0}, {"sibling": 1, "reward": 0.0}]


async def test_unrecorded_trajectory_is_reported_as_not_found():
    async with dashboard() as (session, address):
        found = await answer(session, address, "/trajectory", group="9", sibling="0")
        url = address.with_path("/trajectory").with_query({**address.query, "group": "x"})
        refused = (await session.get(url)).status
    assert (found["found"], found["tokens"], refused) == (False, [], 400)


def test_rows_that_are_written_later_are_found_and_a_file_that_was_cut_is_read_anew(tmp_path: Path):
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


async def run_until(
    recorder: SnapshotRecorder, is_so: Callable[[], bool], then: Callable[[], None] = lambda: None
) -> None:
    """Cancel a recorder when something is so; do something while it ends."""
    task = asyncio.create_task(recorder.run())
    await until_async(is_so)
    task.cancel()
    asyncio.get_running_loop().call_later(0.1, then)
    with suppress(asyncio.CancelledError):
        await task


def test_restarted_broker_continues_the_history(tmp_path: Path):
    now = itertools.count(1_763_786_000)

    def recorder() -> SnapshotRecorder:
        return recorder_in(tmp_path, now=lambda: float(next(now)))

    first = recorder()
    asyncio.run(run_until(first, (tmp_path / PAGE_STATE).exists))
    second = recorder()
    before, after = first.history.columns(), second.history.columns()
    assert after.began_s == before.began_s
    assert after.time.at_s[: len(before.time.at_s)] == before.time.at_s
    assert after.steps == before.steps  # the same step is not counted twice
    stored = read_state(tmp_path / PAGE_STATE)
    assert stored is not None
    page = FinishedRun(stored, high_water_bytes=0, fsync="always")
    assert (page.snapshot.live, page.snapshot.status.issued) == (False, make_status().issued)
    assert page.columns() == before


async def test_the_state_is_there_for_programs_too():
    async with dashboard() as (session, address):
        reply = await session.get(address.with_path("/status.json", keep_query=True))
        assert msgspec.json.decode((await reply.read()), type=RunStatus).run_name == "run"


# ---- access ------------------------------------------------------------------


@pytest.mark.parametrize("host", ["::1", "0.0.0.0", "::"])  # noqa: S104 it is what is tested
async def test_a_page_of_another_address_is_reached_by_the_machine_s_names_and_no_other(host: str):
    async with dashboard(host=host) as (session, address):
        near = address.with_host("::1" if host == "::1" else "127.0.0.1")
        names = [
            str(near.host_port_subcomponent),
            f"{socket.gethostname()}:{near.port}",
            "evil.example",
            "",
        ]
        if host == "::1":
            names[1] = str(near.host_port_subcomponent)
        replies = [await session.get(near, headers={"Host": name}) for name in names]
        expected_host = host if host == "::1" else socket.gethostname()
        assert address.host == expected_host.lower()
        assert ("[" in str(address)) == (":" in expected_host)
        assert [reply.status for reply in replies] == [200, 200, 403, 403]


def test_the_name_in_a_host_header_is_read():
    for authority, name in [
        ("127.0.0.1:8000", "127.0.0.1"),
        ("[::1]:8000", "::1"),
        ("[::ffff:10.0.0.1]", "10.0.0.1"),
        ("LOCALHOST.", "localhost"),
        ("127.0.0.1@evil.example", ""),
        ("[::1", ""),
        ("", ""),
    ]:
        assert name_of(authority) == name


async def test_refusals_carry_the_headers_of_the_page():
    async with dashboard() as (session, address):
        replies = [await session.get(address, headers={"Host": "evil.example"})]
        replies += [await session.get(address.origin())]
        for path in ("/trajectory", "/nowhere", "/why.json"):
            replies.append(await session.get(address.with_path(path, keep_query=True)))
    replies = {reply.status: reply.headers for reply in replies}
    assert set(replies) == {403, 401, 400, 404, 200}
    for headers in replies.values():
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"


def one_page(folder: Path, port: int = 0) -> Dashboard:
    source = FinishedRun(
        StoredState(at_s=0.0, status=make_status(), history=small_history()),
        high_water_bytes=0,
        fsync="",
    )
    return Dashboard(source, RecordedItems(folder), host="127.0.0.1", port=port, folder=folder)


def small_history() -> HistoryColumns:
    return RunHistory(began_s=0.0).columns()


async def test_an_open_page_comes_back_after_a_restart(tmp_path: Path):
    before = one_page(tmp_path)
    first = await before.start()
    await before.stop()
    after = one_page(tmp_path)
    second = await after.start()
    beside = one_page(tmp_path)
    third = await beside.start()  # while that port is taken
    await after.stop()
    await beside.stop()
    first, second, third = map(URL, (first, second, third))
    assert first == second
    assert third.query == first.query
    assert third.port != first.port
    assert ((tmp_path / PAGE_TOKEN).stat().st_mode & 0o777) == 0o600
    assert (tmp_path / PAGE_PORT).read_text() == str(third.port)


@pytest.mark.parametrize("harm", ["readable", "short"])
async def test_a_token_that_others_could_read_or_guess_is_replaced(tmp_path: Path, harm: str):
    path = tmp_path / PAGE_TOKEN
    path.parent.mkdir()
    path.write_text("abc" if harm == "short" else "a" * 22)
    path.chmod(0o600 if harm == "short" else 0o644)
    page = one_page(tmp_path)
    address = await page.start()
    await page.stop()
    token = URL(address).query["token"]
    assert token not in {"abc", "a" * 22}
    assert path.read_text() == token
    assert path.stat().st_mode & 0o777 == 0o600


async def test_pages_of_other_ports_leave_the_cookie_alone():
    async with dashboard() as (session, address):
        cookie = (await session.get(address)).headers["Set-Cookie"]
        name, _, rest = cookie.partition("=")
        other = {"Cookie": f"slipstream_token_1={rest.partition(';')[0]}"}
        assert name == f"slipstream_token_{address.port}"
        assert (await session.get(address.origin(), headers=other)).status == 401


# ---- viewers -----------------------------------------------------------------


class Wide:
    """A run whose every snapshot is large, sent without end."""

    def __init__(self) -> None:
        self.num_reads = 0

    @property
    def snapshot(self) -> Snapshot:
        point: dict[str, float | None] = {f"{i:090}": 1.0 for i in range(20_000)}
        return Snapshot(status=STATUS, advisories=[], live=True, point=point)

    def columns(self) -> HistoryColumns:
        series = {f"{i:090}": np.full(2_000, 1 / 3) for i in range(400)}
        time_columns = TimeColumns(every_s=1.0, at_s=[], series=series)
        return HistoryColumns(
            began_s=0.0, time=time_columns, steps=StepColumns(step=[], at_s=[], series={})
        )

    def steps_after(self, step: float) -> list[dict[str, float | None]]:
        del step
        return []

    def letters(self) -> list[Letter]:
        return []

    async def next_change(self) -> None:
        self.num_reads += 1
        await asyncio.sleep(0.01)


def connections(port: int | None) -> int:
    """Return how many sockets of clients this process holds at a port."""
    return sum(
        1
        for one in psutil.Process().net_connections("tcp")
        if one.laddr and one.laddr.port == port and one.status != psutil.CONN_LISTEN
    )


@pytest.mark.parametrize("path", ["/events", "/state.json"])
async def test_a_browser_that_does_not_read_is_let_go(path: str, tmp_path: Path):
    page = Dashboard(Wide(), RecordedItems(tmp_path), host="127.0.0.1", port=0, patience_s=0.2)
    address = URL(await page.start())
    url = address.with_path(path, keep_query=True)
    clients = []
    for _ in range(3):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(client.connect, ("127.0.0.1", url.port))
        client.sendall(f"GET {url.path_qs} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert await asyncio.to_thread(client.recv, 15) == b"HTTP/1.1 200 OK"
        clients.append(client)

    async def all_are_let_go() -> bool:
        return not await asyncio.to_thread(connections, url.port)

    await until_async(all_are_let_go, "a client that does not read is kept")
    for client in clients:
        client.close()
    assert page.num_viewers == 0
    await page.stop()


async def test_more_viewers_than_there_is_room_for_are_refused():
    async with dashboard() as (session, address):
        url = address.with_path("/events", keep_query=True)
        streams = [await session.get(url) for _ in range(MAX_VIEWERS)]
        refused = (await session.get(url)).status
        for one in streams:
            one.close()
        assert ({one.status for one in streams}, refused) == ({200}, 503)


def status_of(steps: int) -> RunStatus:
    points = [
        StepPoint(step=n, at_s=1.0, metrics={"reward/mean": n / 2}) for n in range(1, steps + 1)
    ]
    return msgspec.structs.replace(
        STATUS,
        steps=steps,
        steps_history=points,
        eval=STATUS.eval * 600,
        publish_history=STATUS.publish_history * 70,
    )


async def test_reconnecting_page_gets_every_step_it_missed():
    async with dashboard(status=lambda: status_of(40)) as (session, address):
        events = []
        for query in ({"after": "3"}, {"after": "39"}, {"after": "99"}, {}):
            url = address.with_path("/events").with_query({**address.query, **query})
            async with session.get(url) as reply:
                event = await reply.content.readuntil(b"\n\n")
            events.append(msgspec.json.decode(event.partition(b": ")[2]))
        url = address.with_path("/events").with_query({**address.query, "after": "x"})
        state = await answer(session, address, "/state.json")
        refused = (await session.get(url)).status
    steps_sent = [[row["step"] for row in event["steps"]] for event in events]
    assert steps_sent == [[float(n) for n in range(4, 41)], [40.0], [], []]
    assert events[0]["steps"][0] == {
        "step": 4.0,
        "at_s": pytest.approx(1.0, abs=9),
        "reward/mean": 2.0,
    }
    cut = events[0]["status"]
    assert (len(cut["eval"]), len(cut["publish_history"]), cut["steps_history"]) == (2, 3, [])
    whole = state["status"]
    found = (len(whole["eval"]), len(whole["publish_history"]), whole["steps_history"])
    assert found == (500, 60, [])
    assert state["advice_ready"] is False
    assert len(state["history"]["steps"]["step"]) == 40
    assert refused == 400


class Counted(FinishedRun):
    """A run that counts the reads of its history."""

    def __init__(self) -> None:
        stored = StoredState(at_s=0.0, status=make_status(), history=small_history())
        super().__init__(stored, high_water_bytes=0, fsync="")
        self.num_read = self.num_steps_read = 0

    def columns(self) -> HistoryColumns:
        self.num_read += 1
        return super().columns()

    def steps_after(self, step: float) -> Sequence[Row]:
        self.num_steps_read += 1
        return super().steps_after(step)


async def test_one_snapshot_is_encoded_once_for_all_clients(tmp_path: Path):
    source = Counted()
    page = Dashboard(source, RecordedItems(tmp_path), host="127.0.0.1", port=0)
    address = URL(await page.start())
    async with aiohttp.ClientSession() as session:
        url = address.with_path("/state.json", keep_query=True)
        replies = await asyncio.gather(*(session.get(url) for _ in range(5)))
        bodies = {await reply.read() for reply in replies}
        url = address.with_path("/events", keep_query=True)
        streams = [await session.get(url) for _ in range(3)]
        events = {await stream.content.readuntil(b"\n\n") for stream in streams}
        for stream in streams:
            stream.close()
        head = await session.head(address.with_path("/state.json", keep_query=True))
    await page.stop()
    assert (source.num_read, source.num_steps_read, len(bodies | events)) == (1, 1, 2)
    assert head.status == 405


async def test_the_guide_of_the_rules_is_served():
    async with dashboard() as (session, address):
        sections = await answer(session, address, "/why.json")
    assert all({"title", "text"} <= section.keys() for section in sections.values())


# ---- what goes wrong ---------------------------------------------------------


class SlowItems(RecordedItems):
    """A run folder on a disk that does not answer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.readers = self.most = 0

    def find(self, text: str = "", *, lag: int | None = None) -> Found:
        self.readers += 1
        self.most = max(self.most, self.readers)
        time.sleep(0.5)
        self.readers -= 1
        return super().find(text, lag=lag)


async def test_hung_disk_is_reported_and_read_by_one_request_at_a_time():
    made: list[SlowItems] = []

    def slow(folder: Path) -> SlowItems:
        made.append(SlowItems(folder))
        return made[0]

    async with dashboard(items=slow, read_s=0.2) as (session, address):
        url = address.with_path("/items", keep_query=True)
        replies = await asyncio.gather(*(session.get(url) for _ in range(3)))
        replies = [(reply.status, await reply.text()) for reply in replies]
    assert {status for status, _ in replies} == {503}
    assert "not read within 0.2 s" in replies[0][1]
    assert made[0].most == 1


async def test_slow_write_does_not_overwrite_the_last_one(tmp_path: Path):
    steps = itertools.count(1)
    began, ends = threading.Event(), threading.Event()
    written: list[int] = []

    def write(path: Path, state: StoredState) -> None:
        if not began.is_set():
            began.set()
            ends.wait(HANG_S)
        written.append(state.status.steps)
        write_state(path, state)

    recorder = recorder_in(
        tmp_path, lambda: msgspec.structs.replace(STATUS, steps=next(steps)), write=write
    )
    await run_until(recorder, began.is_set, then=ends.set)
    stored = read_state(tmp_path / PAGE_STATE)
    assert stored is not None
    assert len(written) == 2
    assert written[0] < written[1] == stored.status.steps
    assert [path.name for path in (tmp_path / PAGE_STATE).parent.iterdir()] == [PAGE_STATE.name]


async def test_a_state_that_cannot_be_read_keeps_nothing_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    broken = True

    def status() -> RunStatus:
        if broken:
            raise ZeroDivisionError("a bug")
        return STATUS

    with caplog.at_level(logging.ERROR):
        recorder = recorder_in(tmp_path, status)
        page = Dashboard(recorder, RecordedItems(tmp_path), host="127.0.0.1", port=0)
        address = URL(await page.start())
        recording = asyncio.create_task(recorder.run())
        async with aiohttp.ClientSession() as session:
            paths = ("/state.json", "/events", "/metrics", "/")
            urls = [address.with_path(path, keep_query=True) for path in paths]
            assert [(await session.get(url)).status for url in urls] == [503, 503, 503, 200]
            broken = False
            await recorder.next_change()
            assert (await session.get(urls[0])).status == 200
        assert not recording.done()
        await cancelled(recording)
        await page.stop()
    assert len(caplog.records) == 1


async def test_failing_rules_add_no_advice_and_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    now = itertools.count(0.0, 10.0).__next__
    asked = 0

    def advise(_status: RunStatus, _trends: object) -> list[Advisory]:
        nonlocal asked
        asked += 1
        raise KeyError("busy")

    recorder = recorder_in(tmp_path, lambda: STATUS, now=now, advise=advise)
    with caplog.at_level(logging.ERROR):
        await run_until(recorder, lambda: asked > 1)
    snapshot = recorder.snapshot
    assert snapshot is not None
    assert (snapshot.advisories, snapshot.status.issued) == ([], STATUS.issued)
    assert asked > 1
    assert len(caplog.records) == 1


def test_a_figure_that_is_no_number_leaves_the_history_as_it_was(tmp_path: Path):
    memory: dict[str, Any] = {"rss_bytes": "much"}
    recorder = recorder_in(
        tmp_path,
        lambda: msgspec.structs.replace(STATUS, memory=memory),
        now=itertools.count(0.0, 10.0).__next__,
    )
    assert recorder.snapshot is not None
    assert recorder.snapshot.point == {}
    assert recorder.history.columns().time.at_s == []


def test_fsync_policy_is_parsed_from_the_durability_text():
    for durability, fsync in [
        ("appendfsync always", "always"),
        ("appendfsync everysec: a crash can lose the last second", "everysec"),
        ("appendfsync no: a crash of the machine can lose acknowledged work", "no"),
        ("no append-only file: acknowledged work is lost when the server ends", "no"),
        ("unknown (CONFIG is not permitted)", ""),
    ]:
        assert fsync_of(durability) == fsync


def test_the_steps_among_events_are_those_that_count_in_the_end():
    def trained(step: int, loss: float) -> bytes:
        version = PolicyVersion(1, step)
        return encode_event(Trained(version=version, metrics={"policy/loss": loss}))

    events = [trained(1, 0.1), trained(2, 0.2), trained(3, 0.3), trained(2, 0.4)]
    assert trained_steps(events) == {1: {"policy/loss": 0.1}, 2: {"policy/loss": 0.4}}


def test_the_page_takes_a_process_for_silent_or_gone_when_the_terminal_does():
    source = (
        files("slipstream.broker.dashboard") / "page" / "sections" / "accounting.js"
    ).read_text("utf-8")
    limits = dict(re.findall(r"const (SILENT_S|GONE_S) = ([\d.]+);", source))
    assert {name: float(text) for name, text in limits.items()} == {
        "SILENT_S": SILENT_S,
        "GONE_S": GONE_S,
    }


async def test_advice_and_the_file_wait_for_their_time(tmp_path: Path):
    """The clock decides, not how often the state is read."""
    clock, num_reads, advised, written = [1e9], 0, [], []

    def status() -> RunStatus:
        nonlocal num_reads
        num_reads += 1
        return STATUS

    def advise(_status: RunStatus, _trends: object) -> list[Advisory]:
        advised.append(clock[0])
        return []

    async def next_read() -> None:
        end = num_reads + 1
        await until_async(lambda: num_reads > end)

    recorder = recorder_in(
        tmp_path,
        status,
        now=lambda: clock[0],
        advise=advise,
        write=lambda _path, _state: written.append(clock[0]),
    )
    recording = asyncio.create_task(recorder.run())
    for now_s in (1e9, 1e9 + 4.9, 1e9 + 10.0):
        clock[0] = now_s
        await next_read()
    await cancelled(recording)
    assert advised == [1e9, 1e9 + 10.0]
    assert written == [1e9, 1e9 + 10.0, 1e9 + 10.0]  # the last one as it ends


async def test_an_image_of_the_run_folder_is_shown_small_and_nothing_else_is_read(tmp_path: Path):
    images = ImageFolder(tmp_path / "images")
    kept, changed = images.keep(drawn(800, 400)), images.keep(b"GIF89a <script>")
    async with dashboard(items=lambda _: RecordedItems(tmp_path)) as (session, address):

        async def asked(digest: str) -> aiohttp.ClientResponse:
            url = address.with_path("/image")
            return await session.get(url.with_query({**address.query, "digest": digest}))

        shown = await asked(kept)
        small = checked_image(await shown.read())
        assert (shown.status, shown.content_type) == (200, "image/png")
        assert (small.width, small.height) == (320, 160)
        assert "img-src 'self'" in shown.headers["Content-Security-Policy"]
        images.file_of(kept).write_bytes(drawn(seed=9))
        for digest, status, why in (
            (kept, 404, "changed on disk"),
            (changed, 404, "not an image"),
            ("0" * 64, 404, "no image 00000000"),
            ("../../etc/passwd", 400, "64 hexadecimal digits"),
        ):
            refused = await asked(digest)
            assert (refused.status, why in await refused.text()) == (status, True), digest
