"""No request of a client's makes a server fail: what is wrong is refused, whatever it is."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from slipstream.broker.commands.keys import TenantKeys, make_tenant_key
from slipstream.broker.commands.log import CommandLog
from slipstream.broker.commands.requests import ServedModel
from slipstream.broker.commands.site import CommandSite
from slipstream.broker.commands.waiting import LogThread, Waiters
from slipstream.wire.settings.lora import LoraSection
from slipstream.wire.settings.serve import ServeSection

pytestmark = pytest.mark.integration
SERVED = ServedModel(name="m", vocab_size=20, longest=16, lora=LoraSection(rank=8))
POSTS = (
    *("client/config", "client/dynamic_config", "create_session", "session_heartbeat"),
    *("create_model", "get_info", "unload_model", "forward_backward", "optim_step"),
    *("save_weights", "save_weights_for_sampler", "load_weights", "weights_info"),
    *("create_sampling_session", "join_sampling_session", "asample", "retrieve_future"),
    *("retrieve_futures", "cancel_future", "sessions/x/finish", "telemetry"),
)
FIELDS = (
    *("session_id", "model_seq_id", "base_model", "lora_config", "model_id", "seq_id", "path"),
    *("adam_params", "optimizer", "tinker_path", "sampling_session_id", "prompt", "target"),
    *("sampling_params", "sampling_session_seq_id", "request_id", "prev_cursor", "tags", "type"),
    *("ttl_seconds", "num_samples", "user_metadata", "sdk_version", "retrieved_request_ids"),
)
WRONG = (0, -1, 2**62, 2**70, 1e308, "", "x", "\0", "m", None, True, [], [1], {}, {"rank": 10**9})
REFUSED = {200, 400, 404, 405, 410, 415, 429}


@asynccontextmanager
async def asking(folder: Path) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    key = make_tenant_key(folder / "tenants", "alice").read_text().strip()
    log, thread = CommandLog(folder / "commands.db", ServeSection(), now=0.0), LogThread()
    keys = TenantKeys(folder / "tenants")
    site = CommandSite(log, thread, Waiters(), keys, SERVED, wait_s=0.0)
    host, port = await site.open("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(headers={"X-API-Key": key}) as session:
            yield session, f"http://{host}:{port}/api/v1/"
    finally:
        await site.close()
        thread.close()
        log.close()


async def test_what_is_no_request_is_refused_on_every_route(tmp_path: Path):
    draw = random.Random(7)
    async with asking(tmp_path) as (session, url):
        opened = await session.post(url + "create_session", json={"tags": [], "sdk_version": "0"})
        known = (await opened.json())["session_id"]
        statuses: dict[int, int] = {}
        for number in range(1500):
            route = draw.choice(POSTS)
            chosen = draw.sample(FIELDS, draw.randint(0, 6))
            body = {name: draw.choice((*WRONG, known, f"{known}:train:0")) for name in chosen}
            data = draw.choice((json.dumps(body).encode(), draw.randbytes(draw.randint(0, 40))))
            kind = draw.choice(("application/json", "application/x-protobuf", "text/plain"))
            headers = {"Content-Type": kind}
            async with session.post(url + route, data=data, headers=headers) as answer:
                said = await answer.text()
                assert answer.status in REFUSED | {408}, (number, route, data, said)
                if answer.status >= 400 and answer.status != 408:
                    assert json.loads(said)["detail"], route
                statuses[answer.status] = statuses.get(answer.status, 0) + 1
        assert statuses[400] > 500
        for path in ("training_runs/x", "checkpoints?offset=x", "samplers/x", "nothing"):
            async with session.get(url + path) as answer:
                assert answer.status in {400, 404}
        async with session.get(url + "healthz") as answer:
            assert await answer.json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("route", "status", "asked"),
    [
        ("load_weights", 404, {"path": "tinker://x/weights/y", "optimizer": True}),
        ("optim_step", 400, {"adam_params": {"learning_rate": None}}),
        ("optim_step", 400, {"adam_params": {"beta1": 1.0}}),
        ("save_weights", 400, {"path": "../x"}),
        ("save_weights", 400, {"user_metadata": {"x": "y" * 70_000}}),
    ],
)
async def test_a_command_that_is_refused_uses_its_number_up(
    tmp_path: Path, route: str, status: int, asked: dict[str, object]
):
    async with asking(tmp_path) as (session, url):
        opened = await session.post(url + "create_session", json={})
        known = (await opened.json())["session_id"]
        lora = {
            "session_id": known,
            "model_seq_id": 0,
            "base_model": "m",
            "lora_config": {"rank": 4},
        }
        made = await session.post(url + "create_model", json=lora)
        model = (await made.json())["model_id"]
        body = {"model_id": model, "seq_id": 1, **asked}
        for _ in range(2):
            answer = await session.post(url + route, json=body)
            said = (await answer.json())["detail"]
            assert answer.status == status, said
        future = await session.post(url + "retrieve_future", json={"request_id": f"{model}:1"})
        assert await future.json() == {"error": said, "category": "user"}


async def test_without_a_key_nothing_is_answered(tmp_path: Path):
    async with asking(tmp_path) as (_, url), aiohttp.ClientSession() as stranger:
        for headers in ({}, {"X-API-Key": "tml-guess"}):
            posted = [stranger.post(url + route, data=b"x", headers=headers) for route in POSTS]
            answers = await asyncio.gather(*posted)
            assert {answer.status for answer in answers} == {401}
