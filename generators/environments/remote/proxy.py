"""The endpoint by which agents of an environment server reach the policy, at their generators.

It listens on loopback, and refuses requests without the key of a trajectory.
"""

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from slipstream.broker.listening.gate import limit_of
from slipstream.broker.listening.http import HttpServer, holder_of
from slipstream.generators.capture.server import (
    NO_KEY,
    SHARE,
    TOO_MANY_CONNECTIONS,
    in_wires_form,
    key_in,
    refused,
)
from slipstream.generators.capture.wires import CallRefusal
from slipstream.generators.environments.remote.messages import (
    MAX_BYTES,
    MAX_PATH,
    MOST_CALLS,
    AgentAnswer,
)
from slipstream.wire.errors import ConfigError

_MOST_PARTS = 512  # unread parts of an answer, of 64 KiB each
_CUT_OFF = -1  # in place of a status
Ask = Callable[[int, str, bytes], Awaitable[None]]
Leave = Callable[[int], Awaitable[None]]


@dataclass(slots=True)
class _Agent:
    """The agent of one trajectory."""

    ask: Ask  # carries a request: number of the call, path, body
    leave: Leave  # reports that the agent no longer waits for a call
    calls: "dict[int, asyncio.Queue[AgentAnswer]]" = field(default_factory=dict)


class PolicyProxy:
    """Listens for the agents of all trajectories."""

    def __init__(self) -> None:
        """Prepare; ``start`` listens."""
        self._agents: dict[str, _Agent] = {}
        self._numbers = itertools.count(1)
        app = web.Application(client_max_size=MAX_BYTES - (1 << 20), middlewares=[in_wires_form])
        app.router.add_route("*", "/v1/{path:.*}", self._carry)
        self._http = HttpServer(app, limit_of(SHARE), what="the endpoint of agents", cancels=True)
        self.url = ""

    async def start(self) -> None:
        """Listen on a port of the system's choice.

        Raises:
            ConfigError: no port can be bound.
        """
        try:
            host, port = await self._http.open("127.0.0.1", 0)
        except OSError as error:
            raise ConfigError(f"cannot listen on loopback: {error}") from error
        self.url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        """Stop listening."""
        await self._http.close()

    def open(self, ask: Ask, leave: Leave) -> str:
        """Serve the agent of a trajectory; return its key."""
        key = secrets.token_hex(24)
        self._agents[key] = _Agent(ask, leave)
        return key

    def end(self, key: str) -> None:
        """Stop serving an agent; its calls under way get no answer."""
        agent = self._agents.pop(key, None)
        self._http.end(key)
        for call, answers in agent.calls.items() if agent is not None else ():
            _put(answers, AgentAnswer(client="-", number=0, call=call, body=b"", is_last=True))

    def answered(self, key: str, part: AgentAnswer) -> None:
        """Pass on a part of an answer; cut the answer off if its agent does not read."""
        agent = self._agents.get(key)
        answers = agent.calls.get(part.call) if agent is not None else None
        if agent is not None and answers is not None and not _put(answers, part):
            del agent.calls[part.call]
            answers.get_nowait()
            answers.put_nowait(msgspec.structs.replace(part, body=b"", status=_CUT_OFF))

    async def _carry(self, request: web.Request) -> web.StreamResponse:
        key = holder_of(key_in(request), self._agents)
        agent = self._agents.get(key)
        if agent is None:
            return refused(request.path, NO_KEY)
        if not self._http.admits(key, request.transport, calls_at_a_time=MOST_CALLS):
            return refused(request.path, TOO_MANY_CONNECTIONS)
        if len(agent.calls) >= MOST_CALLS:
            return refused(request.path, CallRefusal(429, "too many calls", "too_many_calls"))
        path = f"{request.method} {request.match_info['path']}"
        if len(path) > MAX_PATH:
            raise web.HTTPNotFound
        call = next(self._numbers)
        answers: asyncio.Queue[AgentAnswer] = asyncio.Queue(_MOST_PARTS)
        agent.calls[call] = answers
        try:
            await agent.ask(call, path, await request.read())
            return await _passed_on(request, answers)
        except (ConnectionError, asyncio.CancelledError):
            await agent.leave(call)
            raise
        finally:
            agent.calls.pop(call, None)


async def _passed_on(
    request: web.Request, answers: "asyncio.Queue[AgentAnswer]"
) -> web.StreamResponse:
    first = await answers.get()
    if first.is_last or not first.status:
        why = "the generator has no answer to it"
        return refused(request.path, CallRefusal(first.status or 503, why, "no_answer"))
    response = web.StreamResponse(status=first.status)
    response.content_type = first.content_type
    await response.prepare(request)
    part = first
    while True:
        if part.status == _CUT_OFF:
            raise ConnectionResetError("its agent does not read")
        if part.body:
            await response.write(part.body)
        if part.is_last:
            await response.write_eof()
            return response
        part = await answers.get()


def _put(answers: "asyncio.Queue[AgentAnswer]", part: AgentAnswer) -> bool:
    try:
        answers.put_nowait(part)
    except asyncio.QueueFull:
        return False
    return True
