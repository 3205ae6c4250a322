"""A queue of trajectories behind HTTP and JSON: FastAPI on uvicorn, aiohttp as the client."""

import asyncio
import contextlib
import socket
from collections import deque
from typing import Any

import aiohttp
import orjson
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from benchmarks.broker.baselines import Way
from benchmarks.broker.process import SharedNumber

_WINDOW = 256
_POLL_S = 0.0005


class Trajectory(BaseModel):
    group_id: int
    sibling: int
    version: list[int]
    token_ids: list[int]
    loss_mask: list[bool]
    behavior_logprobs: list[float]
    response: str


def _typed(app: FastAPI, queue: deque[Any]) -> None:
    @app.post("/trajectories")
    async def put(trajectories: list[Trajectory]) -> int:
        queue.extend(trajectories)
        return len(queue)

    @app.get("/trajectories")
    async def take(count: int) -> list[Trajectory]:
        return [queue.popleft() for _ in range(min(count, len(queue)))]


def _plain(app: FastAPI, queue: deque[Any]) -> None:
    @app.post("/trajectories")
    async def put(request: Request) -> Response:
        queue.extend(orjson.loads(await request.body()))
        return Response(b"%d" % len(queue), media_type="application/json")

    @app.get("/trajectories")
    async def take(count: int) -> Response:
        taken = [queue.popleft() for _ in range(min(count, len(queue)))]
        return Response(orjson.dumps(taken), media_type="application/json")


def run_server(port: SharedNumber, *, typed: bool) -> None:
    """Serve until killed; the port goes into ``port``."""
    app, queue = FastAPI(), deque[Any]()
    (_typed if typed else _plain)(app, queue)
    listening = socket.create_server(("127.0.0.1", 0))
    port.value = listening.getsockname()[1]
    config = uvicorn.Config(app, log_level="error", access_log=False, loop="auto", http="auto")
    uvicorn.Server(config).run(sockets=[listening])


async def run_client(
    port: int,
    trajectory: dict[str, object],
    way: Way,
    produces: bool,
    count: SharedNumber,
    stop: SharedNumber,
) -> None:
    """Post trajectories as long as the queue is short, or take them, on several connections."""
    url = f"http://127.0.0.1:{port}/trajectories"
    connector = aiohttp.TCPConnector(limit=way.connections)
    headers = {"Content-Type": "application/json"}

    async def post(session: aiohttp.ClientSession) -> None:
        while not stop.value:
            body = orjson.dumps([trajectory] * way.batch)  # encoded anew, as a producer has to
            async with session.post(url, data=body, headers=headers) as answer:
                length = int(await answer.read())
            count.value += way.batch
            if length > _WINDOW:
                await asyncio.sleep(0.01)

    async def get(session: aiohttp.ClientSession) -> None:
        while not stop.value:
            async with session.get(url, params={"count": str(way.batch)}) as answer:
                taken = orjson.loads(await answer.read())
            count.value += len(taken)
            if not taken:
                await asyncio.sleep(_POLL_S)

    async with aiohttp.ClientSession(connector=connector) as session:
        with contextlib.suppress(aiohttp.ClientError):
            one = post if produces else get
            await asyncio.gather(*(one(session) for _ in range(way.connections)))
