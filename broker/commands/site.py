"""The routes of the SDK (tinker 0.38.0) over HTTP, for many tenants.

A request is acknowledged when it is on disk. What a client did wrong is answered with 4xx and a
reason, as ``{"detail": ...}``; the number of a numbered command is used up then, so that those
behind it are carried out.
"""

import asyncio
import logging
import sqlite3
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from aiohttp import web

from slipstream.broker.commands import requests as asks
from slipstream.broker.commands.keys import TenantKeys
from slipstream.broker.commands.log import Ask, CommandLog, Future, Kind, SaveDetails
from slipstream.broker.commands.protobuf import write_losses, write_sampled
from slipstream.broker.commands.refusals import RequestRefusedError
from slipstream.broker.commands.waiting import ENGINES, LEARNER, LogThread, Waiters
from slipstream.broker.listening.gate import limit_of
from slipstream.broker.listening.http import HttpServer
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.commands import (
    CommandFailed,
    CreateModel,
    LoadWeights,
    LoraSpec,
    Losses,
    Sampled,
    Saved,
    SaveWeights,
    Stepped,
)
from slipstream.wire.process.rate_limited_log import RateLimitedLog

_log = logging.getLogger(__name__)
_MAX_BODY_BYTES = 64 * 2**20
_WAIT_S = 25.0  # wait for a result; the SDK gives up after 45 s
_CALLS = 512  # calls of a tenant at a time
_CLONES = 1_000_000_000  # numbers of each copy of a sampling client
_SHARE = 1 / 2  # part of all descriptors that tenants may use
_PROTOBUF = "application/x-protobuf"
_V1 = "/api/v1"
_NOTE = (
    "train_unembed is taken and has no effect: adapters of the output layer are not trained here"
)
_Saving = Literal["training", "sampler"]
Handler = Callable[[web.Request, str], Awaitable[web.StreamResponse]]


class CommandSite:
    """Listens for tenants."""

    def __init__(
        self,
        log: CommandLog,
        thread: LogThread,
        waiters: Waiters,
        keys: TenantKeys,
        model: asks.ServedModel,
        *,
        wait_s: float = _WAIT_S,
    ) -> None:
        """Prepare to serve; ``wait_s`` is the longest wait of a request for a result."""
        self._wait_s = wait_s
        self._log = log
        self._thread = thread
        self._waiters = waiters
        self._keys = keys
        self._model = model
        self._rarely = RateLimitedLog(_log)
        self._fetched: dict[
            str, set[str]
        ] = {}  # results by tenant, to be noted with the next clean-up
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_in_sdks_form])
        for path, handler in {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "telemetry": self._telemetry,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "unload_model": self._unload_model,
            "forward_backward": self._forward_backward,
            "optim_step": self._numbered(self._optim_step),
            "save_weights": self._numbered(self._save_weights),
            "save_weights_for_sampler": self._numbered(self._save_for_sampler),
            "load_weights": self._numbered(self._load_weights),
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "join_sampling_session": self._join_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "retrieve_futures": self._retrieve_several,
            "cancel_future": self._cancel,
            "sessions/{session}/finish": self._finish,
        }.items():
            app.router.add_post(f"{_V1}/{path}", self._authenticated(handler))
        for path, handler in {
            "get_server_capabilities": self._capabilities,
            "healthz": self._health,
            "training_runs": self._training_runs,
            "training_runs/{model}": self._training_run,
            "training_runs/{model}/checkpoints": self._checkpoints,
            "checkpoints": self._checkpoints,
            "samplers/{sampler}": self._get_sampler,
            "sessions/{session}": self._get_session,
        }.items():
            app.router.add_get(f"{_V1}/{path}", self._authenticated(handler))
        checkpoint = f"{_V1}/training_runs/{{model}}/checkpoints/{{checkpoint:.+}}"
        app.router.add_put(f"{checkpoint}/ttl", self._authenticated(self._set_ttl))
        app.router.add_delete(checkpoint, self._authenticated(self._delete_checkpoint))
        self._http = HttpServer(app, limit_of(_SHARE), what="the command server", shutdown_s=1.0)

    async def open(self, host: str, port: int) -> tuple[str, int]:
        """Listen; return where.

        Raises:
            OSError: the address cannot be bound.
        """
        return await self._http.open(host, port)

    async def close(self) -> None:
        """Stop listening."""
        await self._http.close()

    async def note_fetched(self) -> None:
        """Note results that were fetched since the last call."""
        fetched, self._fetched = self._fetched, {}
        for tenant, requests in fetched.items():
            await self._thread(self._log.fetched, tenant, requests, now=time.time())

    def _authenticated(
        self, handler: Handler
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            tenant = self._keys.tenant(request.headers.get("X-API-Key", ""))
            if not tenant:
                return _refusal(401, "no such key (X-API-Key)")
            if not self._http.admits(tenant, request.transport, calls_at_a_time=_CALLS):
                response = _refusal(429, "too many connections of one tenant")
                response.force_close()
                return response
            try:
                return await handler(request, tenant)
            except sqlite3.Error as error:  # a full disk, maybe: the SDK comes again
                self._rarely.say("a request is not carried out: %s", error)
                return _refusal(503, f"the log of commands is out of order: {error}")

        return handle

    def _numbered(self, handler: Handler) -> Handler:
        """Have a command that is refused use its number up: those behind it wait for none."""

        async def handle(request: web.Request, tenant: str) -> web.StreamResponse:
            try:
                return await handler(request, tenant)
            except RequestRefusedError as error:
                named = asks.number_of(await request.read())
                if error.status in {400, 404} and named is not None:
                    refused = Ask(tenant, *named, "forward", b"", b"")
                    await self._thread(self._log.refuse, refused, str(error), now=time.time())
                    self._waiters.wake(LEARNER)
                raise

        return handle

    # ---- the client ----------------------------------------------------------------------------

    async def _client_config(self, _request: web.Request, _tenant: str) -> web.StreamResponse:
        return web.json_response(
            {
                "pjwt_auth_enabled": False,
                "parallel_fwdbwd_chunks": True,
                "sample_use_retrieve_futures": True,
                "sample_join_sampling_session": True,
                "sample_max_concurrent_requests": _CALLS,
            }
        )

    async def _dynamic_config(self, _request: web.Request, _tenant: str) -> web.StreamResponse:
        return web.json_response({"sample_cancel_enabled": True})

    async def _capabilities(self, _request: web.Request, _tenant: str) -> web.StreamResponse:
        served = {
            "model_name": self._model.name,
            "max_context_length": self._model.longest,
            "trainable": True,
            "sampleable": True,
        }
        return web.json_response({"supported_models": [served]})

    async def _health(self, _request: web.Request, _tenant: str) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def _telemetry(self, _request: web.Request, _tenant: str) -> web.StreamResponse:
        return web.json_response({"status": "accepted"})  # and forgotten

    async def _create_session(self, request: web.Request, tenant: str) -> web.StreamResponse:
        body = await request.read()
        asks.read(body, asks.CreateSessionRequest)
        key = request.headers.get("X-Idempotency-Key", "")[:200] or str(uuid.uuid4())
        session = await self._thread(
            self._log.open_session, tenant, str(uuid.uuid4()), key, body, now=time.time()
        )
        return web.json_response(
            {"type": "create_session", "session_id": session, "info_message": _NOTE}
        )

    async def _heartbeat(self, request: web.Request, tenant: str) -> web.StreamResponse:
        asked = asks.read(await request.read(), asks.OfSession)
        await self._thread(self._log.touch, tenant, asked.session_id, now=time.time())
        return web.json_response({"type": "session_heartbeat"})

    async def _finish(self, request: web.Request, tenant: str) -> web.StreamResponse:
        session = request.match_info["session"]
        await self._thread(
            self._log.end_session, tenant, session, "its client finished it", now=time.time()
        )
        self._waiters.wake_all()
        return web.json_response({})

    async def _get_session(self, request: web.Request, tenant: str) -> web.StreamResponse:
        session = request.match_info["session"]
        info, models, samplers = await self._thread(self._log.session_info, tenant, session)
        opened = msgspec.json.decode(info, type=asks.CreateSessionRequest)
        metadata = {str(k): str(v) for k, v in (opened.user_metadata or {}).items()}
        return web.json_response(
            {
                "training_run_ids": models,
                "sampler_ids": samplers,
                "user_metadata": metadata,
                "display_name": opened.display_name,
            }
        )

    # ---- models --------------------------------------------------------------------------------

    async def _create_model(self, request: web.Request, tenant: str) -> web.StreamResponse:
        body = await request.read()
        asked = asks.read(body, asks.CreateModelRequest)
        spec = asks.spec_of(asked, self._model)
        model = asks.model_id(asked.session_id, asked.model_seq_id)
        ask = Ask(tenant, model, 0, "create", asks.hash_of(body), encode(CreateModel(spec=spec)))
        return await self._made(ask, asked.session_id, spec)

    async def _made(self, ask: Ask, session: str, spec: LoraSpec) -> web.StreamResponse:
        future = await self._thread(self._log.make_model, ask, session, spec, now=time.time())
        self._waiters.wake(LEARNER)
        return web.json_response({"request_id": future, "model_id": ask.target})

    async def _load_weights(self, request: web.Request, tenant: str) -> web.StreamResponse:
        body, now = await request.read(), time.time()
        asked = asks.read(body, asks.LoadWeightsRequest)
        asks.refuse_other_model(asked.base_model, self._model)
        asks.refuse_other_optimizer(asked.optimizer_config)
        row, spec = await self._thread(
            self._log.checkpoint, tenant, asked.path, "training", now=now
        )
        load = LoadWeights(spec=spec, digest=row["digest"], with_optimizer=asked.optimizer)
        if asked.session_id is not None and asked.model_seq_id is not None:
            model = asks.model_id(asked.session_id, asked.model_seq_id)
            ask = Ask(tenant, model, 0, "create", asks.hash_of(body), encode(load))
            return await self._made(ask, asked.session_id, spec)
        if asked.model_id is None or asked.seq_id is None:
            raise RequestRefusedError(400, "session_id and model_seq_id are needed")
        _, own = await self._thread(self._log.model, tenant, asked.model_id)
        if (own.rank, own.alpha, own.targets) != (spec.rank, spec.alpha, spec.targets):
            raise RequestRefusedError(
                400, f"{asked.path} has adapters of rank {spec.rank} of other layers or rank"
            )
        return await self._accepted(
            tenant, asked.model_id, asked.seq_id, "create", body, encode(load)
        )

    async def _accepted(
        self,
        tenant: str,
        model: str,
        number: int,
        kind: Kind,
        asked: bytes,
        body: bytes,
        *,
        reason: str = "",
        details: SaveDetails | None = None,
    ) -> web.StreamResponse:
        """Answer a numbered command of a model: with its future, or the reason of its refusal."""
        if not number:
            raise RequestRefusedError(400, f"seq_id must be 1 or more, got {number}")
        ask = Ask(tenant, model, number, kind, asks.hash_of(asked), body, details)
        if reason:
            await self._thread(self._log.refuse, ask, reason, now=time.time())
            self._waiters.wake(LEARNER)
            raise RequestRefusedError(400, reason)
        future = await self._thread(self._log.accept, ask, now=time.time())
        self._waiters.wake(LEARNER)
        return web.json_response({"request_id": future, "model_id": model})

    async def _forward_backward(self, request: web.Request, tenant: str) -> web.StreamResponse:
        body = await request.read()
        if request.content_type != _PROTOBUF:
            raise RequestRefusedError(
                400, f"content type {request.content_type}: {_PROTOBUF} is read"
            )
        model, number, command = await asyncio.to_thread(asks.read_forward, body, self._model)
        if isinstance(command, str):
            return await self._accepted(tenant, model, number, "forward", body, b"", reason=command)
        kind: Kind = "backward" if command.backward else "forward"
        return await self._accepted(tenant, model, number, kind, body, encode(command))

    async def _optim_step(self, request: web.Request, tenant: str) -> web.StreamResponse:
        body = await request.read()
        asked = asks.read(body, asks.OptimStepRequest)
        data = encode(asks.step_of(asked))
        return await self._accepted(tenant, asked.model_id, asked.seq_id, "step", body, data)

    async def _save_weights(self, request: web.Request, tenant: str) -> web.StreamResponse:
        return await self._save(request, tenant, "training")

    async def _save_for_sampler(self, request: web.Request, tenant: str) -> web.StreamResponse:
        return await self._save(request, tenant, "sampler")

    async def _save(self, request: web.Request, tenant: str, kind: _Saving) -> web.StreamResponse:
        body = await request.read()
        asked, sampler = asks.read(body, asks.SaveWeightsRequest), ""
        row, _ = await self._thread(self._log.model, tenant, asked.model_id)
        name = asks.name_of_save(asked)
        folder = "weights" if kind == "training" else "sampler_weights"
        path = f"tinker://{asked.model_id}/{folder}/{name}" if name else ""
        if asked.sampling_session_seq_id is not None:
            sampler = asks.sampler_id(row["session"], asked.sampling_session_seq_id)
        details = SaveDetails(
            path=path,
            kind=kind,
            overwrite=asked.overwrite or kind == "sampler",
            sampler=sampler,
            ttl_s=asked.ttl_seconds,
            info=asked.user_metadata or {},
        )
        # The SDK numbers samplers anew when it repeats a request: the first number counts.
        same = msgspec.structs.replace(asked, sampling_session_seq_id=int(bool(sampler)))
        return await self._accepted(
            tenant,
            asked.model_id,
            asked.seq_id,
            "save",
            msgspec.json.encode((kind, same)),
            encode(SaveWeights(kind=kind)),
            details=details,
        )

    async def _get_info(self, request: web.Request, tenant: str) -> web.StreamResponse:
        asked = asks.read(await request.read(), asks.OfModel)
        _, spec = await self._thread(self._log.model, tenant, asked.model_id)
        name = self._model.name
        return web.json_response(
            {
                "type": "get_info",
                "model_data": {"model_name": name, "tokenizer_id": name},
                "model_id": asked.model_id,
                "is_lora": True,
                "lora_rank": spec.rank,
                "model_name": name,
            }
        )

    async def _unload_model(self, request: web.Request, tenant: str) -> web.StreamResponse:
        asked = asks.read(await request.read(), asks.OfModel)
        await self._thread(self._log.unload, tenant, asked.model_id, now=time.time())
        self._waiters.wake_all()
        return web.json_response({"model_id": asked.model_id, "type": "unload_model"})

    # ---- checkpoints ---------------------------------------------------------------------------

    async def _weights_info(self, request: web.Request, tenant: str) -> web.StreamResponse:
        asked = asks.read(await request.read(), asks.PathRequest)
        _, spec = await self._thread(
            self._log.checkpoint, tenant, asked.tinker_path, now=time.time()
        )
        return web.json_response(
            {"base_model": self._model.name, "is_lora": True, "lora_rank": spec.rank}
        )

    async def _checkpoints(self, request: web.Request, tenant: str) -> web.StreamResponse:
        model = request.match_info.get("model", "")
        if model:
            await self._thread(self._log.model, tenant, model)
        rows = await self._thread(self._log.checkpoints, tenant, model)
        offset, limit = _page(request)
        page = [_checkpoint(row) for row in rows[offset : offset + limit]]
        cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
        return web.json_response({"checkpoints": page, "cursor": cursor})

    async def _delete_checkpoint(self, request: web.Request, tenant: str) -> web.StreamResponse:
        path = "tinker://{model}/{checkpoint}".format_map(request.match_info)
        await self._thread(self._log.delete_checkpoint, tenant, path, now=time.time())
        return web.json_response({})

    async def _set_ttl(self, request: web.Request, tenant: str) -> web.StreamResponse:
        path = "tinker://{model}/{checkpoint}".format_map(request.match_info)
        asked = asks.read(await request.read(), asks.TtlRequest)
        await self._thread(self._log.set_ttl, tenant, path, asked.ttl_seconds, now=time.time())
        return web.json_response({})

    async def _training_runs(self, request: web.Request, tenant: str) -> web.StreamResponse:
        rows = await self._thread(self._log.models, tenant)
        offset, limit = _page(request)
        runs = [await self._run_of(row, tenant) for row in rows[offset : offset + limit]]
        cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
        return web.json_response({"training_runs": runs, "cursor": cursor})

    async def _training_run(self, request: web.Request, tenant: str) -> web.StreamResponse:
        row, _ = await self._thread(self._log.model, tenant, request.match_info["model"])
        return web.json_response(await self._run_of(row, tenant))

    async def _run_of(self, row: Any, tenant: str) -> dict[str, Any]:  # noqa: ANN401 a row
        spec = msgspec.msgpack.decode(row["spec"], type=LoraSpec)
        saved = await self._thread(self._log.checkpoints, tenant, row["id"])
        newest = {kind: next((c for c in saved if c["kind"] == kind), None) for kind in _KINDS}
        return {
            "training_run_id": row["id"],
            "base_model": self._model.name,
            "model_owner": tenant,
            "is_lora": True,
            "lora_rank": spec.rank,
            "last_request_time": _time(row["seen"]),
            **{_KINDS[kind]: c and _checkpoint(c) for kind, c in newest.items()},
        }

    # ---- samples -------------------------------------------------------------------------------

    async def _create_sampler(self, request: web.Request, tenant: str) -> web.StreamResponse:
        asked = asks.read(await request.read(), asks.CreateSamplerRequest)
        asks.refuse_other_model(asked.base_model, self._model)
        sampler = asks.sampler_id(asked.session_id, asked.sampling_session_seq_id)
        path = asked.model_path or ""
        if not path and asked.base_model is None:
            raise RequestRefusedError(400, "base_model or model_path is needed")
        await self._thread(
            self._log.open_sampler, tenant, asked.session_id, sampler, path, now=time.time()
        )
        return web.json_response(
            {"type": "create_sampling_session", "sampling_session_id": sampler}
        )

    async def _join_sampler(self, request: web.Request, tenant: str) -> web.StreamResponse:
        asked = asks.read(await request.read(), asks.OfSampler)
        number = await self._thread(self._log.join_sampler, tenant, asked.sampling_session_id)
        return web.json_response({"type": "join_sampling_session", "client_counter": number})

    async def _get_sampler(self, request: web.Request, tenant: str) -> web.StreamResponse:
        row = await self._thread(self._log.sampler, tenant, request.match_info["sampler"])
        return web.json_response(
            {
                "sampler_id": row["id"],
                "base_model": self._model.name,
                "model_path": row["path"] or None,
            }
        )

    async def _sample(self, request: web.Request, tenant: str) -> web.StreamResponse:
        body = await request.read()
        asked = asks.read(body, asks.SampleRequest)
        row = await self._thread(self._log.sampler, tenant, asked.sampling_session_id)
        sample = asks.sample_of(asked, row["version"], self._model)
        hashed = asks.hash_of(body)
        ask = Ask(tenant, row["id"], asked.seq_id, "sample", hashed, encode(sample))
        future = await self._thread(self._log.accept, ask, now=time.time())
        self._waiters.wake(ENGINES)
        label = row["version"] or "base"
        ids = [f"{label}/{future}/{number}" for number in range(asked.num_samples)]
        return web.json_response({"request_id": future, "sample_sequence_ids": ids})

    # ---- futures -------------------------------------------------------------------------------

    async def _retrieve(self, request: web.Request, tenant: str) -> web.StreamResponse:
        asked = asks.read(await request.read(), asks.FutureRequest)
        name, loop = asked.request_id, asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s
        event = self._waiters.entered(name)
        try:
            while True:
                event.clear()
                future = await self._thread(self._log.future, tenant, name)
                if future.outcome is not None or future.expired or loop.time() >= deadline:
                    break
                try:
                    async with asyncio.timeout_at(deadline):
                        await event.wait()
                except TimeoutError:
                    continue
        finally:
            self._waiters.leave(name, event)
        if future.expired:
            return _refusal(410, f"{name}: {future.expired}")
        if future.outcome is None:
            waits = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return web.json_response(waits, status=408)
        self._fetched.setdefault(tenant, set()).add(name)
        return _answer(future)

    async def _retrieve_several(self, request: web.Request, tenant: str) -> web.StreamResponse:
        asked = asks.read(await request.read(), asks.FuturesRequest)
        target, loop = asked.target, asyncio.get_running_loop()
        sampler, clone = target.sampling_session_id, target.cloned_sampler_id
        await self._thread(self._log.sampler, tenant, sampler)
        most = self._wait_s
        wait_s = most if asked.timeout is None else min(asked.timeout, most)
        deadline = loop.time() + wait_s
        event = self._waiters.entered(sampler)
        try:
            while True:
                event.clear()
                ended = await self._thread(
                    self._log.completions, tenant, sampler, clone, asked.prev_cursor, block=_CLONES
                )
                if ended or loop.time() >= deadline:
                    break
                try:
                    async with asyncio.timeout_at(deadline):
                        await event.wait()
                except TimeoutError:
                    continue
        finally:
            self._waiters.leave(sampler, event)
        done = [
            {"state": "failed", "request_id": name}
            if failed
            else {
                "state": "finished",
                "request_id": name,
                "response_payload_uncompressed_size": size,
            }
            for _, name, failed, size in ended
        ]
        cursor = ended[-1][0] if ended else asked.prev_cursor
        return web.json_response({"completions": done, "cursor": cursor})

    async def _cancel(self, request: web.Request, tenant: str) -> web.StreamResponse:
        asked = asks.read(await request.read(), asks.FutureRequest)
        await self._thread(self._log.cancel, tenant, asked.request_id, now=time.time())
        self._waiters.wake(asked.request_id, ENGINES)
        return web.json_response({})


_KINDS = {"training": "last_checkpoint", "sampler": "last_sampler_checkpoint"}


def _answer(future: Future) -> web.StreamResponse:
    """Return the outcome of a command as the SDK reads it."""
    details = future.details
    match future.outcome:
        case CommandFailed(reason=reason, category=category):
            return web.json_response({"error": reason, "category": category})
        case Losses() as losses:
            return web.Response(body=write_losses(losses), content_type=_PROTOBUF)
        case Sampled() as sampled:
            response = web.Response(body=write_sampled(sampled), content_type=_PROTOBUF)
            response.headers["X-Slipstream-Version"] = sampled.version or "base"
            return response
        case Stepped(metrics=metrics):
            return web.json_response({"metrics": metrics})
        case Saved() if details is not None and details.kind == "training":
            return web.json_response({"path": details.path, "type": "save_weights"})
        case Saved() if details is not None:
            saved = {"path": details.path or None, "sampling_session_id": details.sampler or None}
            return web.json_response(saved | {"type": "save_weights_for_sampler"})
    return web.json_response({"model_id": future.target})  # a model was made or loaded


def _checkpoint(row: Any) -> dict[str, Any]:  # noqa: ANN401 a row
    return {
        "checkpoint_id": row["path"].removeprefix(f"tinker://{row['model']}/"),
        "checkpoint_type": row["kind"],
        "time": _time(row["made"]),
        "tinker_path": row["path"],
        "size_bytes": row["size"],
        "user_metadata": msgspec.msgpack.decode(row["info"]),
        "expires_at": None if row["expires"] is None else _time(row["expires"]),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _page(request: web.Request) -> tuple[int, int]:
    try:
        offset = int(request.query.get("offset", "0"))
        limit = int(request.query.get("limit", "100"))
    except ValueError as error:
        raise RequestRefusedError(400, f"offset and limit are numbers: {error}") from error
    return min(max(0, offset), 10**9), min(max(1, limit), 1000)


@web.middleware
async def _in_sdks_form(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer what is refused with its status and a reason in JSON."""
    try:
        return await handler(request)
    except RequestRefusedError as error:
        return _refusal(error.status, str(error))
    except web.RequestPayloadError as error:
        return _refusal(400, f"the body cannot be read: {error}")
    except web.HTTPException as error:
        what = "is not supported here" if error.status == 404 else error.reason
        return _refusal(error.status, f"{request.method} {request.path[:200]}: {what}")


def _refusal(status: int, reason: str) -> web.Response:
    return web.json_response({"detail": reason}, status=status)
