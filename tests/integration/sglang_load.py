"""Clients of a running SGLang server, and what it is busy with, for tests that wait until it is."""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp

from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.waiting import HANG_S, until_async


@asynccontextmanager
async def client_of(
    server: SglangProcess,
    version: PolicyVersion | None = None,
    **settings: Any,  # noqa: ANN401 as SglangEngine
) -> AsyncIterator[SglangEngine]:
    """Yield a client, of a server that has the label of a version if one is given."""
    engine = SglangEngine(
        server.url, server.api_key, request_timeout_s=HANG_S, control_timeout_s=HANG_S, **settings
    )
    try:
        if version is not None:
            await engine.label(version)
        yield engine
    finally:
        await engine.close()


class Load(NamedTuple):
    """Counts of answers and tokens."""

    num_running: int  # answers that are being generated
    num_waiting: int  # answers that wait for their turn
    num_tokens: int  # in the cache, of prompts and answers


async def until_load(server: SglangProcess, is_enough: Callable[[Load], bool]) -> Load:
    """Wait until a server is so busy; return what it is busy with."""
    seen: list[Load] = []
    headers = {"Authorization": f"Bearer {server.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:

        async def poll() -> bool:
            limit = aiohttp.ClientTimeout(HANG_S)
            async with http.get(f"{server.url}/v1/loads?include=core", timeout=limit) as response:
                (load,) = (await response.json())["loads"]
            names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
            seen.append(Load(*(load[name] for name in names)))
            return is_enough(seen[-1])

        await until_async(poll, lambda: f"it is busy with {seen[-3:]}")
    return seen[-1]


def num_mixed(server: SglangProcess) -> tuple[int, int]:
    """Return how many batches were mixed, and how many answers were decoded in them.

    The server's ``log_level`` is info.
    """
    rows = re.findall(r"Mixed batch, #decode-req: (\d+)", server.log_file.read_text())
    return len(rows), sum(map(int, rows))
