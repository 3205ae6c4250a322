"""The wires of agents over HTTP, for one generator's trajectories. A key names the trajectory.

A reply is part of its trajectory once the client has all of it. A client that disconnects earlier
ends the generation, or its reply is taken back.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import msgspec
from aiohttp import web

from slipstream.broker.listening.gate import Limit, limit_of
from slipstream.broker.listening.http import IDLE_S, HttpServer, bearer, holder_of
from slipstream.generators.capture import completions, messages, responses
from slipstream.generators.capture.wires import Answer, CallRefusal, Question, Wire
from slipstream.generators.turns.calls import RecordedReply, TrajectoryCalls
from slipstream.generators.turns.conversation import TrajectoryLimitError
from slipstream.generators.turns.off_loop import off_loop
from slipstream.generators.turns.requests import MAX_REQUEST_BYTES, BadRequestError, TextRequest
from slipstream.wire.errors import ConfigError, EngineError, EngineRefusedError
from slipstream.wire.unreadable import UNREADABLE

_log = logging.getLogger(__name__)
SHARE = 1 / 2  # part of all descriptors that agents may use
NO_KEY = CallRefusal(401, "no such key, or its trajectory has ended", "invalid_api_key")
LIMIT_REACHED = "context_length_exceeded"  # code of an error, as OpenAI has it
_PART_BYTES = 1 << 16  # bytes of a stream that are written at once
TOO_MANY_CONNECTIONS = CallRefusal(
    429, "too many connections of one trajectory", "too_many_connections"
)
_COUNT = f"{messages.MESSAGES.path}/count_tokens"
_REFUSED = (
    *(*UNREADABLE, web.RequestPayloadError),
    *(BadRequestError, TrajectoryLimitError, EngineError),
)
WIRES = (completions.CHAT, completions.TEXT, responses.RESPONSES, messages.MESSAGES)


@dataclass(slots=True)
class _Access:
    """Access of an agent to its trajectory."""

    calls: TrajectoryCalls
    in_flight: set[asyncio.Task[object]] = field(default_factory=set)


class CaptureServer:
    """Listens for the agents of all trajectories under way."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        model: str,
        token_text: Callable[[int], str],
        limit: Limit | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        """Prepare to serve.

        Args:
            host: Address to listen at.
            port: Port to listen at; 0 is one of the system's choice.
            model: Name of the model in replies.
            token_text: Returns the text of one token.
            limit: Limit of connections; further ones are refused. None is half of the descriptors.
            idle_s: Time after which a connection without a request is closed.
        """
        self._host = host
        self._port = port
        self._model = model
        self._token_text = token_text
        self._agents: dict[str, _Access] = {}  # keys are secrets of agents
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[in_wires_form])
        for wire in WIRES:
            app.router.add_post(wire.path, partial(self._answer, wire))
        app.router.add_post(_COUNT, self._count)
        app.router.add_get("/v1/models", self._models)
        # A client that disconnects cancels its generation.
        self._http = HttpServer(
            app,
            limit or limit_of(SHARE),
            what="the endpoint of agents",
            idle_s=idle_s,
            cancels=True,
        )
        self.url = ""  # URL of the API, once it listens

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be bound.
        """
        try:
            host, port = await self._http.open(self._host, self._port)
        except OSError as error:
            raise ConfigError(f"cannot listen at {self._host}:{self._port} : {error}") from error
        self.url = f"http://{host}:{port}/v1"

    @property
    def num_refused(self) -> int:
        """Connections that were refused because there were too many."""
        return self._http.refused.total()

    async def close(self) -> None:
        """Stop listening; cancel requests under way."""
        await self._http.close()

    def open(self, calls: TrajectoryCalls) -> str:
        """Serve a trajectory; return the key of its agent."""
        key = secrets.token_hex(24)
        self._agents[key] = _Access(calls)
        return key

    async def end(self, key: str) -> None:
        """Stop serving a trajectory; calls under way are taken back."""
        agent = self._agents.pop(key, None)
        tasks = tuple(agent.in_flight) if agent is not None else ()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._http.end(key)

    # ---- requests --------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        agent = self._agent(request)
        if isinstance(agent, CallRefusal):
            return refused(request.path, agent)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "slipstream"}
        return web.json_response({"object": "list", "data": [model]})

    async def _answer(self, wire: Wire, request: web.Request) -> web.StreamResponse:
        agent = self._agent(request)
        if isinstance(agent, CallRefusal):
            return refused(request.path, agent)
        calls, most = agent.calls, agent.calls.conversation.max_turns
        if len(agent.in_flight) >= most:  # before it is read
            why = f"more than {most} calls at a time, which are more than a trajectory may have "
            why += "(environment.max_turns)"
            return refused(request.path, CallRefusal(429, why, "too_many_calls"))
        task = asyncio.current_task()
        if task is not None:
            agent.in_flight.add(task)
            task.add_done_callback(agent.in_flight.discard)
        replied = await _replied(wire, request, calls)
        if isinstance(replied, CallRefusal):
            return refused(request.path, replied)
        question, reply = replied
        calls.keep(reply)  # before the client asks for the next one
        response = web.StreamResponse()
        try:
            answer = question.answer(self._model, reply, self._token_text)
            await _send(response, request, answer, streams=bool(question.request.stream))
        except ConnectionError:  # the client disconnected
            calls.abandon(reply)
        except asyncio.CancelledError:
            calls.abandon(reply)
            raise
        return response

    async def _count(self, request: web.Request) -> web.Response:
        """Answer with the length of a prompt."""
        agent = self._agent(request)
        if isinstance(agent, CallRefusal):
            return refused(request.path, agent)
        try:
            body = await request.read()
            agent.calls.refuse_larger(body)
            counted = await off_loop(len(body), messages.read_count, body)
            count = await agent.calls.num_prompt_tokens(counted, len(body))
        except _REFUSED as error:
            return refused(request.path, _refusal_of(error))
        return web.json_response({"input_tokens": count})

    def _agent(self, request: web.Request) -> _Access | CallRefusal:
        """Return the agent of a request, or why it is refused."""
        key = holder_of(key_in(request), self._agents)
        if not key:
            return NO_KEY
        agent = self._agents[key]
        most = agent.calls.conversation.max_turns
        if self._http.admits(key, request.transport, calls_at_a_time=most):
            return agent
        return TOO_MANY_CONNECTIONS


def key_in(request: web.Request) -> str:
    """Return the key in the head of a request, where either OpenAI or Anthropic has it."""
    return bearer(request) or request.headers.get("x-api-key", "")


async def _replied(
    wire: Wire, request: web.Request, calls: TrajectoryCalls
) -> tuple[Question, RecordedReply] | CallRefusal:
    """Return the question in a request and the policy's reply, or why it has no reply."""
    try:
        body = await request.read()
        calls.refuse_larger(body)
        question = await off_loop(len(body), wire.read, body)
        asked = question.request
        if isinstance(asked, TextRequest):
            return question, await calls.complete(asked, len(body))
        return question, await calls.chat(asked, len(body))
    except _REFUSED as error:
        refusal = _refusal_of(error, wire.names)
        calls.reached_limit |= refusal.code == LIMIT_REACHED
        if isinstance(error, EngineError) and refusal.status == 503:
            calls.engine_error = error
        return refusal


def _refusal_of(error: Exception, names: Mapping[str, str] = MappingProxyType({})) -> CallRefusal:
    """Return the refusal that an error means; ``names`` are a wire's."""
    match error:
        case BadRequestError():
            param = names.get(error.param, error.param)
            return CallRefusal(400, str(error), "invalid_request_error", param)
        case TrajectoryLimitError():
            return CallRefusal(400, str(error), LIMIT_REACHED)
        case EngineRefusedError():  # this request alone: the engine works
            return CallRefusal(400, f"the engine refuses it: {error}", "invalid_request_error")
        case EngineError():
            return CallRefusal(503, str(error), "engine_failed")
        case _:
            return CallRefusal(400, f"not a request: {error}", "invalid_request_error")


async def _send(
    response: web.StreamResponse, request: web.Request, answer: Answer, *, streams: bool
) -> None:
    if not streams:
        body = msgspec.json.encode(answer.whole())
        response.content_type, response.content_length = "application/json", len(body)
        await response.prepare(request)
        await response.write(body)
    else:
        response.content_type = "text/event-stream"
        await response.prepare(request)
        part = bytearray()
        for event in answer.stream():
            part += event
            if len(part) >= _PART_BYTES:
                await response.write(part)
                part = bytearray()
                await asyncio.sleep(0)  # others go on, whatever a socket takes at once
        await response.write(part)
    await response.write_eof()


@web.middleware
async def in_wires_form(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer what the server itself refuses, such as an unknown path, as its wire does."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        why = f"{request.method} {request.path[:200]}: {error.reason}"
        code = error.reason.lower().replace(" ", "_")
        response = refused(request.path, CallRefusal(error.status, why, code))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response


def refused(path: str, refusal: CallRefusal) -> web.Response:
    """Return a refusal in the form of the wire with this path; OpenAI's is of unknown ones."""
    is_messages = path.startswith(messages.MESSAGES.path)
    error = (messages if is_messages else completions).refuse(refusal)
    response = web.json_response(error, status=refusal.status)
    if refusal == TOO_MANY_CONNECTIONS:
        response.force_close()
    return response
