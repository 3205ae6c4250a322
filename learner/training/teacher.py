"""A teacher behind an SGLang server: its log-probabilities of the tokens of a batch, over HTTP.

One rank of each model replica sends requests and broadcasts the answers. The server only reads
prompts (``max_new_tokens = 0``) and answers with the log-probability of their tokens at temperature
1 and over its whole vocabulary: learner/training/algorithm.py refuses runs with other sampling.

Shapes: T tokens of B sequences laid end to end.
"""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.algos.choice import TeacherOptions
from slipstream.learner.batches.packing import PackedBatch
from slipstream.learner.config import refuse_no_address
from slipstream.learner.model.collectives import any_rank
from slipstream.wire.errors import ConfigError, EngineError, PeerLostError
from slipstream.wire.files.keys import read_private
from slipstream.wire.process.safe_text import visible
from slipstream.wire.unreadable import UNREADABLE

if TYPE_CHECKING:
    from slipstream.learner.model.topology import Topology

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0  # before a failed request is retried
_ROUND_S = 1.0  # interval in which waiting ranks learn that no answer has come yet
_COME_AGAIN = (408, 429)  # status codes of a server that is not ready
_MOST_BYTES, _MOST_BYTES_OF_TOKEN = 1 << 20, 256  # limits of an answer
_SHOWN_CHARACTERS = 200
_ABOVE_0 = 1e-3  # nats: rounding error of the log-probability of a certain token
_LEAST = -1e6  # nats: no logits are so far apart, and squares of it are finite in float32


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, str | None]] = []


class _Reply(msgspec.Struct):
    meta_info: _Meta


class EndpointTeacher:
    """A policy that another machine serves."""

    def __init__(
        self, options: TeacherOptions, topology: "Topology", *, vocab_size: int, timeout_s: float
    ) -> None:
        """Send one test request, so that a wrong server is noticed at the start.

        SGLang does not report the size of its vocabulary, and ends if it gets an unknown token: the
        user is responsible for equal tokens of teacher and policy. While the server does not
        answer, a request is retried for ``timeout_s``.

        Raises:
            ConfigError: the address or the key is wrong, or the server is not SGLang.
            PeerLostError: no answer came.
        """
        refuse_no_address(options.endpoint)
        self._url = options.endpoint.rstrip("/") + "/generate"
        self._last_token = vocab_size - 1
        self._concurrency = options.concurrency
        self._timeout_s = timeout_s
        self._headers = {}
        self._key = b""
        if options.api_key_file:
            key = read_private(Path(options.api_key_file), "algo.teacher.api_key_file").strip()
            if not key or not key.isprintable():
                raise ConfigError(
                    f"{options.api_key_file} (algo.teacher.api_key_file) holds no line that is a "
                    "bearer token"
                )
            self._headers["Authorization"] = f"Bearer {key}"
            self._key = key.encode()
        self._topology = topology
        self._asks = topology.leads_replica
        self._thread = ThreadPoolExecutor(1, "teacher")
        if self._asks:
            try:
                asyncio.run(self._all([([0, 0], 1)]))
            except EngineError as error:
                raise ConfigError(f"the teacher cannot be used: {error}") from error

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return the log-probabilities [T] per microbatch, 0.0 outside the loss mask.

        Every rank calls this; all wait until the requesting ranks are done, and fail together.

        Raises:
            PeerLostError: the server did not answer for ``timeout_s``.
            EngineError: it answered with an error, or about other tokens.
            ConfigError: tokens were sampled from another distribution than its answers'.
        """
        result = [torch.zeros_like(batch.behavior_logprobs) for batch in batches]
        asked = self._thread.submit(self._fill, batches, result) if self._asks else None
        while any_rank(asked is not None and not asked.done()):
            if asked is not None:  # the other ranks wait in the line above
                wait([asked], _ROUND_S)
        failure = None if asked is None else asked.exception()
        if any_rank(failure is not None):
            raise failure or EngineError("another rank of the learner was not answered")
        if self._topology.sizes.per_replica > 1:
            for values in result:
                dist.broadcast(
                    values, src=self._topology.replica_leader, group=self._topology.replica_group
                )
        return result

    def _fill(self, batches: Sequence[PackedBatch], result: Sequence[Tensor]) -> None:
        """Request the tokens of batches and put the answers into tensors [T]."""
        for batch in batches:
            _refuse_other_distribution(batch)
        questions = [  # (tokens, start of the first chosen) of each sequence with a chosen token
            (batch.token_ids[span].tolist(), int(batch.loss_mask[span].int().argmax()))
            for batch in batches
            for span in _asked_spans(batch)
        ]
        answers = iter(asyncio.run(self._all(questions)))
        for batch, values in zip(batches, result, strict=True):
            for span in _asked_spans(batch):
                answer = torch.tensor(next(answers), dtype=values.dtype, device=values.device)
                values[span.stop - len(answer) : span.stop] = answer
            values.masked_fill_(~batch.loss_mask, 0.0)

    async def _all(self, questions: Sequence[tuple[list[int], int]]) -> list[list[float]]:
        """Return the log-probability of each token from ``start`` on, of each (tokens, start)."""
        gate = asyncio.Semaphore(self._concurrency)
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        connector = aiohttp.TCPConnector(limit=self._concurrency)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, headers=self._headers
        ) as session:

            async def one(tokens: list[int], start: int) -> list[float]:
                async with gate:
                    return await self._asked(session, tokens, start)

            try:
                async with asyncio.TaskGroup() as tasks:
                    asked = [tasks.create_task(one(*question)) for question in questions]
            except ExceptionGroup as several:
                raise several.exceptions[0] from None
            return [task.result() for task in asked]

    async def _asked(
        self, session: aiohttp.ClientSession, tokens: list[int], start: int
    ) -> list[float]:
        question = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": max(start - 1, 0),  # the first token in range has no logprob
        }
        given_up = time.monotonic() + self._timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            status, body = await self._posted(session, question)
            if status == 200:
                return self._values(body, tokens[start:])
            trouble = f"HTTP {status}: " * (status > 0) + self._shown(body)
            if 0 < status < 500 and status not in _COME_AGAIN:
                raise EngineError(
                    f"the teacher at {self._url} (algo.teacher.endpoint) answered {trouble}"
                )
            if time.monotonic() + pause_s > given_up:
                raise PeerLostError(
                    f"the teacher at {self._url} (algo.teacher.endpoint) did not answer for "
                    f"{self._timeout_s:g} s (learner.timeout_s): {trouble}"
                )
            _log.warning("the teacher at %s: %s; asked again", self._url, trouble)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _posted(
        self, session: aiohttp.ClientSession, question: dict[str, Any]
    ) -> tuple[int, bytes]:
        """Return status and body of the answer; 0 and the reason, if no answer came."""
        try:
            async with session.post(self._url, json=question, allow_redirects=False) as reply:
                return reply.status, await _read(reply, len(question["input_ids"]))
        except aiohttp.ClientSSLError as error:
            raise ConfigError(
                f"the teacher at {self._url} (algo.teacher.endpoint) cannot be trusted: {error}"
            ) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            return 0, f"{type(error).__name__}: {error}".encode()

    def _shown(self, body: bytes) -> str:
        """Return a line of the reply, without the key, which the server may repeat."""
        if self._key:
            body = body.replace(self._key, b"(key)")
        line = visible(" ".join(body.decode(errors="replace").split()))
        return line if len(line) <= _SHOWN_CHARACTERS else line[:_SHOWN_CHARACTERS] + "..."

    def _values(self, body: bytes, tokens: Sequence[int]) -> list[float]:
        """Return the log-probabilities of these tokens, the last ones of the request.

        Raises:
            EngineError: the reply is about other tokens, or holds an invalid log-probability.
        """
        try:
            found = msgspec.json.decode(body, type=_Reply).meta_info.input_token_logprobs
        except UNREADABLE as error:
            raise EngineError(
                f"the teacher's reply ({self._url}) cannot be read: {error}: {self._shown(body)}"
            ) from error
        found = found[-len(tokens) :]
        if len(found) != len(tokens) or not all(
            # SGLang reports the vocabulary's last token as 0, but with its own logprob.
            token == asked or (token == 0 and asked == self._last_token)
            for (_, token, _), asked in zip(found, tokens, strict=True)
        ):
            raise EngineError(
                f"the teacher ({self._url}) was asked about {len(tokens)} tokens and answered "
                f"about others ({len(found)} of them)"
            )
        values = [math.nan if value is None else value for value, _, _ in found]
        for value in values:
            if not _LEAST <= value <= _ABOVE_0:
                raise EngineError(
                    f"the teacher ({self._url}) answered with a log-probability of {value:g}"
                )
        return values


def _asked_spans(batch: PackedBatch) -> list[slice]:
    spans = [slice(first, last) for first, last in pairwise(batch.cu_seqlens.tolist())]
    return [span for span in spans if batch.loss_mask[span].any()]


def _refuse_other_distribution(batch: PackedBatch) -> None:
    """Refuse tokens that were not sampled at temperature 1 from the whole vocabulary.

    Raises:
        ConfigError: they were not; the message names the policy they were sampled from.
    """
    temperatures = batch.temperature[batch.loss_mask]
    if bool((temperatures != 1.0).any()):
        raise ConfigError(
            "algo.teacher.endpoint answers with log-probabilities at temperature 1; these answers "
            f"were sampled at {float(temperatures[temperatures != 1.0][0]):g}"
        )
    if batch.end_barred is not None and bool(batch.end_barred.any()):
        raise ConfigError(
            "algo.teacher.endpoint has log-probabilities over the whole vocabulary, and these "
            "answers were not allowed to end at first (min_response_tokens)"
        )


async def _read(reply: aiohttp.ClientResponse, num_tokens: int) -> bytes:
    """Return the body of an answer about ``num_tokens``.

    Raises:
        EngineError: the body is longer than any such answer.
    """
    most, body = _MOST_BYTES + _MOST_BYTES_OF_TOKEN * num_tokens, bytearray()
    async for part in reply.content.iter_any():
        body += part
        if len(body) > most:
            raise EngineError(f"the teacher's answer about {num_tokens} tokens is too long")
    return bytes(body)
