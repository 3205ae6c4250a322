"""OpenAI's API over HTTP, for the trajectories of one generator. A key names the trajectory.

A reply is part of its trajectory once the client has all of it: a client that goes away before
that ends the generation, or leaves a reply that nobody acted on.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from slipstream.broker.listening.gate import Limit, limit_of
from slipstream.broker.listening.http import IDLE_S, HttpServer, bearer, holder_of
from slipstream.generators.capture.answers import Answer, ChatAnswer, TextAnswer
from slipstream.generators.capture.off_loop import off_loop
from slipstream.generators.capture.requests import (
    MAX_REQUEST_BYTES,
    BadRequestError,
    ChatRequest,
    TextRequest,
)
from slipstream.generators.capture.session import CaptureSession, Reply
from slipstream.generators.turns.conversation import TrajectoryLimitError
from slipstream.wire.errors import ConfigError, EngineError, EngineRefusedError

_log = logging.getLogger(__name__)
SHARE = 1 / 2  # descriptors for agents, of all
LIMIT_REACHED = "context_length_exceeded"  # code of an error, as OpenAI has it
T = TypeVar("T", ChatRequest, TextRequest)


class CaptureServer:
    """Listens for the clients of all trajectories that are under way."""

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
            host: to listen at.
            port: 0 is one of the system's choice.
            model: the name that replies carry.
            token_text: the text of one token.
            limit: of connections; further ones are refused. None is half of the descriptors.
            idle_s: a connection that asks nothing for this long is closed.
        """
        self._host = host
        self._port = port
        self._model = model
        self._token_text = token_text
        self._sessions: dict[str, CaptureSession] = {}
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        # A client that goes away cancels its generation.
        self._http = HttpServer(
            app,
            limit or limit_of(SHARE),
            what="the endpoint of agents",
            idle_s=idle_s,
            cancels=True,
        )
        self.url = ""  # of the API, once it listens

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
        """Stop listening; what is under way is cancelled."""
        await self._http.close()

    def open(self, session: CaptureSession) -> str:
        """Serve a trajectory; return the key of its clients."""
        key = secrets.token_hex(24)
        self._sessions[key] = session
        return key

    async def end(self, key: str) -> None:
        """Serve a trajectory no longer; its calls under way have been taken back then."""
        session = self._sessions.pop(key, None)
        tasks = tuple(session.in_flight) if session is not None else ()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._http.end(key)

    # ---- requests --------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        session = self._session(request)
        if isinstance(session, web.Response):
            return session
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "slipstream"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, ChatRequest, CaptureSession.chat, ChatAnswer)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, TextRequest, CaptureSession.complete, TextAnswer)

    async def _answer(
        self,
        request: web.Request,
        kind: type[T],
        ask: Callable[[CaptureSession, T, int], Awaitable[Reply]],
        form: type[Answer],
    ) -> web.StreamResponse:
        session = self._session(request)
        if isinstance(session, web.Response):
            return session
        if len(session.in_flight) >= session.conversation.max_turns:  # before it is read
            return _refusal(
                429,
                f"more than {session.conversation.max_turns} calls at a time, which are more than "
                "a trajectory may have (environment.max_turns)",
                "too_many_calls",
            )
        task = asyncio.current_task()
        if task is not None:
            session.in_flight.add(task)
            task.add_done_callback(session.in_flight.discard)
        try:
            body = await request.read()
            session.refuse_larger(body)
            asked = await off_loop(len(body), msgspec.json.decode, body, type=kind)
            reply = await ask(session, asked, len(body))
        except (msgspec.DecodeError, RecursionError, web.RequestPayloadError) as error:
            return _refusal(400, f"not a request: {error}", "invalid_request_error")
        except BadRequestError as error:
            return _refusal(400, str(error), "invalid_request_error", param=error.param)
        except TrajectoryLimitError as error:
            session.reached_limit = True
            return _refusal(400, str(error), LIMIT_REACHED)
        except EngineRefusedError as error:  # of this request: the engine is well
            return _refusal(400, f"the engine refuses it: {error}", "invalid_request_error")
        except EngineError as error:
            session.engine_error = error
            return _refusal(503, str(error), "engine_failed")
        session.keep(reply)  # before the client asks for the next one
        texts = self._token_text if asked.wants_logprobs else None
        response = web.StreamResponse()
        try:
            await self._send(response, request, asked, form(self._model, reply, texts))
        except ConnectionError:  # it went away, as clients do
            session.abandon(reply)
        except asyncio.CancelledError:
            session.abandon(reply)
            raise
        return response

    async def _send(
        self,
        response: web.StreamResponse,
        request: web.Request,
        asked: ChatRequest | TextRequest,
        answer: Answer,
    ) -> None:
        if not asked.stream:
            body = json.dumps(answer.whole()).encode()
            response.content_type, response.content_length = "application/json", len(body)
            await response.prepare(request)
            await response.write(body)
        else:
            response.content_type = "text/event-stream"
            await response.prepare(request)
            for chunk in answer.chunks(counts_usage=asked.counts_usage):
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()

    def _session(self, request: web.Request) -> CaptureSession | web.Response:
        """Return the trajectory of a request, or why it has none."""
        key = holder_of(bearer(request), self._sessions)
        if not key:
            return _refusal(401, "no such key", "invalid_api_key")
        session = self._sessions[key]
        calls = session.conversation.max_turns
        if self._http.admits(key, request.transport, calls_at_a_time=calls):
            return session
        refusal = _refusal(429, "too many connections of one trajectory", "too_many_connections")
        refusal.force_close()
        return refusal


def _refusal(status: int, message: str, code: str, *, param: str = "") -> web.Response:
    error = {
        "message": message,
        "type": "invalid_request_error" if status < 500 else "server_error",
        "code": code,
        "param": param or None,
    }
    return web.json_response({"error": error}, status=status)
